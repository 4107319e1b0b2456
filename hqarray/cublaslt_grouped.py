"""Grouped products through cuBLASLt: many matrices, sizes and pointers on the device, one call.

As in cublaslt.py our b is its first operand. A member's D (m_i, n_i) = A (m_i, k_i) @ B (n_i, k_i).T; all dimensions,
pitches and pointers lie in one block of arrays that a kernel fills before each call (`Arrays`). Every pointer and pitch
must be a multiple of 16 bytes: cuBLASLt does not see them, and a kernel that meets another kills the CUDA context.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .cublaslt import (
    COMPUTE_32F,
    CUDA_TYPES,
    NO_TRANSPOSE,
    TRANSPOSE,
    WORKSPACE_BYTES,
    Refused,
    _destroy,
    _pointer_attribute,
    loaded_files,
    version_text,
)
from .layout import round_up

OLDEST = {9: 130400, 10: 130300, 11: 130300}
"""The first cuBLASLt with grouped products, by a chip's first number; other chips have none."""

OLDEST_SCALAR = 130500
"""The first whose grouped FP8 takes one scale for each member on Hopper."""

NARROW = {"e4m3": 8, "e5m2": 8, "bfloat16": 16, "float16": 16}
"""Operands that it takes, in bits."""

DEVICE_SCALARS = True
"""Whether alpha and beta are read on the device. NVIDIA documents both; only this was measured."""

PREFERENCES = {"GROUPED_AVERAGE_REDUCTION_DIM": 13, "GROUPED_DESC_D_AVERAGE_ROWS": 14,
               "GROUPED_DESC_D_AVERAGE_COLS": 15}
"""int64, which the bindings' table of widths does not say."""

SCALE_MODES = {None: "PER_BATCH_SCALAR_32F", (1, 128): "VEC128_32F", (128, 128): "BLK128x128_32F"}
"""cuBLASLt's name of how members with float32 scales are scaled, by block."""


class Unavailable(RuntimeError):
    """There is no grouped product for this; the text says what is missing and what would help."""


@dataclass(frozen=True, slots=True)
class Product:
    """D_i (m_i, n_i) = A_i (m_i, k_i) @ B_i (n_i, k_i).T + beta * D_i: all that a plan depends on.

    a, b, type   element types of the operands and of D
    scales       cuBLASLt's scale modes of a and b; None where there are no scales
    averages     of m_i, n_i and k_i, which the choice of an algorithm looks at
    """

    num_groups: int
    a: str
    b: str
    type: str
    scales: tuple[str, str] | None
    averages: tuple[int, int, int]
    fast_accumulate: bool = False


@dataclass(frozen=True, slots=True)
class Arrays:
    """Offsets of what a product reads for each member, in bytes from a block of device memory.

    Pointers of its A (our b), B (our a) and D, and of the scales of A and B; then int32 rows, columns and pitches of
    A, B and D. Each array begins on 16 bytes.
    """

    num_groups: int

    @property
    def entries(self) -> int:
        """From one array to the next."""
        return round_up(self.num_groups, 4)

    def pointers(self, index: int) -> int:
        return 8 * self.entries * index

    def dimensions(self, matrix: int) -> tuple[int, int, int]:
        """Rows, columns, pitches of A, B or D."""
        first = 40 * self.entries + 12 * self.entries * matrix
        return first, first + 4 * self.entries, first + 8 * self.entries

    @property
    def nbytes(self) -> int:
        return 76 * self.entries


# --- what there is ------------------------------------------------------------------------------


def refusal(bindings: Any, chip: tuple[int, int], product: Product) -> str | None:
    """Why there is no grouped product on this chip with this library, and what would help; None where there is."""
    sm, sizes = f"sm_{chip[0]}{chip[1]}", "give the sizes on the host, so that members are multiplied one by one"
    wide = [type for type in (product.a, product.b) if type not in NARROW]
    if wide:
        return f"cuBLASLt has no grouped products of {wide[0]}; {sizes}"
    oldest = OLDEST.get(chip[0])
    if oldest is None or chip >= (11, 1):
        return f"cuBLASLt has no grouped products on {sm}; {sizes}"
    what = "grouped products"
    if product.scales is not None and chip[0] == 9 and "PER_BATCH_SCALAR_32F" in product.scales:
        oldest, what = OLDEST_SCALAR, "grouped FP8 with a scale for each member"
    version = bindings.get_version()
    if version < oldest:
        files = ", ".join(loaded_files()) or "no file"
        return (f"cuBLASLt {version_text(version)} ({files}) has no {what} for {sm}; install nvidia-cublas>="
                f"{version_text(oldest).rpartition('.')[0]} and let hqarray multiply before another library loads its "
                f"own, or {sizes}")
    if not hasattr(bindings, "grouped_matrix_layout_create"):
        return f"this nvmath-python has no grouped layouts; install nvmath-python>=1.0, or {sizes}"
    return None


# --- plans --------------------------------------------------------------------------------------

Operands: TypeAlias = tuple[int, int, int, int, int, int]
"""Where the pointers of A, B and D lie, each before its layout."""


class Plan:
    """Descriptor and algorithm of one grouped product; layouts for each block of arrays that it is run with.

    Raises Refused where cuBLASLt has no kernel.
    """

    def __init__(self, bindings: Any, handle: int, product: Product, base: int) -> None:
        """Base: a block of `Arrays` that a later run may use. It need not be filled."""
        self._bindings, self._handle, self.product = bindings, handle, product
        self.arrays = Arrays(product.num_groups)
        self._lock = threading.Lock()
        self._scales_at = 0
        self._operands: dict[int, Operands] = {}
        self._made: list[int] = []
        self._descriptor = int(bindings.matmul_desc_create(COMPUTE_32F, CUDA_TYPES["float32"]))
        weakref.finalize(self, _destroy, bindings, self._descriptor, self._made).atexit = False
        self._set("TRANSA", TRANSPOSE)
        self._set("TRANSB", NO_TRANSPOSE)
        if DEVICE_SCALARS:
            self._set("POINTER_MODE", bindings.PointerMode.DEVICE.value)
        if product.scales is not None:
            for side, mode in zip("BA", product.scales, strict=True):
                self._set(f"{side}_SCALE_MODE", bindings.MatmulMatrixScale[mode].value)
            self._point_scales(base)
            if product.fast_accumulate:
                self._set("FAST_ACCUM", 1)
        result = np.zeros(1, bindings.matmul_heuristic_result_dtype)
        self._result, self._algorithm = result, result.ctypes.data
        try:
            self._choose(self._operands_at(base))
        except bindings.cuBLASLtError as error:
            raise Refused(str(error).partition(" You can set CUBLASLT_LOG_LEVEL")[0]) from None

    def _set(self, name: str, value: int) -> None:
        bindings = self._bindings
        attribute = bindings.MatmulDescAttribute[name].value
        buffer = np.array([value], bindings.get_matmul_desc_attribute_dtype(attribute))
        bindings.matmul_desc_set_attribute(self._descriptor, attribute, buffer.ctypes.data, buffer.nbytes)

    def _point_scales(self, base: int) -> None:
        if self._scales_at == base:
            return
        for name, index in (("A_SCALE_POINTER", 3), ("B_SCALE_POINTER", 4)):
            buffer = np.array([base + self.arrays.pointers(index)], np.int64)
            attribute = _pointer_attribute(self._bindings, name)
            self._bindings.matmul_desc_set_attribute(self._descriptor, attribute, buffer.ctypes.data, 8)
        self._scales_at = base

    def _operands_at(self, base: int) -> Operands:
        """Operands whose arrays lie there: layouts hold pointers, so there are some for each block."""
        operands = self._operands.get(base)
        if operands is None:
            product, create = self.product, self._bindings.grouped_matrix_layout_create
            made = []
            for matrix, type in enumerate((product.b, product.a, product.type)):
                at = (base + offset for offset in self.arrays.dimensions(matrix))
                made.append(int(create(CUDA_TYPES[type], product.num_groups, *at)))
            self._made += made
            a, b, d = (base + self.arrays.pointers(index) for index in range(3))
            operands = self._operands[base] = (a, made[0], b, made[1], d, made[2])
        return operands

    def _wanted(self) -> Iterator[tuple[int, Any]]:
        bindings, (m, n, k) = self._bindings, self.product.averages
        for name, value in {"MAX_WORKSPACE_BYTES": WORKSPACE_BYTES,
                            **{f"MIN_ALIGNMENT_{x}_BYTES": 16 for x in "ABCD"}}.items():
            attribute = bindings.MatmulPreferenceAttribute[name].value
            yield attribute, np.array([value], bindings.get_matmul_preference_attribute_dtype(attribute))
        for attribute, value in zip(PREFERENCES.values(), (k, n, m), strict=True):  # its D is (n, m)
            yield attribute, np.array([value], np.int64)

    def _choose(self, operands: Operands) -> None:
        """Ask the heuristic for its best algorithm."""
        bindings, count = self._bindings, np.zeros(1, np.int32)
        preference = bindings.matmul_preference_create()
        try:
            for attribute, buffer in self._wanted():
                bindings.matmul_preference_set_attribute(preference, attribute, buffer.ctypes.data, buffer.nbytes)
            _, a, _, b, _, d = operands
            bindings.matmul_algo_get_heuristic(
                self._handle, self._descriptor, a, b, d, d, preference, 1, self._algorithm, count.ctypes.data
            )
        finally:
            bindings.matmul_preference_destroy(preference)
        if count[0] < 1:
            raise Refused("the heuristic names no algorithm")

    def run(self, base: int, scalars: tuple[int, int], workspace: int, stream: int) -> None:
        """Launch on a stream; base is a block of `Arrays`, filled before in that stream. Scalars: alpha, beta."""
        alpha, beta = scalars
        with self._lock:
            if self.product.scales is not None:
                self._point_scales(base)
            a, layout_a, b, layout_b, d, layout_d = self._operands_at(base)
            self._bindings.matmul(
                self._handle, self._descriptor, alpha, a, layout_a, b, layout_b, beta, d, layout_d, d, layout_d,
                self._algorithm, workspace, WORKSPACE_BYTES, stream,
            )
