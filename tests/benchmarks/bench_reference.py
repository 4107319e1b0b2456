"""Speed and memory of the NumPy definition, as ratios to a plain ml_dtypes cast of the same array.

    python tests/benchmarks/bench_reference.py [FORMAT ...]

4096 x 4096 float32, default_rng(0); median of rounds in which every row runs once. The unit is
np.clip(x, -448, 448).astype(float8_e4m3fn). Exits with 1 where mxfp8 rowwise passes 1.2 or 0.6 of the input's
bytes at its peak (outputs included), nvfp4 1.5 or 0.6.
"""

import platform
import sys
import time
import tracemalloc

import ml_dtypes
import numpy as np

import hqarray as hq

LIMITS = {"mxfp8": 1.2, "nvfp4": 1.5}
MEMORY_LIMIT = 0.6
ROUNDS = 5


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak(call) -> int:
    tracemalloc.start()
    result = call()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return most


def main(names: list[str]) -> int:
    x = np.random.default_rng(0).standard_normal((4096, 4096), np.float32)
    jobs = {"cast": {"unit": lambda: np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)}}
    for name in names:
        array = hq.quantize(x, rowwise=name)
        jobs[name] = {
            "rowwise": lambda name=name: hq.quantize(x, rowwise=name),
            "columnwise": lambda name=name: hq.quantize(x, columnwise=name),
            "both": lambda name=name: hq.quantize(x, rowwise=name, columnwise=name),
            "decode": lambda array=array: array.dequantize(),
        }
    times = {(row, column): [] for row, columns in jobs.items() for column in columns}
    for _ in range(ROUNDS):
        for row, column in times:
            times[row, column].append(seconds(jobs[row][column]))
    median = {key: float(np.median(values)) for key, values in times.items()}
    unit = median.pop(("cast", "unit"))
    print(f"{platform.machine()}, NumPy {np.__version__}, ml_dtypes {ml_dtypes.__version__}, "
          f"cast {unit / x.size * 1e9:.2f} ns an element\n")
    columns = ("rowwise", "columnwise", "both", "decode")
    print(f"{'times the cast':24}" + "".join(f"{column:>12}" for column in columns) + f"{'peak':>12}")
    failed = False
    for name in names:
        ratios = [median[name, column] / unit for column in columns]
        memory = peak(jobs[name]["rowwise"]) / x.nbytes
        print(f"{name:24}" + "".join(f"{ratio:12.2f}" for ratio in ratios) + f"{memory:12.2f}")
        if name in LIMITS:
            failed |= ratios[0] > LIMITS[name] or memory > MEMORY_LIMIT
    print(f"\nlimits: rowwise {LIMITS}, peak {MEMORY_LIMIT} of the input: {'passed' if failed else 'kept'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(hq.FORMATS)))
