"""python -m hqarray.rawkernels: compile kernels without a GPU, print registers and spills, or fill the cache.

    python -m hqarray.rawkernels --arch sm_90a            every format alone and with itself, a table, exit 1 on a spill
    python -m hqarray.rawkernels --arch sm_90a --pairs --cache    every ordered pair into the cubin cache
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from hqarray.formats import FORMATS, Format

from . import loader, traits

ARCHES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
DTYPES = ("bfloat16", "float16", "float32")


def specialisations(*, pairs: bool = False, dtypes: tuple[str, ...] = DTYPES) -> Iterator[tuple[str, loader.Source]]:
    """Name and source of every kernel: each format alone in both directions and with itself, or with every other."""
    formats: list[tuple[str, Format]] = list(FORMATS.items())
    storages = {format.storage: name for name, format in formats}
    for storage in {format.storage: None for _, format in formats if format.transposable}:
        yield f"transpose {storages[storage]}", traits.transpose_launch(storage).source
    for dtype in dtypes:
        for aligned in (True, False):
            suffix = f"{dtype}{'' if aligned else ' unaligned'}"
            yield f"amax {suffix}", traits.amax_launch(dtype, aligned).source
            for name, row in formats:
                yield f"quantize {name} / - {suffix}", traits.quantize_launch(row, None, dtype, aligned).source
                yield f"quantize - / {name} {suffix}", traits.quantize_launch(None, row, dtype, aligned).source
                for other, column in formats if pairs else [(name, row)]:
                    yield f"quantize {name} / {other} {suffix}", traits.quantize_launch(row, column, dtype, aligned).source
            for storage, name in storages.items():
                for transposed in (False, True):
                    launch = traits.dequantize_launch(storage, dtype, transposed, aligned)
                    yield f"dequantize {name} {'columns' if transposed else 'rows'} {suffix}", launch.source


def _compile(job: tuple[str, loader.Source, str, bool]) -> tuple[str, str, loader.Resources | None]:
    name, source, arch, cache = job
    if cache:
        loader.cubin_path(source, arch)
        return name, arch, None
    return name, arch, loader.resources(loader.compile_cubin(source, arch)[1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hqarray.rawkernels", description=__doc__)
    parser.add_argument("--arch", nargs="+", default=list(ARCHES), help="NVRTC architectures, for example sm_90a")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), help="input dtypes")
    parser.add_argument("--pairs", action="store_true", help="every ordered pair of formats")
    parser.add_argument("--cache", action="store_true", help="fill the cubin cache, print no table")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    sources = list(specialisations(pairs=options.pairs, dtypes=tuple(options.dtype)))
    jobs = [(name, source, arch, options.cache) for arch in options.arch for name, source in sources]
    spilled = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for name, arch, used in pool.map(_compile, jobs, chunksize=8):
            if used is None:
                continue
            spilled += used.spill_stores + used.spill_loads > 0
            print(f"{arch:8} {name:66} {used.registers:4} registers {used.spill_stores:4} + {used.spill_loads} bytes spilled")
    print(f"{len(jobs)} kernels compiled for {', '.join(options.arch)}, {spilled} with spills")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
