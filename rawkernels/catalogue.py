"""Every kernel of the table of formats: what to compile without a GPU, and what each may take."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hqarray.formats import FORMATS, NVFP4, Format, Storage, as_format
from hqarray.groups import Axis
from hqarray.recipes import RECIPES, ROLES

from . import loader, traits
from .loader import Resources

STORED: dict[str, Format] = FORMATS | {name: as_format(name) for name in ("nvfp4(rht=true)",)}
"""Formats by whose storages parts are decoded: FORMATS, and the option that stores a part differently."""

ARCHES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
FEW_ARCHES = ("sm_80", "sm_90a")
"""What kernels that are not main ones are compiled for by default: without FP8 conversions and with them."""

DTYPES = ("bfloat16", "float16", "float32")
AXES: tuple[Axis, ...] = ("outer", "k")


@dataclass(frozen=True)
class Spill:
    """Bytes of spill stores a main kernel may have, and why they do no harm."""

    most: int
    reason: str


_HELD = Spill(12, "the squares' row codes wait for the turn; 1.08 and 1.05 times the copy on an H200 with it")
_ADDRESSES = Spill(16, "addresses, saved once in a thread; sm_100 and sm_120 have not been measured")

ALLOWED_SPILLS: dict[tuple[str, str], Spill] = {
    ("quantize nvfp4_16x16 / nvfp4_16x16 bfloat16", "sm_90a"): _HELD,
    **{(f"quantize {pair} bfloat16", "sm_100a"): _ADDRESSES for pair in ("nvfp4 / -", "nvfp4 / nvfp4")},
    **{(f"quantize {pair} bfloat16", "sm_120a"): _ADDRESSES for pair in (
        "fp8_block_128x128 / fp8_block_128x128", "fp8_block_128x128_pow2 / fp8_block_128x128_pow2", "mxfp8 / mxfp8",
        "mxfp8_e5m2 / mxfp8_e5m2", "mxfp4 / -", "- / mxfp4", "mxfp4 / mxfp4", "nvfp4 / nvfp4",
    )},
}
"""By name and architecture. A main kernel that is not here may spill nothing."""


@dataclass(frozen=True)
class Specialisation:
    """One kernel to compile."""

    name: str
    source: loader.Source
    main: bool
    """Whether speed is promised for it, so that a spill is an error."""

    def excess(self, arch: str, used: Resources) -> int:
        """Bytes spilled beyond what is allowed; 0 for kernels that are not main ones."""
        allowed = ALLOWED_SPILLS.get((self.name, arch), Spill(0, "")).most
        return max(0, used.spill_stores - allowed, used.spill_loads - allowed) if self.main else 0


def specialisations(*, pairs: bool = False, dtypes: Iterable[str] = DTYPES) -> Iterator[Specialisation]:
    """Every kernel: each format with itself, and alone where speed is promised; pairs: alone and with every other.

    Without pairs float16 rows that start anywhere are left out: bfloat16 ones of the same code are not.
    """
    formats = list(FORMATS.items())
    storages, moved = _storages(STORED), _storages({n: format for n, format in STORED.items() if format.transposable})
    for storage, name in moved.items():
        yield Specialisation(f"transpose {name}", traits.transpose_launch(storage).source, True)
    yield Specialisation("narrow float64", traits.narrow_launch().source, True)
    yield Specialisation("delayed scaling", traits.delayed_launch().source, True)
    for packs, what in ((True, "pack"), (False, "unpack")):
        for scale_bytes in (1, 4):
            source = traits.records_launch(packs, scale_bytes).source
            yield Specialisation(f"{what} records, scales of {scale_bytes} bytes", source, True)
    for dtype in DTYPES:
        yield Specialisation(f"combine {dtype}", traits.combine_launch(dtype, True).source, True)
        yield Specialisation(f"combine {dtype}, any rows", traits.combine_launch(dtype, False).source, False)
        yield Specialisation(f"dot {dtype}", traits.dot_launch(dtype, dtype).source, True)
        if dtype != "float32":  # a gradient beside what it is of
            yield Specialisation(f"dot {dtype} with float32", traits.dot_launch(dtype, "float32").source, True)
    yield from _around_a_gemm(storages)
    if "bfloat16" in dtypes:
        yield from _of_groups(formats, storages)
        yield from _of_recipes()
    for dtype in dtypes:
        for aligned in (True,) if dtype == "float16" and not pairs else (True, False):
            main = dtype == "bfloat16" and aligned
            suffix = f"{dtype}{'' if aligned else ' unaligned'}"
            yield Specialisation(f"amax {suffix}", traits.amax_launch(dtype, aligned).source, main)
            for name, row in formats:
                for other, column in formats if pairs else [(name, row)]:
                    source = traits.quantize_launch(row, column, dtype, aligned).source
                    yield Specialisation(f"quantize {name} / {other} {suffix}", source, main and other == name)
                if main or pairs:
                    source = traits.quantize_launch(row, None, dtype, aligned).source
                    yield Specialisation(f"quantize {name} / - {suffix}", source, main)
                    source = traits.quantize_launch(None, row, dtype, aligned).source
                    yield Specialisation(f"quantize - / {name} {suffix}", source, main)
            for storage, name in storages.items():
                if name not in FORMATS and not main:
                    continue
                for transposed in (False, True):
                    source = traits.dequantize_launch(storage, dtype, transposed, aligned).source
                    yield Specialisation(f"dequantize {name} {('rows', 'columns')[transposed]} {suffix}", source, main)


def _of_recipes() -> Iterator[Specialisation]:
    """Pairs that recipes name beside the rows of FORMATS, and four-over-six, which none does; with their amaxes."""
    known = set(FORMATS.values())
    pairs = [recipe[role] for recipe in RECIPES.values() for role in ROLES]
    pairs += [(format, format) for format in (NVFP4(four_over_six="mae"), NVFP4((16, 16), four_over_six="mse"))]
    for row, column in dict.fromkeys(pairs):
        if {row, column} <= known:
            continue
        name = f"{row.name} / {column.name} bfloat16"
        yield Specialisation(f"quantize {name}", traits.quantize_launch(row, column, "bfloat16", True).source, False)
        first, second, _ = traits.measures_of(row, column, False)
        source = traits.amax_launch("bfloat16", True, row=first, column=second).source
        yield Specialisation(f"amax {name}", source, False)


def _storages(formats: dict[str, Format]) -> dict[Storage, str]:
    """Each storage once, with the name of the first format that is stored so."""
    storages: dict[Storage, str] = {}
    for name, format in formats.items():
        storages.setdefault(format.storage, name)
    return storages


def _of_groups(formats: list[tuple[str, Format]], storages: dict[Storage, str]) -> Iterator[Specialisation]:
    """The kernels over many matrices, for bfloat16 rows on 16 bytes."""
    yield Specialisation("members of groups", traits.members_launch().source, True)
    yield Specialisation("amax of groups", traits.amax_launch("bfloat16", True, grouped=True).source, True)
    for name, row in formats:
        source = traits.quantize_launch(row, row, "bfloat16", True, grouped=True).source
        yield Specialisation(f"quantize groups {name} / {name}", source, False)
    for storage, name in storages.items():
        for transposed in (False, True):
            source = traits.dequantize_launch(storage, "bfloat16", transposed, True, grouped=True).source
            yield Specialisation(f"dequantize groups {name} {('rows', 'columns')[transposed]}", source, True)


def _forms(storage: Storage) -> list[tuple[int, bool, str]]:
    """(terms, split, name) of the bf16 operands that a part may become."""
    if storage.bf16_terms == 3:
        return [(3, True, " split in three")]
    return [(1, False, ""), (3, False, " three times")]


def _around_a_gemm(storages: dict[Storage, str]) -> Iterator[Specialisation]:
    """What makes operands of parts, and results of sums. Rotated parts are decoded as others are."""
    storages = {storage: name for storage, name in storages.items() if not storage.rht}
    for storage, name in storages.items():
        source = traits.decode_launch(storage, "float32", 1, False).source
        yield Specialisation(f"decode {name} to float32", source, False)
        for terms, split, form in _forms(storage):
            source = traits.decode_launch(storage, "bfloat16", terms, split).source
            yield Specialisation(f"decode {name} to bfloat16{form}", source, terms == 1)
    for out in DTYPES:
        finish = traits.Finish(out, bias="float32", aux=out, gelu=True, accumulate=True)
        yield Specialisation(f"finish {out}", traits.finish_launch(finish).source, True)
    for storage, name in storages.items():
        for axis in AXES:
            for terms, split, form in _forms(storage):
                source = traits.decode_launch(storage, "bfloat16", terms, split, axis).source
                yield Specialisation(f"decode groups {name} ragged {axis}{form}", source, terms == 1)
    for out in DTYPES:
        finish = traits.Finish(out, bias="float32", gelu=True, accumulate=True, grouped=True, scaled=True)
        yield Specialisation(f"finish groups {out}", traits.finish_launch(finish).source, True)
    yield Specialisation("group gemm", traits.group_gemm_launch().source, True)
    yield Specialisation("tile scales", traits.tile_scales_launch().source, True)


def _resources(job: tuple[loader.Source, str]) -> Resources:
    return loader.resources(loader.compile_cubin(*job)[1])


def _keep(job: tuple[loader.Source, str]) -> Path:
    return loader.cubin_path(*job)


def _processes(jobs: int | None) -> ProcessPoolExecutor:
    """Processes, not threads: NVRTC compiles one kernel at a time in each."""
    return ProcessPoolExecutor(jobs or os.cpu_count(), multiprocessing.get_context("spawn"))


def compile_all(
    kernels: list[Specialisation], arches: Iterable[str] | None = None, jobs: int | None = None
) -> Iterator[tuple[Specialisation, dict[str, Resources]]]:
    """Each kernel with what it takes on each architecture; None: main ones on all of ARCHES, others on FEW_ARCHES."""
    wanted: dict[loader.Source, tuple[str, ...]] = {}  # formats that are stored alike share a source
    for kernel in kernels:
        own = ARCHES if kernel.main else FEW_ARCHES
        wanted[kernel.source] = max(wanted.get(kernel.source, ()), own, key=len) if arches is None else tuple(arches)
    work = [(source, arch) for source, own in wanted.items() for arch in own]
    with _processes(jobs) as pool:
        used = pool.map(_resources, work, chunksize=8)
        known: dict[loader.Source, dict[str, Resources]] = {}
        for kernel in kernels:
            if kernel.source not in known:
                known[kernel.source] = {arch: next(used) for arch in wanted[kernel.source]}
            yield kernel, known[kernel.source]


def fill_cache(kernels: list[Specialisation], arches: Iterable[str], jobs: int | None = None) -> int:
    """Compile what the cache lacks; how many kernels it then holds."""
    work = [(kernel.source, arch) for arch in arches for kernel in kernels]
    with _processes(jobs) as pool:
        return len(set(pool.map(_keep, work, chunksize=8)))
