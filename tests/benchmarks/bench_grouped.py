"""Groups on the GPU beside torch and a loop, in one process: products, wgrad, quantize, and time on the host.

    python tests/benchmarks/bench_grouped.py [--only forward small wgrad quantize host] [--rounds 9] [--json FILE]

Random bf16 data, sizes on the device, out given. Runs alternate between events on one stream. A ratio is the other's
time over ours (quantize: ours over the other's), the median over rounds; torch's time is the least of its runs, with
equal and random sizes and, in FP8, with and without fast accumulation. A ratio that misses its goal on an H200 is
marked with *. Host: wall time of a call on a few rows while the queue is not full.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import cupy
import numpy as np

import hqarray as hq
from hqarray import cublaslt
from hqarray.formats import BFLOAT16

cublaslt.library()  # before torch loads an older one
import torch  # noqa: E402

Launch = Callable[[], object]
Times = dict[str, list[float]]

BLOCKS = ("fp8_block_1x128", "fp8_block_128x128")
FORWARD = (("bf16", "bf16"), ("fp8_e4m3", "fp8_e4m3"), BLOCKS, ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"))
SMALL = (("bf16", "bf16"), ("fp8_e4m3", "fp8_e4m3"), BLOCKS)
WGRAD = (("bf16", "bf16"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_block_1x128", "fp8_block_1x128"), ("nvfp4", "nvfp4"))
QUANTIZE = (("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("mxfp8", "nvfp4"), ("fp8_block_1x128", "fp8_block_1x128"),
            ("fp8_e4m3", "fp8_e4m3"))

GOALS = {"forward bf16": 0.98, "forward fp8_e4m3": 1.02, "forward fp8_block_1x128": 0.92, "forward nvfp4": 0.75,
         "small fp8_e4m3": 1.15, "small fp8_block_1x128": 1.15, "wgrad bf16": 0.85, "wgrad fp8_e4m3": 0.85,
         "wgrad fp8_block_1x128": 0.70, "quantize 8": 1.10, "quantize 64": 1.10, "quantize 256": 1.25, "host": 25.0}
"""Of issue 5: at least, except quantize and host (microseconds), at most."""


@dataclass(frozen=True)
class Row:
    """One line of the table. ratio: to what `against` names."""

    kind: str
    case: str
    us: float
    tflops: float
    against: str
    other_us: float
    ratio: float
    goal: float | None
    at_most: bool = False

    @property
    def misses(self) -> bool:
        return self.goal is not None and (self.ratio > self.goal if self.at_most else self.ratio < self.goal)

    def __str__(self) -> str:
        goal = "" if self.goal is None else f" (goal {self.goal:.2f}){'*' if self.misses else ''}"
        rate = f"{self.tflops:7.0f} TFLOP/s" if self.tflops else " " * 15
        return (f"{self.kind:9}{self.case:52}{self.us:9.1f} us {rate}  {self.against} {self.other_us:9.1f} us, ratio "
                f"{self.ratio:.3f}{goal}")


def values(shape: tuple[int, ...], seed: int) -> cupy.ndarray:
    return cupy.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(BFLOAT16)


def as_torch(array: cupy.ndarray) -> torch.Tensor:
    """bf16 CuPy array as a tensor over the same memory."""
    return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)


def random_sizes(groups: int, total: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Sizes of so many groups that add up to the total, some several times as large as others."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(total, rng.dirichlet(np.full(groups, 2.0)))


def alternated(launches: dict[str, Launch], rounds: int, count: int) -> Times:
    """Microseconds of each launch in each round; what raises is left out, with a line that says why."""
    kept: dict[str, Launch] = {}
    for name, launch in launches.items():
        try:
            for _ in range(3):
                launch()
            torch.cuda.synchronize()
            kept[name] = launch
        except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
            print(f"  {name} is left out: {str(error).splitlines()[0]}")
    times: Times = {name: [] for name in kept}
    for _ in range(rounds):
        for name, launch in kept.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                launch()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / count * 1e3)
    return times


def best(times: Times, prefix: str) -> list[float]:
    """Of the runs whose names begin so the fastest one's times; none: NaN."""
    runs = [run for name, run in times.items() if name.startswith(prefix)]
    return min(runs, key=statistics.median) if runs else [float("nan")] * len(next(iter(times.values())))


def compare(
    kind: str, case: str, flops: float, times: Times, ours: str, against: str, goal: float | None
) -> Row | None:
    """A row of times[ours] beside the best run that begins with `against`."""
    if ours not in times:
        return None
    mine, other = times[ours], best(times, against)
    us = statistics.median(mine)
    ratio = statistics.median(b / a for a, b in zip(mine, other, strict=True))
    return Row(kind, case, us, flops / us / 1e6, against, statistics.median(other), ratio, goal)


def show(rows: list[Row], *more: Row | None) -> None:
    for row in more:
        if row is not None:
            print(row, flush=True)
            rows.append(row)


# --- products -----------------------------------------------------------------------------------


def torch_forward(x: cupy.ndarray, w: cupy.ndarray, sizes: Any, *, fp8: bool) -> dict[str, Launch]:
    """torch's grouped product of these sizes."""
    ends = torch.from_dlpack(cupy.asarray(np.cumsum(sizes), dtype=np.int32))
    left, right = as_torch(x), as_torch(w)
    if not fp8:
        return {"": lambda: torch._grouped_mm(left, right.transpose(-2, -1), offs=ends)}
    codes, weights = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    rng = torch.Generator(device="cuda").manual_seed(0)
    scale_a, scale_b = (torch.rand(shape, generator=rng, device="cuda") + 0.5
                        for shape in (left.shape[:1], right.shape[:2]))
    return {
        f", fast {fast}": lambda fast=fast: torch._scaled_grouped_mm(  # type: ignore[misc]
            codes, weights.transpose(-2, -1), scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        for fast in (False, True)
    }


def forward(kind: str, sizes: dict[str, Any], n: int, k: int, pairs: Any, rounds: int, rows: list[Row]) -> None:
    """x_i @ w_i.T over equal and random sizes, beside torch and a loop over members."""
    groups, total = len(sizes["equal"]), int(sum(sizes["equal"]))
    x, w, out = values((total, k), 0), values((groups, n, k), 1), cupy.empty((total, n), BFLOAT16)
    flops = 2.0 * total * n * k
    count = max(3, round(2e4 / (flops / 7e8)))
    bf16: list[float] = []
    for a, b in pairs:
        gw = hq.GroupedArray.from_stacked(w, rowwise=b).T
        launches: dict[str, Launch] = {}
        for name, given in sizes.items():
            gx = hq.grouped_quantize(x, cupy.asarray(given, dtype=np.int32), rowwise=a)
            launches[f"ours {name}"] = lambda gx=gx, gw=gw: hq.matmul(gx, gw, out=out)  # type: ignore[misc]
            for suffix, launch in torch_forward(x, w, given, fp8=a.startswith("fp8")).items():
                launches[f"torch {name}{suffix}"] = launch
        known = hq.grouped_quantize(x, [int(size) for size in sizes["random"]], rowwise=a)
        members = list(zip(known, gw, cupy.split(out, np.cumsum(sizes["random"])[:-1].tolist()), strict=True))

        def loop(members: Any = members) -> None:
            for left, right, target in members:
                if target.size:
                    hq.matmul(left, right, out=target)

        launches["loop"] = loop
        times = alternated(launches, rounds, min(count, 50))
        goal, case = GOALS.get(f"{kind} {a}"), f"{groups} x {total // groups} rows, {n} x {k}, {a} @ {b}"
        if a == "bf16":
            bf16 = times.get("ours equal", [])
        for name in sizes:
            ours = f"ours {name}"
            if a == "nvfp4" and bf16 and ours in times:
                times["bf16"] = bf16
                show(rows, compare(kind, f"{case}, {name}", flops, times, ours, "bf16", goal))
            else:
                show(rows, compare(kind, f"{case}, {name}", flops, times, ours, "torch", goal))
        show(rows, compare(kind, f"{case}, random", flops, times, "ours random", "loop", None))


def wgrad(groups: int, total: int, m: int, n: int, rounds: int, rows: list[Row]) -> None:
    """dy_i.T @ x_i over random sizes: the rate beside that of x_i @ w_i.T in the same format, and torch."""
    x, dy, w = values((total, n), 0), values((total, m), 1), values((groups, n, m), 2)
    given = random_sizes(groups, total)
    sizes = cupy.asarray(given, dtype=np.int32)
    ends = torch.from_dlpack(cupy.asarray(np.cumsum(given), dtype=np.int32))
    out, y = cupy.empty((groups, m, n), BFLOAT16), cupy.empty((total, n), BFLOAT16)
    tx, tdy = as_torch(x), as_torch(dy)
    flops = 2.0 * total * n * m
    for a, b in WGRAD:
        gdy, gx = (hq.grouped_quantize(v, sizes, rowwise=a, columnwise=c) for v, c in ((dy, a), (x, b)))
        right = BLOCKS[1] if b == BLOCKS[0] else b
        gw = hq.GroupedArray.from_stacked(w, rowwise=right).T
        launches: dict[str, Launch] = {
            "ours": lambda gdy=gdy, gx=gx: hq.matmul(gdy.T, gx, out=out),  # type: ignore[misc]
            "forward": lambda gdy=gdy, gw=gw: hq.matmul(gdy, gw, out=y),  # type: ignore[misc]
        }
        if a == "bf16":
            launches["torch"] = lambda: torch._grouped_mm(tdy.t(), tx, offs=ends)
        times = alternated(launches, rounds, 8)
        case = f"{groups} x {total // groups} rows, {m} x {n}, {a} @ {b}, random"
        show(rows, compare("wgrad", case, flops, times, "ours", "forward", GOALS.get(f"wgrad {a}")))
        if "torch" in times:
            show(rows, compare("wgrad", case, flops, times, "ours", "torch", None))


# --- quantize -----------------------------------------------------------------------------------


def quantize(total: int, k: int, rounds: int, rows: list[Row]) -> None:
    """Both parts of groups of random sizes beside the ungrouped call on the same array, and a copy of as many bytes."""
    x = values((total, k), 0)
    for row, column in QUANTIZE:
        whole = hq.quantize(x, rowwise=row, columnwise=column)
        nbytes = x.nbytes + sum(part.codes.nbytes + part.scales.nbytes for _, part in whole.parts())
        source, target = (cupy.ones(nbytes // 2, np.uint8) for _ in range(2))
        launches: dict[str, Launch] = {
            "ungrouped": lambda whole=whole: hq.requantize(whole, x),  # type: ignore[misc]
            "copy": lambda source=source, target=target: cupy.copyto(target, source),  # type: ignore[misc]
        }
        for groups in (8, 64, 256):
            sizes = cupy.asarray(random_sizes(groups, total), dtype=np.int64)
            g = hq.grouped_quantize(x, sizes, rowwise=row, columnwise=column)
            launches[f"groups {groups}"] = lambda g=g, sizes=sizes: hq.grouped_quantize(  # type: ignore[misc]
                x, sizes, out=g)
        times = alternated(launches, rounds, 20)
        for groups in (8, 64, 256):
            mine = times.get(f"groups {groups}")
            if mine is None:
                continue
            us, case = statistics.median(mine), f"{total} x {k}, {row} / {column}, {groups} groups"
            for against, goal in (("ungrouped", GOALS[f"quantize {groups}"]), ("copy", None)):
                other = times[against]
                ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
                show(rows, Row("quantize", case, us, 0, against, statistics.median(other), ratio, goal, True))


# --- host ---------------------------------------------------------------------------------------


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


def host(rows: list[Row]) -> None:
    """Wall time of warm calls on 8 groups of 16 rows."""
    groups, n, k, total = 8, 128, 128, 128
    x, w, out = values((total, k), 0), values((groups, n, k), 1), cupy.empty((total, n), BFLOAT16)
    sizes = cupy.full(groups, total // groups, np.int32)
    ends = torch.from_dlpack(cupy.asarray(np.cumsum(sizes.get()), dtype=np.int32))
    tx, tw = as_torch(x), as_torch(w)
    theirs = host_us(lambda: torch._grouped_mm(tx, tw.transpose(-2, -1), offs=ends))
    for a, b in FORWARD:
        gx, gw = hq.grouped_quantize(x, sizes, rowwise=a), hq.GroupedArray.from_stacked(w, rowwise=b).T
        g = hq.grouped_quantize(x, sizes, rowwise=a, columnwise=a)
        calls: dict[str, Launch] = {
            "matmul, out=": lambda gx=gx, gw=gw: hq.matmul(gx, gw, out=out),  # type: ignore[misc]
            "a @ b": lambda gx=gx, gw=gw: gx @ gw,  # type: ignore[misc]
            "grouped_quantize, out=": lambda g=g: hq.grouped_quantize(x, sizes, out=g),  # type: ignore[misc]
        }
        for name, launch in calls.items():
            us = host_us(launch)
            # the ratio is in units of the goal's microsecond, so that it can miss it
            goal = GOALS["host"] if name != "grouped_quantize, out=" else None
            show(rows, Row("host", f"{a} @ {b}, {name}", us, 0, "torch bf16", theirs, us, goal, True))


def main() -> None:
    kinds = ("forward", "small", "wgrad", "quantize", "host")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    about = (f"{name}; cuBLASLt {cublaslt.version_text(cublaslt.library().get_version())} "
             f"({', '.join(cublaslt.loaded_files())}), torch {torch.__version__}, CuPy {cupy.__version__}, "
             f"nvmath-python {metadata.version('nvmath-python')}")
    print(about)
    rows: list[Row] = []
    equal, some = np.full(8, 4096), np.full(64, 64)
    for kind in options.only:
        if kind == "forward":
            forward(kind, {"equal": equal, "random": random_sizes(8, 32768)}, 4096, 4096, FORWARD, options.rounds, rows)
        elif kind == "small":
            forward(kind, {"equal": some, "random": random_sizes(64, 4096)}, 2048, 4096, SMALL, options.rounds, rows)
        elif kind == "wgrad":
            wgrad(8, 32768, 4096, 4096, options.rounds, rows)
        elif kind == "quantize":
            quantize(32768, 4096, options.rounds, rows)
        else:
            host(rows)
    missed = [row for row in rows if row.misses]
    print(f"{len(rows)} rows, {len(missed)} miss their goal")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"about": about, "rows": [asdict(row) | {"misses": row.misses} for row in rows]}, file, indent=1)


if __name__ == "__main__":
    main()
