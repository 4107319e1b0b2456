"""What is installed, what the machine has, and which engine each pair of formats would use.

Frameworks are asked for their version by package metadata and never imported.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .formats import FORMATS, Storage
from .gemm import ENGINES, Chip, Engine, EngineName, choose_engine

PACKAGES: dict[str, tuple[str, ...]] = {
    "numpy": ("numpy",),
    "ml_dtypes": ("ml_dtypes",),
    "rich": ("rich",),
    "cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x"),
    "nvmath-python": ("nvmath-python",),
    "cuda-core": ("cuda-core",),
    "torch": ("torch",),
    "jax": ("jax",),
    "safetensors": ("safetensors",),
}
"""What is listed, and the distributions that provide it."""

OLDEST = (8, 0)
"""The least compute capability that kernels are compiled for: that of rawkernels/catalogue.py's ARCHES."""

SYMBOLS: dict[EngineName, str] = {"native": "N", "bf16": "b", "bf16x3": "3", "fp32": "f"}


# --- software -----------------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    """Version of python and each package, with the distribution's name where that differs; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        found[name] = None
        for distribution in distributions:
            try:
                version = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
            found[name] = version if distribution == name else f"{version} ({distribution})"
            break
    return found


# --- hardware -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GPU:
    """One device as the driver names it."""

    name: str
    chip: tuple[int, int]


def gpus() -> tuple[tuple[GPU, ...], str]:
    """The devices, and the driver's version or why there are none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (), "no NVIDIA driver (libcuda.so.1 is not there)"
    status = cuda.cuInit(0)
    if status:
        return (), f"the NVIDIA driver reports error {status} at cuInit"
    count, number = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    cuda.cuDriverGetVersion(ctypes.byref(number))
    found = []
    for ordinal in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, len(name), device)
        capability = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            value = ctypes.c_int()
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability.append(value.value)
        found.append(GPU(name.value.decode(errors="replace"), (capability[0], capability[1])))
    kernel = Path("/sys/module/nvidia/version")
    driver = f"driver {kernel.read_text().strip()}, " if kernel.exists() else ""
    return tuple(found), f"{driver}CUDA {number.value // 1000}.{number.value % 1000 // 10}"


@dataclass(frozen=True, slots=True)
class Library:
    """A libcublasLt file.

    owner   the distribution that installed it, or "system"
    loaded  whether this process had loaded it before it was looked at
    taken   how matmul on a GPU comes to this file, through nvmath-python; "" where it takes another, or none
    """

    path: str
    version: str
    owner: str
    loaded: bool
    taken: str = ""

    def __str__(self) -> str:
        taken = f", matmul takes it: {self.taken}" if self.taken else ""
        return f"{self.version}, {self.path} ({self.owner}{', loaded in this process' if self.loaded else ''}{taken})"


def cublaslt_libraries() -> tuple[Library, ...]:
    """Every libcublasLt found: those this process has loaded first, then Python packages', then the system's."""
    owners = dict(_packaged_libraries())
    loaded = list(dict.fromkeys(_loaded_libraries()))
    file, how = _taken_library()
    system = [] if owners or loaded else [name for name in (ctypes.util.find_library("cublasLt"),) if name]
    paths = dict.fromkeys([*loaded, *owners, *system, *filter(None, [file])])
    return tuple(
        Library(path, _version_of(path), owners.get(path, "system"), path in loaded, how if path == file else "")
        for path in paths
    )


def _taken_library() -> tuple[str, str]:
    """The file that nvmath-python's loader takes, and how it comes to it; empty where there is no loader or no file."""
    try:
        from cuda import pathfinder
    except ImportError:
        return "", ""
    try:
        found = pathfinder.load_nvidia_dynamic_lib("cublasLt")
    except RuntimeError:  # it is not there, or cannot be loaded
        return "", ""
    where = "loaded before, by another library" if found.was_already_loaded_from_elsewhere else f"by {found.found_via}"
    return str(Path(found.abs_path or "").resolve()), where


def _loaded_libraries() -> Iterator[str]:
    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text().splitlines():
            path = line.partition("/")[2]
            if "libcublasLt.so" in path:
                yield "/" + path


def _packaged_libraries() -> Iterator[tuple[str, str]]:
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if "cublas" in name:
            for file in distribution.files or ():
                path = Path(str(distribution.locate_file(file))).resolve()
                if path.name.startswith("libcublasLt.so") and path.exists():
                    yield str(path), name


def _version_of(path: str) -> str:
    try:
        number = int(ctypes.CDLL(path).cublasLtGetVersion())
    except (OSError, AttributeError) as error:
        return f"cannot be loaded: {error}"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


# --- engines ------------------------------------------------------------------------------------


def parse_chip(text: str) -> tuple[int, int]:
    """(9, 0) for "sm_90", "sm_90a", "90" or "9.0". Raises ValueError for anything else, and below OLDEST."""
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)[af]?", text.strip().lower())
    if not match:
        raise ValueError(f"chip {text!r} is not a compute capability; write sm_90, sm_100 or sm_120")
    chip = int(match[1]), int(match[2])
    if chip < OLDEST:
        raise ValueError(f"chip {text!r} is {_unsupported(chip)}")
    return chip


def _unsupported(chip: tuple[int, int]) -> str:
    return f"below sm_{OLDEST[0]}{OLDEST[1]}, the oldest that hqarray has kernels for (sm_{chip[0]}{chip[1]})"


def storages() -> dict[Storage, list[str]]:
    """The distinct ways in which the table's formats are stored, and their names."""
    names: dict[Storage, list[str]] = {}
    for name, format in FORMATS.items():
        names.setdefault(format.storage, []).append(name)
    return names


def engine_matrix(chip: Chip) -> dict[tuple[str, str], Engine]:
    """The engine of each ordered pair of stored formats, by the first name of each."""
    named = [(names[0], storage) for storage, names in storages().items()]
    return {(left, right): choose_engine(a, b, chip) for left, a in named for right, b in named}


def engine_lines(chip: Chip, width: int = 80) -> Iterator[str]:
    """A matrix of engines as text, then each distinct reason once, with a pair that has it."""
    engines = engine_matrix(chip)
    reasons: dict[tuple[EngineName, str], list[tuple[str, str]]] = {}
    for pair, engine in engines.items():
        reasons.setdefault((engine.name, engine.reason), []).append(pair)
    if len(reasons) > 1:
        names = [group[0] for group in storages().values()]
        label = max(map(len, names))
        yield " " * (label + 3) + "".join(f"{number:>3}" for number in range(1, len(names) + 1))
        for number, left in enumerate(names, 1):
            cells = "".join(f"{SYMBOLS[engines[left, right].name]:>3}" for right in names)
            yield f"{number:>2} {left:<{label}}{cells}"
    for (name, reason), pairs in sorted(reasons.items(), key=lambda item: (ENGINES.index(item[0][0]), -len(item[1]))):
        many = f"all {len(pairs)} pairs" if len(reasons) == 1 else f"{len(pairs)}, e.g. {' @ '.join(pairs[0])}"
        text = f"{SYMBOLS[name]} {name}: {reason} ({many})"
        yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="      ")


def info_lines(chips: tuple[tuple[int, int], ...] = (), width: int = 80) -> Iterator[str]:
    """The text of `python -m hqarray info`. chips: engines for these instead of the GPUs found."""
    found = versions()
    yield "Versions"
    for name, version in found.items():
        yield f"  {name:<14} {version or 'not installed'}"
    devices, driver = gpus()
    yield "GPU"
    yield f"  {driver}"
    for number, device in enumerate(devices):
        yield f"  {number}: {device.name}, sm_{device.chip[0]}{device.chip[1]}"
    yield "libcublasLt"
    libraries = cublaslt_libraries()
    yield from (f"  {library}" for library in libraries) if libraries else ("  not found",)
    yield "Engines of a @ b, by the stored formats of a (row) and b (column)"
    alike = [names for names in storages().values() if len(names) > 1]
    text = "stored alike, one row: " + ("; ".join(" = ".join(names) for names in alike) or "none")
    yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    yield "NumPy"
    yield from engine_lines(None, width)
    for chip in chips or tuple(dict.fromkeys(device.chip for device in devices)):
        yield f"sm_{chip[0]}{chip[1]}"
        yield from engine_lines(chip, width) if chip >= OLDEST else (f"  none: {_unsupported(chip)}",)
