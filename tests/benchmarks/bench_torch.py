"""Host time of hqarray.interop.torch on a GPU: parts as tensors and back, and what autograd adds to a linear layer.

    python tests/benchmarks/bench_torch.py [--rounds 15] [--json FILE]

Matrices of 128^3, so that the queue never fills. A step's added time is that of torch.autograd.grad over linear less
that of the same quantize and matmul calls on CuPy arrays, in one process, alternating: with backward in autograd's
thread of the device, as torch does by default, and in the caller's (torch.autograd.set_multithreading_enabled(False)).
Beside it what an autograd function that does nothing takes, and torch's own linear.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import cupy
import torch

import hqarray as hq
from hqarray.interop import torch as hqt
from hqarray.interop.torch_arrays import as_array

Launch = Callable[[], object]


def host_microseconds(launches: dict[str, Launch], rounds: int, count: int = 100) -> dict[str, float]:
    """Median over rounds of the wall time of a call, all of them alternating; the queue is emptied between."""
    times: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(rounds + 2):
        for name, launch in launches.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                launch()
            times[name].append((time.perf_counter() - start) / count * 1e6)
    return {name: round(statistics.median(values[2:]), 1) for name, values in times.items()}


def parts(name: str, rounds: int) -> dict[str, float]:
    x = torch.randn(128, 128, device="cuda")
    array = hq.quantize(cupy.asarray(x), rowwise=name)
    with hqt.on_torch("cuda"):
        torchs = hq.quantize(as_array(x), rowwise=name)
    tensors = hqt.to_torch(array.rowwise)
    return host_microseconds({
        "to_torch, CuPy's memory": lambda: hqt.to_torch(array.rowwise),
        "to_torch, torch's memory": lambda: hqt.to_torch(torchs.rowwise),
        "from_torch": lambda: hqt.from_torch(tensors, format=name),
    }, rounds)


def steps(name: str, rounds: int) -> dict[str, float]:
    x, w, dy = (torch.randn(128, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    arrays = [as_array(tensor) for tensor in (x, w, dy)]
    for tensor in (x, w):
        tensor.requires_grad_()

    def ours() -> object:
        return torch.autograd.grad(hqt.linear(x, w, name), (x, w), dy)

    def in_one_thread() -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return ours()

    def empty() -> object:
        return torch.autograd.grad(Empty.apply(x, w), (x, w), dy)

    def empty_in_one_thread() -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return empty()

    def calls() -> object:
        _, saved = hq.linear_forward(arrays[0], arrays[1], name)
        return hq.linear_backward(arrays[2], saved)

    def torchs() -> object:
        return torch.autograd.grad(torch.nn.functional.linear(x, w), (x, w), dy)

    times = host_microseconds({
        "linear": ours, "linear, one thread": in_one_thread, "quantize and matmul": calls, "empty function": empty,
        "empty function, one thread": empty_in_one_thread, "torch's linear": torchs,
    }, rounds)
    return times | {f"added{way}": round(times[f"linear{way}"] - times["quantize and matmul"], 1)
                    for way in ("", ", one thread")}


class Empty(torch.autograd.Function):  # type: ignore[misc]
    """Keeps two tensors, as linear does, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, w = ctx.saved_tensors
        return x, w


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cupy": metadata.version("cupy-cuda13x"),
        "parts, us": {name: parts(name, options.rounds) for name in ("fp8_e4m3", "mxfp8", "nvfp4")},
        "steps, us": {name: steps(name, options.rounds) for name in ("fp8", "fp8_block", "mxfp8")},
    }
    text = json.dumps(results, indent=2)
    print(text)
    if options.json:
        with open(options.json, "w") as file:
            file.write(text)


if __name__ == "__main__":
    main()
