"""NVFP4's options on the GPU beside plain nvfp4, formats of the same bytes, and delayed scaling; amax included.

    python tests/benchmarks/bench_options.py [--size 16384] [--rounds 30] [--json FILE]

bf16, both parts and rows alone. The issue's goal is 1.3 of the plain call for a Hadamard transform of the columns,
four-over-six and stochastic rounding. Delayed scaling takes an amax that is there and records the new one, in one read
where the plain call makes two: 1 or less.
"""

from __future__ import annotations

import cupy
import numpy as np
from bench_quantize import median_us, options_of, write_json

import hqarray as hq
from hqarray.formats import BFLOAT16, Format

GOAL, GOAL_OF_DELAYED = 1.3, 1.0
PLAIN = hq.NVFP4()
CASES: dict[str, tuple[Format | None, Format | None, Format | None, Format | None]] = {
    # name: the pair, and the plain one
    "rht of the columns": (PLAIN, hq.NVFP4(rht=True), PLAIN, PLAIN),
    "rht of columns alone": (None, hq.NVFP4(rht=True), None, PLAIN),
    "rht of rows alone": (hq.NVFP4(rht=True), None, PLAIN, None),
    "stochastic": (hq.NVFP4(rounding="stochastic"), hq.NVFP4(rounding="stochastic"), PLAIN, PLAIN),
    "stochastic, rows": (hq.NVFP4(rounding="stochastic"), None, PLAIN, None),
    "stochastic, columns with rht": (
        hq.NVFP4(rounding="stochastic"), hq.NVFP4(rounding="stochastic", rht=True), PLAIN, PLAIN),
    "four_over_six mae": (hq.NVFP4(four_over_six="mae"), hq.NVFP4(four_over_six="mae"), PLAIN, PLAIN),
    "four_over_six mse, rows": (hq.NVFP4(four_over_six="mse"), None, PLAIN, None),
    "four_over_six mse, squares": (
        hq.NVFP4((16, 16), four_over_six="mse"), hq.NVFP4((16, 16), four_over_six="mse"), hq.NVFP4((16, 16)),
        hq.NVFP4((16, 16))),
    "nvfp4_row": (hq.NVFP4(per_row=True), hq.NVFP4(per_row=True), PLAIN, PLAIN),
    "fp8_row": (hq.FP8(per_row=True), hq.FP8(per_row=True), hq.FP8(), hq.FP8()),
    "mxfp8_32x32": (hq.MX(block=(32, 32)), hq.MX(block=(32, 32)), hq.MX(), hq.MX()),
}
DELAYED: dict[str, tuple[Format | None, Format | None]] = {
    "delayed fp8": (hq.FP8(), hq.FP8()),
    "delayed fp8, rows": (hq.FP8(), None),
    "delayed nvfp4": (PLAIN, PLAIN),
}


def main() -> None:
    options = options_of(__doc__)
    shape = (options.size, options.size)
    x = cupy.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(BFLOAT16)
    state = hq.DelayedScaling(1, like=x)
    state.amax[...] = hq.amax(x)
    results = {}
    cases = [(name, case, {"seed": 1}, GOAL) for name, case in CASES.items()]
    cases += [(name, (*pair, *pair), {"amax": state[0]}, GOAL_OF_DELAYED) for name, pair in DELAYED.items()]
    for name, (row, column, plain_row, plain_column), given, goal in cases:
        plain = median_us(lambda r=plain_row, c=plain_column: hq.quantize(x, rowwise=r, columnwise=c), options.rounds)
        ours = median_us(lambda r=row, c=column, g=given: hq.quantize(x, rowwise=r, columnwise=c, **g), options.rounds)
        again = median_us(lambda r=plain_row, c=plain_column: hq.quantize(x, rowwise=r, columnwise=c), options.rounds)
        ratio = 2 * ours / (plain + again)
        results[name] = {"us": ours, "plain_us": (plain + again) / 2, "ratio": ratio}
        mark = "" if ratio <= goal else " *"
        print(f"{name:30} {ours:8.1f} us  plain {(plain + again) / 2:8.1f} us  {ratio:.3f}{mark}", flush=True)
    write_json(options, results)


if __name__ == "__main__":
    main()
