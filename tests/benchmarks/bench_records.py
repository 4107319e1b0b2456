"""Records on one GPU: rows packed to travel, unpacked where they arrive, and summed by weight; beside a copy.

    python tests/benchmarks/bench_records.py [--size 16384] [--rounds 30] [--json FILE]

size / 2 tokens of size columns of bf16, two choices each in random order: what `dispatch` and `combine` launch on one
rank, without the exchange. Ratio: to a copy that moves as many bytes, read and written together.
"""

from __future__ import annotations

from collections.abc import Callable

import cupy
import numpy as np
from bench_quantize import Copy, median_us, options_of, write_json

import hqarray as hq
from hqarray import record_ops
from hqarray.arrays import zeros_part
from hqarray.formats import BFLOAT16
from hqarray.records import Lines

FORMATS = ("bf16", "mxfp8", "fp8_block_1x128", "mxfp4", "nvfp4_row")
TOP = 2

Call = Callable[[], object]


def random_rows(*shape: int) -> cupy.ndarray:
    return cupy.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(BFLOAT16)


def calls_of(name: str, x: cupy.ndarray, slots: cupy.ndarray) -> dict[str, tuple[Call, int]]:
    """pack and unpack of a format, with the bytes that each reads and writes: a token is read once."""
    part = hq.quantize(x, rowwise=name).part("rowwise").packed()
    lines, count, places = Lines.of_part(part), len(slots), slots.reshape(-1, TOP)
    messages = record_ops.pack(lines, places, count)
    arrived = Lines.of_part(zeros_part(part.format, (count, x.shape[1]), cupy))
    nbytes = lines.record.nbytes
    return {
        f"pack {name}": (lambda: record_ops.pack(lines, places, count), (len(x) + count) * nbytes),
        f"unpack {name}": (lambda: record_ops.unpack(messages, arrived, slots), 2 * count * nbytes),
    }


def main() -> None:
    options = options_of(__doc__)
    tokens, columns = options.size // TOP, options.size
    x, rows = random_rows(tokens, columns), random_rows(tokens * TOP, columns)
    slots = cupy.asarray(np.random.default_rng(1).permutation(tokens * TOP))
    weights = cupy.full((tokens, TOP), 0.5, np.float32)
    calls: dict[str, tuple[Call, int]] = {}
    for name in FORMATS:
        calls.update(calls_of(name, x, slots))
    both = rows.nbytes + x.nbytes
    calls["weighted_sum bf16"] = lambda: record_ops.weighted_sum(rows, (tokens, TOP), slots, weights), both
    calls["dots bf16"] = lambda: record_ops.dots(rows, x, TOP), both
    results = {}
    for name, (call, nbytes) in calls.items():
        copy = median_us(Copy(nbytes).of(nbytes), options.rounds)
        us = median_us(call, options.rounds)
        results[name] = {"us": us, "copy_us": copy, "ratio": us / copy}
        print(f"{name:24} {us:8.1f} us  copy {copy:8.1f} us  {us / copy:.3f}", flush=True)
    write_json(options, results)


if __name__ == "__main__":
    main()
