"""Loader: CUDA C++ text -> cubin on disk -> kernel. Lazy: only what is called is compiled.

NVRTC through cuda.core, not through CuPy: CuPy adds -ftz=true, which flushes subnormals, and its cache does not see
an edited header. The cache key is a digest of everything that determines the cubin, and needs no import of cuda.

Cubins lie in $XDG_CACHE_HOME/hqarray/cubins, by default ~/.cache/hqarray/cubins (macOS: ~/Library/Caches). The folder
may be deleted at any time. Where it cannot be written, kernels go to a folder of this process, with a warning.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import io
import os
import re
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent

OPTIONS: dict[str, Any] = {"std": "c++17", "fma": False, "ftz": False, "prec_div": True}
"""Fields of cuda.core's ProgramOptions. fma=False: NVRTC would round a * b - c once, and the reference rounds twice."""

NVRTC_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu13")

SEAL_BYTES = hashlib.sha256().digest_size
"""A cubin's digest follows it in its file: the driver reads an ELF file by its headers and ignores what follows."""


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
    """Versions of the installed NVRTC packages, from their metadata; "toolkit" where there is none."""
    found = []
    for name in NVRTC_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name}=={importlib.metadata.version(name)}")
    return " ".join(found) or "toolkit"


def cache_folder() -> Path:
    """Where cubins are kept: the user's cache folder, found as the system's other programs find it."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))  # noqa: TID251  a folder, no backend
    if not chosen.is_absolute():  # the specification says to ignore it then
        chosen = Path.home() / "Library" / "Caches" if sys.platform == "darwin" else Path.home() / ".cache"
    return chosen / "hqarray" / "cubins"


@cache
def _process_folder() -> Path:
    """A folder that lives as long as this process, for a cache that cannot be written."""
    folder = tempfile.mkdtemp(prefix="hqarray-cubins-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def cubin_key(source: Source, arch: str) -> str:
    """Digest of sources, options, compiler version and arch."""
    parts = (_sources_digest(), nvrtc_version(), arch, repr(sorted(OPTIONS.items())), source.file, source.text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def cubin_path(source: Source, arch: str, folder: Path | None = None) -> Path:
    """The cubin of a specialisation, compiled now if the cache has no whole one. Written atomically."""
    name = f"{source.entry}-{arch}-{cubin_key(source, arch)}.cubin"
    try:
        path = (folder or cache_folder()) / name
        if _is_whole(path):
            return path
        problem: Exception | None = None
    except (OSError, RuntimeError) as error:  # the folder may not be entered; there is no home folder
        problem = error
    if problem is not None or _process_folder.cache_info().currsize:
        own = _process_folder() / name
        if _is_whole(own):
            return own
    cubin, _ = compile_cubin(source, arch)
    if problem is None:
        try:
            _write(path, cubin)
            return path
        except OSError as error:
            problem = error
    warnings.warn(
        f"compiled kernels cannot be kept ({problem}), so each process compiles its own; make that folder writable, or "
        f"set XDG_CACHE_HOME to one that is",
        RuntimeWarning,
        stacklevel=2,
    )
    path = _process_folder() / name
    _write(path, cubin)
    return path


def _is_whole(path: Path) -> bool:
    """Whether a file holds a cubin and its digest: a full disk or a crash of the machine may have cut it."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-SEAL_BYTES]).digest() == content[-SEAL_BYTES:]


def _write(path: Path, cubin: bytes) -> None:
    """A cubin and its digest under a temporary name, then renamed: a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(cubin + hashlib.sha256(cubin).digest())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def compile_cubin(source: Source, arch: str) -> tuple[bytes, str]:
    """Compile one specialisation with NVRTC; the cubin and the assembler's report. Needs no GPU.

    Raises ImportError without cuda-core and NVRTC, RuntimeError with the compiler's log for what does not compile.
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise ImportError("compiling kernels needs cuda-core and NVRTC: pip install 'hqarray[kernels]'") from error
    log = io.StringIO()
    options = ProgramOptions(arch=arch, include_path=[str(SOURCES)], ptxas_options=["-v"], **OPTIONS)
    try:
        code = Program(source.code, "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        raise RuntimeError(f"{source.file} does not compile for {arch} (NVRTC: {nvrtc_version()}):\n{error}") from error
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
