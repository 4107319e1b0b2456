"""Quantized against bf16 collectives on the GPUs of one host: all-gather of an operand, dispatch of tokens, host time.

    torchrun --nproc-per-node 2 tests/benchmarks/bench_distributed.py [--size 16384] [--rounds 20] [--json FILE]
    torchrun --nproc-per-node 2 tests/benchmarks/bench_distributed.py --check     # on the CPU with gloo: that it runs

Quantizing is included. Each round times all of them in one process, alternating, by events around the call: "queued" is
one of 8 calls in a row, so that the host runs ahead as it does in training, and "alone" one after the GPU has been
idle. A time is the median over rounds of the slowest rank, and so is the host's of a call. Every rank holds
size / ranks rows of random bf16. Dispatch, which sorts by expert, and combine, which sums, are compared with the
engine's exchange of as many bf16 rows in equal shares. NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist

from hqarray.interop.distributed import TorchRanks
from hqarray.interop.experts import combine, dispatch, make_route
from hqarray.interop.sharding import Sharding, quantize_all_gather
from hqarray.interop.torch_arrays import as_array, on_torch

QUEUE = 8

FORMATS = ("fp8_e4m3", "mxfp8", "nvfp4")

Call = Callable[[], object]


def alternating(calls: dict[str, Call], rounds: int, device: str) -> dict[str, tuple[float, ...]]:
    """Median over rounds of the slowest rank's milliseconds of each call: queued, alone, and the host's."""
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in calls}
    for number in range(rounds + 3):
        for name, call in calls.items():
            dist.barrier()
            alone, _ = timed(call, device, 1)
            dist.barrier()
            queued, host = timed(call, device, QUEUE)
            if number >= 3:
                times[name].append((queued, alone, host))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, times)
    return {name: tuple(slowest(every, name, which) for which in range(3)) for name in calls}


def slowest(every: list[Any], name: str, which: int) -> float:
    """Median over rounds of the slowest rank's times."""
    rounds = zip(*([times[which] for times in each[name]] for each in every), strict=True)
    return round(statistics.median(map(max, rounds)), 4)


def timed(call: Call, device: str, count: int) -> tuple[float, float]:
    """Milliseconds of one of so many calls: until the work is done, and until the host has said it all."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return ((time.perf_counter() - start) * 1e3 / count,) * 2
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    start = time.perf_counter()
    for _ in range(count):
        call()
    host = (time.perf_counter() - start) * 1e3 / count
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / count, host


def gathers(size: int, rounds: int, device: str) -> dict[str, tuple[float, ...]]:
    """All-gather of a (size, size) operand whose rows lie on the ranks."""
    ranks = TorchRanks()
    mine = torch.randn(size // ranks.size, size, device=device).to(torch.bfloat16)
    whole = torch.empty(size, size, dtype=torch.bfloat16, device=device)
    values, sharding = as_array(mine), Sharding.even((size, size), ranks.size, step=size // ranks.size)
    calls: dict[str, Call] = {"bf16": lambda: dist.all_gather_into_tensor(whole, mine)}
    for name in FORMATS:
        for chunks in (1, 2, 3):
            calls[f"{name}, {chunks} chunks"] = lambda name=name, chunks=chunks: quantize_all_gather(  # type: ignore[misc]
                values, sharding, ranks, rowwise=name, chunks=chunks)
    return alternating(calls, rounds, device)


def dispatches(size: int, rounds: int, device: str) -> dict[str, tuple[float, ...]]:
    """Tokens of `size` columns to 8 experts for each rank, 2 for each token: sizes on the host, and on the device."""
    ranks, tokens, top = TorchRanks(), size // 2, 2
    experts = 8 * ranks.size
    x = as_array(torch.randn(tokens, size, device=device).to(torch.bfloat16))
    choices = as_array(torch.randint(0, experts, (tokens, top), device=device))
    sent = torch.randn(tokens * top, size, device=device).to(torch.bfloat16)
    received = torch.empty_like(sent)
    calls: dict[str, Call] = {"bf16, engine alone": lambda: dist.all_to_all_single(received, sent)}
    for label, capacity in (("", None), (", capacity", tokens * top * 5 // 4 // ranks.size)):
        route = make_route(choices, experts, ranks, capacity=capacity)
        for name in ("bf16", *FORMATS):
            calls[name + label] = lambda name=name, route=route: dispatch(x, route, ranks, name)  # type: ignore[misc]
        y = as_array(torch.randn(route.arriving, size, device=device).to(torch.bfloat16))
        calls["combine, bf16" + label] = lambda y=y, route=route: combine(y, route, ranks)  # type: ignore[misc]
    return alternating(calls, rounds, device)


def host_microseconds(rounds: int, device: str, count: int = 100) -> dict[str, float]:
    """Host time of a small all-gather: the engine's own call, and that of Ranks."""
    ranks = TorchRanks()
    mine = torch.zeros(64, 64, dtype=torch.uint8, device=device)
    whole = torch.zeros(64 * ranks.size, 64, dtype=torch.uint8, device=device)
    a, out = as_array(mine), as_array(whole)
    calls: dict[str, Call] = {
        "engine": lambda: dist.all_gather_into_tensor(whole, mine), "Ranks": lambda: ranks.all_gather(a, out),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            dist.barrier()
            if device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            times[name].append((time.perf_counter() - start) / count * 1e6)
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="small, on the CPU with gloo")
    options = parser.parse_args()
    device, size, rounds = ("cpu", 256, 2) if options.check else ("cuda", options.size, options.rounds)
    if device == "cuda":
        import cupy

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        cupy.cuda.Device(torch.cuda.current_device()).use()
    dist.init_process_group("gloo" if options.check else "nccl")
    with on_torch(device) if device == "cuda" else nullcontext():
        found: dict[str, dict[str, Any]] = {
            "all-gather ms": gathers(size, rounds, device), "dispatch ms": dispatches(size, rounds, device),
            "host us": dict(host_microseconds(rounds, device)),
        }
    if dist.get_rank() == 0:
        where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else "none"
        print(f"{dist.get_world_size()} ranks on {where}, torch {torch.__version__}, NCCL {nccl}, size {size}")
        for title, numbers in found.items():
            baselines = {"all-gather ms": "bf16", "dispatch ms": "bf16, engine alone", "host us": "engine"}
            print(f"{title}:")
            for name, value in numbers.items():
                first = numbers[baselines[title]]
                if isinstance(value, tuple):
                    text = "  ".join(f"{what} {a:7.3f} x{b / a:4.2f}"
                                     for what, a, b in zip(("queued", "alone"), value, first, strict=False))
                    print(f"  {name:24} {text}  host {value[2]:.3f}")
                else:
                    print(f"  {name:24} {value:7.1f}  x{first / value:.2f}")
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
