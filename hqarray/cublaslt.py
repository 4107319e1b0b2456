"""cuBLASLt through nvmath.bindings: a product as plain values, its plan, workspace, and refusals in its own words.

cuBLASLt is column-major. Row-major D (m, n) = A (m, k) @ B (n, k).T is its D' (n, m) = B' A, so its first operand is
our b: both lie K-major, which it calls "TN".
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

OLDEST = 120900
"""cuBLAS 12.9: the first with 1x128 and 128x128 scales."""

WORKSPACE_BYTES = 32 << 20
"""What torch gives on Hopper: with less the heuristic may choose another algorithm than torch's."""

ALIGNMENTS = (256, 16)
"""Bytes that every pointer of a plan is a multiple of: fresh allocations, and the least that is ever passed."""

CUDA_TYPES: dict[str, int] = {  # cudaDataType_t
    "float32": 0, "float16": 2, "bfloat16": 14, "e4m3": 28, "e5m2": 29, "e2m1": 33,
}
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "e4m3": 8, "e5m2": 8, "e2m1": 4}

COMPUTE_32F = 68  # cublasComputeType_t: float32 sums, float32 operands not rounded to TF32

REDUCE_IN_FLOAT32 = 2
"""CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: where k is split, partial sums are not rounded to the result's type.

Scaled operands are left as torch has them, so that both choose the same algorithm.
"""

NO_TRANSPOSE, TRANSPOSE = 0, 1  # cublasOperation_t


class Refused(RuntimeError):
    """CuBLASLt has no kernel for a product; the text is its own reason."""


# --- a product as values ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix (outer, k) as it lies: elements from one line to the next, lines along k unless k_major is False.

    scale  name of cuBLASLt's scale mode (SCALAR_32F, VEC128_32F ...); None where there are no scales
    """

    type: str
    outer: int
    k: int
    pitch: int
    k_major: bool = True
    scale: str | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """D (m, n) = alpha * A (m, k) @ B (n, k).T + beta * D + bias: all that a plan depends on.

    bias       type of the bias that is added to each row, None where there is none
    device_scalars  alpha and beta are read on the device
    """

    a: Operand
    b: Operand
    type: str
    pitch: int
    bias: str | None = None
    device_scalars: bool = False
    fast_accumulate: bool = False
    alignment: int = 256


# --- library ------------------------------------------------------------------------------------


@cache
def library() -> Any:
    """The bindings, over a libcublasLt that is new enough.

    The file that CuPy or torch loaded before is used where there is one: nvmath asks the loader by its soname first.
    """
    try:
        import nvmath.bindings.cublasLt as bindings
    except ImportError as error:
        raise ImportError("matmul on a GPU needs nvmath-python: pip install 'hqarray[cuda13]'") from error
    version = bindings.get_version()
    if version < OLDEST:
        raise ImportError(
            f"cuBLASLt {version_text(version)} is loaded in this process ({', '.join(loaded_files()) or 'no file'}); "
            f"hqarray needs {version_text(OLDEST)}. Install a newer nvidia-cublas, and multiply with hqarray once "
            f"before importing what brings the older one"
        )
    return bindings


def version_text(number: int) -> str:
    """13.1.0 for 130100."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def loaded_files() -> list[str]:
    """The libcublasLt files in this process, in the order of its map."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = ("/" + line.partition("/")[2] for line in maps.read_text().splitlines() if "libcublasLt.so" in line)
    return list(dict.fromkeys(paths))


class Handles:
    """One cuBLASLt handle for each device; a handle belongs to the device that was current when it was made."""

    def __init__(self) -> None:
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()

    def of(self, device: int) -> int:
        """The handle of a device, which is the current one."""
        handle = self._handles.get(device)
        if handle is None:
            with self._lock:
                if device not in self._handles:
                    self._handles[device] = int(library().create())
                handle = self._handles[device]
        return handle


handles = Handles()


# --- plans --------------------------------------------------------------------------------------

_HOST = np.array([0, 1], np.float32)
HOST_SCALARS = tuple((_HOST.ctypes.data + 4, _HOST.ctypes.data + 4 * beta) for beta in (0, 1))
"""Pointers to (alpha, beta) = (1, 0) and (1, 1) on the host."""


class Plan:
    """Descriptors and the algorithm of one product.

    The descriptor carries the pointers of scales and bias, so it is set and launched under a lock.
    Raises Refused where cuBLASLt has no kernel.
    """

    def __init__(self, bindings: Any, handle: int, product: Product) -> None:
        self._bindings, self._handle, self.product = bindings, handle, product
        self._lock = threading.Lock()
        self._pointers: dict[str, int] = {}
        self._buffer = np.zeros(1, np.int64)
        self._buffer_at: int = self._buffer.ctypes.data  # which takes a microsecond to ask for
        self._layouts: list[int] = []
        a, b = product.a, product.b
        self._descriptor = int(bindings.matmul_desc_create(COMPUTE_32F, CUDA_TYPES["float32"]))
        # a finalizer and no __del__: when the interpreter ends, the bindings may be gone before
        weakref.finalize(self, _destroy, bindings, self._descriptor, self._layouts).atexit = False
        self._set("TRANSA", TRANSPOSE if b.k_major else NO_TRANSPOSE)
        self._set("TRANSB", NO_TRANSPOSE if a.k_major else TRANSPOSE)
        for side, operand in (("A", b), ("B", a)):
            if operand.scale is not None:
                self._set(f"{side}_SCALE_MODE", bindings.MatmulMatrixScale[operand.scale].value)
                self._point(f"{side}_SCALE_POINTER", product.alignment)  # the heuristic wants one, and does not read it
        if product.device_scalars:
            self._set("POINTER_MODE", bindings.PointerMode.DEVICE.value)
        if product.fast_accumulate:
            self._set("FAST_ACCUM", 1)
        if product.bias is not None:
            self._set("EPILOGUE", bindings.Epilogue.BIAS.value)
            self._set("BIAS_DATA_TYPE", CUDA_TYPES[product.bias])
        for operand in (b, a):
            rows, columns = (operand.k, operand.outer) if operand.k_major else (operand.outer, operand.k)
            self._layout(operand.type, rows, columns, operand.pitch)
        self._layout(product.type, b.outer, a.outer, product.pitch)
        self._result = np.zeros(1, bindings.matmul_heuristic_result_dtype)
        self._algorithm = self._result.ctypes.data
        try:
            self._choose()
        except bindings.cuBLASLtError as error:
            raise Refused(str(error).partition(" You can set CUBLASLT_LOG_LEVEL")[0]) from None

    def _layout(self, type: str, rows: int, columns: int, pitch: int) -> None:
        self._layouts.append(int(self._bindings.matrix_layout_create(CUDA_TYPES[type], rows, columns, pitch)))

    def _set(self, name: str, value: int) -> None:
        bindings = self._bindings
        attribute = bindings.MatmulDescAttribute[name].value
        width = np.dtype(bindings.get_matmul_desc_attribute_dtype(attribute))
        buffer = np.array([value], width)
        bindings.matmul_desc_set_attribute(self._descriptor, attribute, buffer.ctypes.data, width.itemsize)

    def _choose(self) -> None:
        """Ask the heuristic for its best algorithm."""
        bindings, alignment = self._bindings, self.product.alignment
        preference = bindings.matmul_preference_create()
        count = np.zeros(1, np.int32)
        wanted = {"MAX_WORKSPACE_BYTES": WORKSPACE_BYTES} | {f"MIN_ALIGNMENT_{x}_BYTES": alignment for x in "ABCD"}
        if self.product.a.scale is None and BITS[self.product.type] < 32:
            wanted["REDUCTION_SCHEME_MASK"] = REDUCE_IN_FLOAT32
        try:
            for name, value in wanted.items():
                attribute = bindings.MatmulPreferenceAttribute[name].value
                buffer = np.array([value], bindings.get_matmul_preference_attribute_dtype(attribute))
                bindings.matmul_preference_set_attribute(preference, attribute, buffer.ctypes.data, buffer.nbytes)
            b, a, d = self._layouts
            bindings.matmul_algo_get_heuristic(
                self._handle, self._descriptor, b, a, d, d, preference, 1, self._algorithm, count.ctypes.data
            )
        finally:
            bindings.matmul_preference_destroy(preference)
        if count[0] < 1:
            raise Refused("the heuristic names no algorithm")

    def _point(self, name: str, pointer: int) -> None:
        """Set a pointer of the descriptor where it has changed."""
        if self._pointers.get(name) != pointer:
            self._buffer[0] = pointer
            attribute = _pointer_attribute(self._bindings, name)
            self._bindings.matmul_desc_set_attribute(self._descriptor, attribute, self._buffer_at, 8)
            self._pointers[name] = pointer

    def run(
        self, a: int, b: int, d: int, scales: tuple[int, int], scalars: tuple[int, int], bias: int, workspace: int,
        stream: int,
    ) -> None:
        """Launch on a stream. All are pointers; scales of (a, b) where they have a scale mode, scalars alpha, beta."""
        product, layouts = self.product, self._layouts
        with self._lock:
            if product.a.scale is not None:
                self._point("B_SCALE_POINTER", scales[0])
                self._point("A_SCALE_POINTER", scales[1])
            if bias:
                self._point("BIAS_POINTER", bias)
            self._bindings.matmul(
                self._handle, self._descriptor, scalars[0], b, layouts[0], a, layouts[1], scalars[1], d, layouts[2], d,
                layouts[2], self._algorithm, workspace, WORKSPACE_BYTES, stream,
            )


def _destroy(bindings: Any, descriptor: int, layouts: list[int]) -> None:
    for layout in layouts:
        bindings.matrix_layout_destroy(layout)
    bindings.matmul_desc_destroy(descriptor)


@cache
def _pointer_attribute(bindings: Any, name: str) -> int:
    return int(bindings.MatmulDescAttribute[name].value)


# --- reasons ------------------------------------------------------------------------------------

_log_lock = threading.Lock()


def reason_of(bindings: Any, make: Callable[[], object]) -> str:
    """Why cuBLASLt refuses a plan: make it once more with the log in a temporary file, and read what it says there."""
    reason = ""
    with _log_lock, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cublaslt.log"
        bindings.logger_open_file(str(path))
        bindings.logger_set_level(5)
        try:
            make()
        except Refused as error:
            reason = str(error)
        finally:
            bindings.logger_set_level(0)
        text = path.read_text(errors="replace") if path.exists() else ""
    return said(text) or reason


def said(log: str) -> str:
    """The hints and errors of a cuBLASLt log, without time stamps and what only names a status."""
    lines = []
    for line in log.splitlines():
        head, _, message = line.rpartition("]")
        if "[Hint]" in head or "[Error]" in head:
            lines.append(message.strip())
    return "; ".join(dict.fromkeys(filter(None, lines)))
