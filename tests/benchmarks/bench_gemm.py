"""matmul on the GPU beside torch, in one process: products, a linear layer's step, and time on the host.

    python tests/benchmarks/bench_gemm.py [--sizes 4096 8192] [--rounds 9] [--json FILE]

Random bf16 data, out given. Native FP8 against torch._scaled_mm on the same codes and scales; everything else against
torch's bf16 matmul of the same shape, decoding included. Runs of both alternate between events on one stream; a ratio
is torch's time over ours, the median over rounds. Host: wall time of a call of 128^3 while the queue is not full.
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
import numpy as np
import torch

import hqarray as hq
from hqarray import cublaslt
from hqarray.formats import BFLOAT16

Launch = Callable[[], object]

NATIVE = (("fp8_e4m3", "fp8_e4m3"), ("fp8_block_1x128", "fp8_block_1x128"), ("fp8_block_1x128", "fp8_block_128x128"))
OTHERS = (("bf16", "bf16"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("mxfp8", "nvfp4"), ("fp8_e5m2", "fp8_e5m2"),
          ("fp8_block_1x128", "mxfp8"))
RECIPES = ("fp8", "fp8_block", "mxfp8_forward_nvfp4_backward")


def values(shape: tuple[int, int], seed: int) -> cupy.ndarray:
    return cupy.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(BFLOAT16)


def as_torch(array: cupy.ndarray) -> torch.Tensor:
    """bf16 CuPy array as a tensor over the same memory."""
    return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)


def alternated(ours: Launch, theirs: Launch, rounds: int, count: int) -> tuple[float, float, float]:
    """Median microseconds of a launch of ours and of theirs, and the median ratio of neighbours."""
    times: list[tuple[float, float]] = []
    for launch in (ours, theirs):
        for _ in range(3):
            launch()
    for _ in range(rounds):
        pair = []
        for launch in (ours, theirs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                launch()
            end.record()
            end.synchronize()
            pair.append(start.elapsed_time(end) / count * 1e3)
        times.append((pair[0], pair[1]))
    return (statistics.median(a for a, _ in times), statistics.median(b for _, b in times),
            statistics.median(b / a for a, b in times))


def scaled_mm(a: hq.HybridArray, b: hq.HybridArray) -> Launch:
    """torch's product of the same codes and scales, with a bf16 result."""
    left, right = (torch.from_dlpack(x.rowwise.codes).view(torch.float8_e4m3fn) for x in (a, b))
    scale_a, scale_b = (torch.from_dlpack(x.rowwise.scales) for x in (a, b))
    if a.rowwise.format.storage.block is None:
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    else:
        scale_b = scale_b.t()
    return lambda: torch._scaled_mm(left, right.t(), scale_a, scale_b, out_dtype=torch.bfloat16)


def product(n: int, left: str, right: str, rounds: int) -> dict[str, Any]:
    x, w, out = values((n, n), 0), values((n, n), 1), cupy.empty((n, n), BFLOAT16)
    a, b = hq.quantize(x, rowwise=left), hq.quantize(w, rowwise=right)
    turned = b.T
    theirs: Launch
    if (left, right) in NATIVE:
        theirs = scaled_mm(a, b)
    else:
        tx, tw, tout = as_torch(x), as_torch(w), torch.empty((n, n), dtype=torch.bfloat16, device="cuda")
        theirs = lambda: torch.matmul(tx, tw.t(), out=tout)  # noqa: E731
    count = max(4, round(4e-2 / (2 * n**3 / 7e14)))
    us, torch_us, ratio = alternated(lambda: hq.matmul(a, turned, out=out), theirs, rounds, min(count, 50))
    engine = hq.engine_for(a, turned).name
    return {"case": f"{left} @ {right}", "n": n, "engine": engine, "us": us, "torch_us": torch_us, "ratio": ratio,
            "tflops": 2 * n**3 / us / 1e6}


def linear_step(n: int, recipe: str, rounds: int) -> dict[str, Any]:
    """Quantize x, w and dy and multiply three times, against three bf16 products."""
    x, w, dy = (values((n, n), seed) for seed in range(3))
    tx, tw, tdy = as_torch(x), as_torch(w), as_torch(dy)

    def ours() -> None:
        _, saved = hq.linear_forward(x, w, recipe, seed=1)  # ignored by recipes that round to nearest
        hq.linear_backward(dy, saved)

    def theirs() -> None:
        torch.matmul(tx, tw.t())
        torch.matmul(tdy, tw)
        torch.matmul(tdy.t(), tx)

    us, torch_us, ratio = alternated(ours, theirs, rounds, max(2, round(2e-2 / (6 * n**3 / 7e14))))
    return {"case": f"linear step {recipe}", "n": n, "engine": "", "us": us, "torch_us": torch_us, "ratio": ratio,
            "tflops": 6 * n**3 / us / 1e6}


def host_us(launch: Launch) -> float:
    """Median wall time of a call, in runs of 20 that do not fill the queue."""
    times = []
    for _ in range(60):
        start = time.perf_counter()
        for _ in range(20):
            launch()
        times.append((time.perf_counter() - start) / 20 * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times[10:])


def host(left: str, right: str) -> dict[str, Any]:
    n = 128
    a, b = hq.quantize(values((n, n), 0), rowwise=left), hq.quantize(values((n, n), 1), rowwise=right)
    turned, out = b.T, cupy.empty((n, n), BFLOAT16)
    tx, tw = as_torch(values((n, n), 0)), as_torch(values((n, n), 1))
    theirs = scaled_mm(a, b) if (left, right) == NATIVE[0] else lambda: torch.matmul(tx, tw.t())
    return {"case": f"{left} @ {right}", "engine": hq.engine_for(a, turned).name, "new_us": host_us(lambda: a @ turned),
            "out_us": host_us(lambda: hq.matmul(a, turned, out=out)), "torch_us": host_us(theirs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    about = (f"{name}; cuBLASLt {cublaslt.version_text(cublaslt.library().get_version())}, torch {torch.__version__}, "
             f"CuPy {cupy.__version__}, nvmath-python {metadata.version('nvmath-python')}")
    print(about)
    rows = []
    for n in options.sizes:
        for left, right in NATIVE + OTHERS:
            rows.append(product(n, left, right, options.rounds))
        rows += [linear_step(n, recipe, options.rounds) for recipe in RECIPES]
        for row in rows[-len(NATIVE + OTHERS + RECIPES) :]:
            print(f"{row['n']:6} {row['case']:40} {row['engine']:7} {row['us']:8.1f} us, torch {row['torch_us']:8.1f}, "
                  f"ratio {row['ratio']:.3f}, {row['tflops']:.0f} TFLOP/s", flush=True)
    hosts = [host(left, right) for left, right in (NATIVE[0], NATIVE[2], *OTHERS)]
    for row in hosts:
        print(f"  host {row['case']:40} {row['engine']:7} new {row['new_us']:5.1f} us, out= {row['out_us']:5.1f} us, "
              f"torch {row['torch_us']:5.1f} us")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"about": about, "products": rows, "host": hosts}, file, indent=1)


if __name__ == "__main__":
    main()
