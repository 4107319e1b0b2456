"""GEMM: which parts a product reads, which engine multiplies them, and the product on NumPy.

`a @ b` contracts a's last axis with b's first, so it reads a.rowwise and b.columnwise: two K-major matrices
(m, k) and (n, k). The choice of engine looks at how they are stored and at the chip, at nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from . import reference
from .arrays import HybridArray, QuantizedArray
from .formats import BFLOAT16, ELEMENTS, ROW, Storage
from .layout import Array

EngineName: TypeAlias = Literal["native", "bf16", "bf16x3", "fp32"]
ENGINES: tuple[EngineName, ...] = ("native", "bf16", "bf16x3", "fp32")

Chip: TypeAlias = tuple[int, int] | None
"""CUDA compute capability, (9, 0) for Hopper; None for NumPy."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What multiplies, and why. `matmul(engine=...)` takes a name or one of these.

    name    native: cuBLASLt on the stored codes. bf16: codes decoded to bf16, exactly, one bf16 GEMM. bf16x3: one
            operand split into three bf16 terms that sum to it exactly. fp32: decoded to float32.
    fast_accumulate  let the tensor cores keep FP8 partial sums in fewer bits (native FP8 only)
    """

    name: EngineName
    reason: str = ""
    fast_accumulate: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


# --- operands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a product as a K-major matrix: a part, or a plain array's own values (outer, k)."""

    data: QuantizedArray | Array
    storage: Storage
    dtype: np.dtype[Any]
    lead: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape


def left_operand(a: HybridArray | Array) -> Operand:
    """The matrix of a, (m, k): its rowwise part, or the array's 2-D view."""
    if isinstance(a, HybridArray):
        part = a.part("rowwise", "a @ b, which contracts a's last axis,")
        return Operand(part, part.format.storage, a.dtype, a.shape[:-1])
    return Operand(a.reshape(-1, a.shape[-1]) if a.size else a.reshape(int(np.prod(a.shape[:-1])), a.shape[-1]),
                   _plain_storage(a.dtype), a.dtype, a.shape[:-1])


def right_operand(b: HybridArray | Array) -> Operand:
    """The matrix of b transposed, (n, k): its columnwise part, or the array's transposed view."""
    if isinstance(b, HybridArray):
        part = b.part("columnwise", "a @ b, which contracts b's first axis,")
        return Operand(part, part.format.storage, b.dtype, b.shape[1:])
    return Operand(b.T, _plain_storage(b.dtype), b.dtype, b.shape[1:])


def _plain_storage(dtype: np.dtype[Any]) -> Storage:
    return Storage(ELEMENTS["float32" if dtype == np.float64 else dtype.name], None, "none")


# --- engine choice ------------------------------------------------------------------------------


def choose_engine(a: Storage, b: Storage, chip: Chip) -> Engine:
    """The engine for two stored operands on a chip: native, else exact emulation, else float32.

    Sources of the native rows: cuBLASLt's scale modes and what was measured on an H200 (docs/decisions.md).
    """
    if chip is None:
        return Engine("fp32", "NumPy: operands decoded to float32, BLAS")
    refused = native_refusal(a, b, chip)
    if refused is None:
        return Engine("native", f"cuBLASLt on sm_{chip[0]}{chip[1]}")
    terms = sorted((a.bf16_terms, b.bf16_terms))
    if terms == [1, 1]:
        return Engine("bf16", f"{refused}; both operands are exact in bf16")
    if terms == [1, 3]:
        return Engine("bf16x3", f"{refused}; one operand needs three bf16 terms")
    return Engine("fp32", f"{refused}; neither operand is exact in bf16")


def asked_engine(asked: Engine | EngineName, a: Storage, b: Storage, chip: Chip) -> Engine:
    """The engine that a caller names. Raises ValueError where it cannot multiply the two exactly, with the reason."""
    name = asked.name if isinstance(asked, Engine) else asked
    if name not in ENGINES:
        raise ValueError(f"engine={name!r} is not one of {', '.join(ENGINES)}")
    if chip is None and name != "fp32":
        raise ValueError(f"engine={name!r} runs on a GPU; on NumPy the engine is fp32 (decoded to float32, BLAS)")
    refused = None if chip is None else native_refusal(a, b, chip) if name == "native" else _inexact(name, a, b)
    if refused is not None:
        raise ValueError(f"engine={name!r} cannot multiply these operands: {refused}; without engine= it is "
                         f"{choose_engine(a, b, chip).name!r}")
    return Engine(name, "asked for", isinstance(asked, Engine) and asked.fast_accumulate)


def _inexact(name: EngineName, a: Storage, b: Storage) -> str | None:
    terms = sorted((a.bf16_terms, b.bf16_terms))
    if name == "bf16" and terms != [1, 1]:
        return "one operand is not exact in bf16" if terms == [1, 3] else "neither operand is exact in bf16"
    return "neither operand is exact in bf16" if name == "bf16x3" and terms == [3, 3] else None


def native_refusal(a: Storage, b: Storage, chip: tuple[int, int]) -> str | None:
    """Why cuBLASLt cannot multiply the two as stored on this chip; None where it can."""
    if a.scale != b.scale or a.rht != b.rht:
        return "operands are scaled differently"
    kinds = {a.element.name, b.element.name}
    if a.global_per_row or b.global_per_row:
        return "cuBLASLt has no global scale for each row"
    if a.scale == "none":
        return None if len(kinds) == 1 else "operands have different dtypes"
    sm = f"sm_{chip[0]}{chip[1]}"
    if a.scale == "e8m0":
        if (a.element.bits, b.element.bits) != (8, 8):
            return "cuBLASLt has no MXFP6 or MXFP4"
        if kinds == {"e5m2"}:
            return "cuBLASLt has no E5M2 x E5M2"
        return None if (10, 0) <= chip < (12, 0) else f"{sm} has no MXFP8 tensor cores (sm_100 has)"
    if a.scale == "e4m3":
        return None if (10, 0) <= chip < (12, 0) else f"{sm} has no NVFP4 tensor cores (sm_100 has)"
    if chip < (8, 9):
        return f"{sm} has no FP8 tensor cores (sm_89 has)"
    if kinds == {"e5m2"}:
        return "cuBLASLt has no E5M2 x E5M2"
    if (a.block is None) != (b.block is None):
        what = "a scale for each row" if (1, ROW) in (a.block, b.block) else "block scales"
        return f"one operand has {what}, the other a single one"
    if a.block is None:
        return None
    by_row = [block == (1, ROW) for block in (a.block, b.block)]
    if chip[0] != 9:
        what = "scales of rows" if all(by_row) else "block scales"
        return f"cuBLASLt multiplies fp32 {what} on sm_90 only, not on {sm}"
    if any(by_row):
        return None if all(by_row) else "one operand has a scale for each row, the other for each block"
    return "cuBLASLt has no 128x128 by 128x128" if a.block[0] > 1 and b.block[0] > 1 else None  # type: ignore


# --- results ------------------------------------------------------------------------------------


def result_dtype(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """float32 if either is (float64 counts as it), equal dtypes their own, bfloat16 with float16 float32."""
    return a if a == b and a != np.float64 else np.dtype(np.float32)


def gelu(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The tanh form, as cuBLASLt's epilogue: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))."""
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    y: npt.NDArray[np.float32] = np.float32(0.5) * x * (1 + np.tanh(inner))
    return y


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What happens to a product before it is stored: out = [out +] activation(a @ b + bias)."""

    bias: Array | None = None
    activation: Literal["gelu"] | None = None
    accumulate: bool = False


def multiply(a: Operand, b: Operand, epilogue: Epilogue, out: Array, aux: Array | None = None) -> None:
    """The product on NumPy into out (m, n): float32 operands, float32 sums, one rounding to out's dtype.

    aux (m, n) receives a @ b + bias, which the backward pass of the activation needs.
    """
    with np.errstate(all="ignore"):
        y = _decoded(a) @ _decoded(b).T
        if epilogue.bias is not None:
            y += epilogue.bias.astype(np.float32)
        if aux is not None:
            aux[...] = y
        if epilogue.activation == "gelu":
            y = gelu(y)
        if epilogue.accumulate:
            y += out
        out[...] = y


def _decoded(operand: Operand) -> npt.NDArray[np.float32]:
    if isinstance(operand.data, QuantizedArray):
        return reference.dequantize_part(operand.data, np.dtype(np.float32), rotated=True)
    return operand.data.astype(np.float32, copy=False)  # type: ignore[no-any-return]


__all__ = ["BFLOAT16", "ENGINES", "Chip", "Engine", "Epilogue", "Operand", "choose_engine", "gelu", "left_operand",
           "multiply", "result_dtype", "right_operand"]
