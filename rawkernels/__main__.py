"""python -m hqarray.rawkernels: compile every kernel without a GPU and print its registers and spills.

--main     the kernels that ALLOWED_SPILLS is about, alone: bfloat16 rows that start on 16 bytes
--pairs    every ordered pair of formats, not only each format alone and with itself
--cache    keep the cubins where quantize looks for them, and print no table
"""

from __future__ import annotations

import argparse
import sys

from . import loader
from .catalogue import ALLOWED_SPILLS, ARCHES, DTYPES, Specialisation, compile_all, fill_cache, specialisations
from .loader import Resources


def cell(used: Resources) -> str:
    """Registers, and bytes of spill stores and loads where there are any."""
    spilled = used.spill_stores or used.spill_loads
    return f"{used.registers}" + (f" +{used.spill_stores}+{used.spill_loads}" if spilled else "")


def _print_table(kernels: list[Specialisation], asked: list[str] | None, jobs: int | None) -> int:
    arches = list(ARCHES) if asked is None else asked
    print("registers a thread, +bytes of spill stores and loads where there are any; * a main kernel")
    print(f"{'':60}" + "".join(f"{arch:>13}" for arch in arches))
    compiled = spilled = 0
    failed = []
    for kernel, used in compile_all(kernels, asked, jobs):
        cells = (f"{cell(used[arch]) if arch in used else '':>13}" for arch in arches)
        print(f"{'*' if kernel.main else ' '} {kernel.name:58}" + "".join(cells))
        compiled += len(used)
        spilled += sum(r.spill_stores + r.spill_loads > 0 for r in used.values())
        failed += [f"{kernel.name}, {arch}: {cell(used[arch])}" for arch in used if kernel.excess(arch, used[arch])]
    print(f"{compiled} kernels compiled for {', '.join(arches)}; {spilled} spill")
    for (name, arch), spill in ALLOWED_SPILLS.items():
        print(f"allowed: {name}, {arch}: {spill.most} bytes; {spill.reason}")
    for line in failed:
        print(f"a main kernel spills: {line}", file=sys.stderr)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hqarray.rawkernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", help="NVRTC architectures, for example sm_90a; default: four for main "
                                                  "kernels, two for the others")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES, help="dtypes of input and output")
    parser.add_argument("--main", action="store_true")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--cache", action="store_true")
    parser.add_argument("--jobs", type=int, help="processes; default: one a core")
    options = parser.parse_args()
    kernels = [k for k in specialisations(pairs=options.pairs, dtypes=options.dtype) if k.main or not options.main]
    if not options.cache:
        return _print_table(kernels, options.arch, options.jobs)
    arches = options.arch or list(ARCHES)
    kept = fill_cache(kernels, arches, options.jobs)
    print(f"{kept} kernels for {', '.join(arches)} in {loader.cache_folder()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
