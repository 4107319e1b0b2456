"""Loader: CUDA C++ text -> cubin on disk -> kernel. Lazy: only what is called is compiled.

NVRTC through cuda.core, not through CuPy: CuPy adds -ftz=true, which flushes subnormals, and its cache does not see
an edited header. The cache key is a digest of everything that determines the cubin, and needs no import of cuda.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent

OPTIONS = ("std=c++17", "fma=False", "ftz=False", "prec_div=True")
"""fma=False: NVRTC would contract a * b - c into one rounding, and the reference does not."""

NVRTC_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu13")


@dataclass(frozen=True)
class Source:
    """One specialisation: generated text before a .cu file, whose last function is extern "C"."""

    file: str
    entry: str
    text: str

    @property
    def code(self) -> str:
        return f'#include "codec.cuh"\n#include "input.cuh"\nnamespace hq {{\n{self.text}}}\n#include "{self.file}"\n'


@cache
def _sources_digest() -> str:
    """Digest of every .cu and .cuh file: an edited header gives a new cubin."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def nvrtc_version() -> str:
    """Version of the installed NVRTC, from package metadata; the toolkit's where there is no package."""
    for name in NVRTC_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name}=={importlib.metadata.version(name)}"
    return "toolkit"


def cache_folder() -> Path:
    """Where cubins are kept: the user's cache folder, as other tools find it."""
    base = Path.home() / "Library" / "Caches" if sys.platform == "darwin" else Path.home() / ".cache"
    return base / "hqarray" / "cubins"


def cubin_key(source: Source, arch: str) -> str:
    """Digest of sources, options, compiler version and arch."""
    parts = (_sources_digest(), nvrtc_version(), arch, *OPTIONS, source.file, source.text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def cubin_path(source: Source, arch: str, folder: Path | None = None) -> Path:
    """The cubin of a specialisation, compiled now if it is not in the cache. Written atomically."""
    path = (folder or cache_folder()) / f"{source.entry}-{arch}-{cubin_key(source, arch)}.cubin"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        cubin, _ = compile_cubin(source, arch)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(cubin)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    return path


def compile_cubin(source: Source, arch: str) -> tuple[bytes, str]:
    """Compile one specialisation with NVRTC; the cubin and the assembler's report. Needs no GPU."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise ImportError("compiling kernels needs cuda-core and NVRTC: pip install 'hqarray[cuda13]'") from error
    log = io.StringIO()
    options = ProgramOptions(
        arch=arch, std="c++17", fma=False, ftz=False, prec_div=True, include_path=[str(SOURCES)], ptxas_options=["-v"]
    )
    program = Program(source.code, "c++", options)
    code = program.compile("cubin", logs=log).code
    return bytes(code), log.getvalue()


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread, bytes of stack and of spills."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def resources(report: str) -> Resources:
    """Read ptxas -v's report."""
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = re.search(r"Used (\d+) registers", report)
    if frame is None or registers is None:
        raise ValueError(f"no resource usage in the compiler's report:\n{report}")
    return Resources(int(registers[1]), *(int(n) for n in frame.groups()))


def load(source: Source, arch: str) -> Any:
    """The kernel as a CuPy RawKernel on the current device."""
    import cupy

    return cupy.RawModule(path=str(cubin_path(source, arch))).get_function(source.entry)
