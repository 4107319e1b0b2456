"""Traits: a format's row as C++ text. The kernels are templates over these and never see a format's name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hqarray import hadamard
from hqarray.formats import Element, Format, PowerOfTwo, Reciprocal, Storage, TwoLevel
from hqarray.groups import Axis, Span, code_span, global_span, scale_span

from . import geometry
from .geometry import Tile
from .loader import Source

_SPECIALS = {"none": "FINITE", "nan": "NAN_ONLY", "ieee": "IEEE"}
_SCALES = {"none": "NO_SCALE", "float32": "FLOAT32", "e8m0": "E8M0", "e4m3": "E4M3_SCALE"}
_CHOICES = {None: "ALWAYS_SIX", "mae": "ABSOLUTE_ERRORS", "mse": "SQUARED_ERRORS"}
_WIDE = {"bfloat16": "BFloat16", "float16": "Float16", "float32": "Float32"}

_FP8_CONVERSIONS = {(4, 3, 7, "nan"), (5, 2, 15, "ieee")}
_FP6_CONVERSIONS = {(2, 3, 1, "none"), (3, 2, 3, "none")}
"""(exponent bits, mantissa bits, bias, specials) that the chip's FP8 conversion serves; others go bit by bit."""


MOST_INT = (1 << 31) - 1
"""What stands for a block's columns where they are a whole row."""


def wide(dtype_name: str) -> str:
    """The input type of values kept in a dtype."""
    return _WIDE[dtype_name]


def _element(element: Element) -> str:
    if element.bits > 8:
        return "hq::Element<4, 3, 7, hq::NAN_ONLY>"  # unquantized: never used
    if not _is_built(element):
        raise NotImplementedError(
            f"{element.name} has no CUDA kernels: they take E2M1, and elements of 6 and 8 bits that float16 holds, "
            f"with 4 exponent bits at most, or 5 and infinities; quantize a NumPy array"
        )
    return (
        f"hq::Element<{element.exponent_bits}, {element.mantissa_bits}, {element.bias}, "
        f"hq::{_SPECIALS[element.specials]}>"
    )


def _is_built(element: Element) -> bool:
    """Whether encode.cuh and dequantize.cu are right for it: decoding goes through float16, FP4 is E2M1."""
    if element.bits == 4:
        return (element.exponent_bits, element.mantissa_bits, element.bias, element.specials) == (2, 1, 1, "none")
    finite = element.values[np.isfinite(element.values)]
    with np.errstate(all="ignore"):
        held = bool((finite.astype(np.float16) == finite).all())
    halves = element.exponent_bits <= 4 or (element.exponent_bits == 5 and element.specials == "ieee")
    return held and halves and element.bias >= 0




def storage_traits(name: str, storage: Storage) -> str:
    """What decoding needs, as `struct name`."""
    element = storage.element
    facts = (element.exponent_bits, element.mantissa_bits, element.bias, element.specials)
    block = storage.block or (1, 1)
    return f"""struct {name} {{
    static constexpr bool present = true;
    typedef {_element(element)} Element;
    typedef {_WIDE.get(element.name, "Float32")} Wide;
    static constexpr int bits = {element.bits}, stored_bits = {element.stored_bits};
    static constexpr bool hardware_fp8 = {_cpp(facts in _FP8_CONVERSIONS)};
    static constexpr bool hardware_fp6 = {_cpp(facts in _FP6_CONVERSIONS)};
    static constexpr int scale = {_SCALES[storage.scale]};
    static constexpr bool one_scale = {_cpp(storage.block is None)};
    static constexpr int scale_rows = {block[0]};
    static constexpr i64 scale_columns = {block[1]};
    static constexpr bool global_scale = {_cpp(storage.global_scale)}, global_per_row = {_cpp(storage.global_per_row)};
    static constexpr bool rht = {_cpp(storage.rht)};
    static constexpr u32 signs = {SIGNS:#x};
"""


def format_traits(name: str, format: Format | None) -> str:
    """What quantizing needs, as `struct name`; None: this direction is left out."""
    if format is None:
        return (
            f"struct {name} {{ static constexpr bool present = false; static constexpr int stored_bits = 8, bits = 8, "
            f"scaling = NO_SCALING, block_rows = 0, block_columns = 0, four_over_six = ALWAYS_SIX; "
            f"static constexpr bool rht = false, stochastic = false, per_row = false; "
            f"typedef hq::Element<4, 3, 7, hq::NAN_ONLY> Element; }};\n"
        )
    rule = format.scaling
    block = format.amax_block or (0, 0)
    scaling, rounding, pow2, epsilon, bound, choice = "NO_SCALING", "UP", False, 0.0, 1.0, None
    if isinstance(rule, Reciprocal):
        scaling, pow2, epsilon = "RECIPROCAL", rule.pow2, rule.epsilon
    elif isinstance(rule, PowerOfTwo):
        scaling, rounding = "POWER_OF_TWO", rule.rounding.upper()
    elif isinstance(rule, TwoLevel):
        scaling, bound, choice = "TWO_LEVEL", rule.bound, rule.four_over_six
    return (
        storage_traits(name, format.storage)
        + f"""    static constexpr int scaling = {scaling}, rounding = {rounding};
    static constexpr int block_rows = {block[0]}, block_columns = {min(block[1], MOST_INT)};
    static constexpr int four_over_six = {_CHOICES[choice]};
    static constexpr bool pow2 = {_cpp(pow2)}, stochastic = {_cpp(format.is_stochastic)};
    static constexpr bool per_row = {_cpp(format.measures_rows)};
    static constexpr float epsilon = {_float(epsilon)}, bound = {_float(bound)};
}};
"""
    )


SIGNS = sum(1 << i for i, sign in enumerate(hadamard.SIGNS) if sign < 0)
"""Bit i is set where the i-th of 16 rotated values is negated."""


def _cpp(value: bool) -> str:
    return "true" if value else "false"


def _float(value: float) -> str:
    return f"float({value!r})"


# --- sources ------------------------------------------------------------------------------------


def _tile(tile: Tile, aligned: bool, min_blocks: int, before_sm_89: int | None = None) -> str:
    old = min_blocks if before_sm_89 is None else before_sm_89
    blocks = f"{min_blocks}" if old == min_blocks else f"(__CUDA_ARCH__ < 890 ? {old} : {min_blocks})"
    return (
        f"constexpr int TILE_ROWS = {tile.rows}, TILE_COLUMNS = {tile.columns}, LANES_ACROSS = {tile.lanes_across};\n"
        f"constexpr bool ALIGNED = {_cpp(aligned)};\n#define MIN_BLOCKS {blocks}\n"
    )


_TILE_CONSTANTS = "#define GROUPED 0\ntypedef BFloat16 Input;\n" + _tile(geometry.SQUARE, True, 1)
"""For kernels with tiles of their own that use what tile.cuh holds besides."""


@dataclass(frozen=True)
class Launch:
    """A specialisation and how to launch it."""

    source: Source
    tile: Tile
    shared_bytes: int


def _grouped(grouped: bool, **spans: Span | None) -> str:
    """Whether the rows are those of many matrices, and how a member's segments are found."""
    text = f"#define GROUPED {int(grouped)}\n"
    for name, span in spans.items() if grouped else ():
        one = span or Span(1, 1)
        text += f"#define {name} hq::Span<{min(one.divide, MOST_INT)}, {one.multiple}>\n"
    return text


def quantize_launch(
    row: Format | None, column: Format | None, dtype: str, aligned: bool, grouped: bool = False
) -> Launch:
    """The quantize kernel of a pair for an input dtype; grouped: of many matrices."""
    tile = geometry.SQUARE if grouped else geometry.quantize_tile(row, column)
    shared = geometry.quantize_shared_bytes(tile, column) + (geometry.MEMBER_BYTES if grouped else 0)
    blocks = 3 if tile is geometry.WIDE else geometry.min_blocks(dtype, aligned, shared)
    blocks = min(blocks, geometry.most_blocks(row), geometry.most_blocks(column))
    spans = {
        "RowScales": None if row is None else scale_span(row.storage, "outer", 8),
        "ColumnScales": None if column is None else scale_span(column.storage, "k", 8),
    }
    text = (
        f"typedef {wide(dtype)} Input;\n"
        + _tile(tile, aligned, blocks, geometry.min_blocks_before_sm_89(row, column, blocks))
        + f"constexpr u32 SIGNS = {SIGNS:#x};\n"
        + f"constexpr int SHARED_BYTES = {shared};\nconstexpr bool SAME_FORMAT = {_cpp(row == column)};\n"
        + _grouped(grouped, **spans) + format_traits("Row", row) + format_traits("Column", column)
    )
    return Launch(Source("quantize.cu", "hq_quantize", text), tile, shared)


@dataclass(frozen=True)
class Measure:
    """What a part measures before its first code: the amax of the matrix or of each line, of values as it has them."""

    kind: Literal["WHOLE", "LINES"]
    rotated: bool = False


def measures_of(
    row: Format | None, column: Format | None, given: bool
) -> tuple[Measure | None, Measure | None, bool]:
    """What both parts measure, and whether the columnwise one takes the rowwise one's; given: the caller has one."""
    measures = [None if format is None else _measure_of(format, given) for format in (row, column)]
    shared = measures[0] is not None and measures[0] == measures[1] == Measure("WHOLE")
    return measures[0], None if shared else measures[1], shared


def _measure_of(format: Format, given: bool) -> Measure | None:
    if format.measures_rows:
        return Measure("LINES", format.storage.rht)
    return Measure("WHOLE", format.storage.rht) if format.measures_amax and not given else None


def amax_launch(
    dtype: str, aligned: bool, grouped: bool = False, row: Measure | None = Measure("WHOLE"),
    column: Measure | None = None,
) -> Launch:
    """The amax kernel for an input dtype, of what two parts measure; grouped: of each matrix."""
    tile = geometry.SQUARE
    rotated = row is not None and row.rotated, column is not None and column.rotated
    blocks = min(geometry.min_blocks(dtype, aligned, 0), 3 if any(rotated) else 4)
    text = f"typedef {wide(dtype)} Input;\nconstexpr u32 SIGNS = {SIGNS:#x};\n"
    text += _tile(tile, aligned, blocks) + _grouped(grouped)
    for name, measure in (("ROW", row), ("COLUMN", column)):
        text += f"constexpr int {name} = {'NOTHING' if measure is None else measure.kind};\n"
        text += f"constexpr bool {name}_ROTATED = {_cpp(measure is not None and measure.rotated)};\n"
    return Launch(Source("amax.cu", "hq_amax", text), tile, 0)


def _spans(storage: Storage, ragged: Axis) -> dict[str, Span | None]:
    """How decoding finds a member's codes, scales and lines' global scales; of the spans only what kernels are told."""
    return {"Codes": code_span(storage, ragged, 8, 1), "Scales": scale_span(storage, ragged, 8),
            "GlobalScales": global_span(storage, ragged, 8)}


def dequantize_launch(storage: Storage, dtype: str, transposed: bool, aligned: bool, grouped: bool = False) -> Launch:
    """The dequantize kernel of a storage to an output dtype; grouped: of many matrices."""
    tile = geometry.dequantize_tile(storage, transposed)
    shared = geometry.dequantize_shared_bytes(tile, storage, transposed)
    ragged: Axis = "k" if transposed else "outer"
    text = (
        f"typedef {wide(dtype)} Output;\ntypedef Output Input;\n"
        + _tile(tile, aligned, geometry.dequantize_min_blocks(storage, dtype, transposed, shared))
        + f"constexpr int TRANSPOSED = {int(transposed)};\n"
        + _grouped(grouped, **_spans(storage, ragged)) + storage_traits("Part", storage) + "};\n"
    )
    return Launch(Source("dequantize.cu", "hq_dequantize", text), tile, shared)


def narrow_launch() -> Launch:
    """The kernel that rounds float64 to float32, over a matrix of one row."""
    return Launch(Source("narrow.cu", "hq_narrow", _TILE_CONSTANTS), geometry.NARROW_TILE, 0)


def delayed_launch() -> Launch:
    """The kernel that takes amaxes from those of earlier steps."""
    return Launch(Source("delayed.cu", "hq_delayed", _TILE_CONSTANTS), geometry.HISTORY_TILE, 0)


def records_launch(packs: bool, scale_bytes: int) -> Launch:
    """The kernel that makes records of rows, or rows of records; of rows without scales their bytes do not matter."""
    tile = geometry.RECORDS_TILE
    text = _TILE_CONSTANTS + f"typedef {'float' if scale_bytes == 4 else 'u8'} Scale;\n"
    text += f"constexpr bool PACKS = {_cpp(packs)};\nconstexpr int VECTORS = {tile.columns // (16 * tile.rows)};\n"
    return Launch(Source("records.cu", "hq_records", text), tile, 0)


def combine_launch(dtype: str, aligned: bool) -> Launch:
    """The kernel that sums rows by weight; aligned: they lie on 16 bytes, and columns are a multiple of 8."""
    tile = geometry.COMBINE_TILE
    text = "#define GROUPED 0\ntypedef BFloat16 Input;\n"
    text += _tile(geometry.SQUARE, aligned, geometry.combine_min_blocks(dtype, aligned))
    text += f"typedef {wide(dtype)} Value;\nconstexpr int ROWS = {tile.rows};\n"
    return Launch(Source("combine.cu", "hq_combine", text), tile, 0)


def dot_launch(dtype: str, other: str) -> Launch:
    """The kernel that multiplies rows by those of another matrix."""
    tile = geometry.DOT_TILE
    text = _TILE_CONSTANTS + f"typedef {wide(dtype)} Value;\ntypedef {wide(other)} Other;\n"
    return Launch(Source("dot.cu", "hq_dot", text), tile, 0)


def transpose_launch(storage: Storage) -> Launch:
    """The kernel that moves the codes of a transposable format's part."""
    tile = geometry.SQUARE
    shared = geometry.dequantize_shared_bytes(tile, storage, True)
    text = "typedef BFloat16 Input;\n" + _tile(tile, True, 2) + _grouped(False)
    text += storage_traits("Part", storage) + "};\n"
    return Launch(Source("transpose.cu", "hq_transpose", text), tile, shared)


# --- around a GEMM ------------------------------------------------------------------------------


def left_to_alpha(storage: Storage) -> tuple[Storage, bool]:
    """What the decode kernel multiplies by itself, and whether a scale of the whole matrix is left to alpha.

    Rotated values are multiplied as they are.
    """
    storage = replace(storage, rht=False)
    if storage.global_per_row:
        return storage, False
    if storage.scale != "none" and storage.block is None:
        return replace(storage, scale="none"), True
    return replace(storage, global_scale=False), storage.global_scale


def decode_launch(storage: Storage, dtype: str, terms: int, split: bool, ragged: Axis | None = None) -> Launch:
    """The decode kernel of a storage to a GEMM operand in bfloat16 or float32; ragged: of many matrices."""
    part, scalar = left_to_alpha(storage)
    few = dtype == "bfloat16" and storage.element.bits <= 16 and terms == 1
    axis = ragged or "outer"
    text = (
        f"typedef {wide(dtype)} Output;\ntypedef Output Input;\n"
        + _tile(geometry.DECODE_TILE, True, 4 if few else 2)
        + f"constexpr int TRANSPOSED = 0, TERMS = {terms};\nconstexpr bool RAGGED_K = {_cpp(ragged == 'k')};\n"
        + _grouped(ragged is not None, **_spans(part, axis))
        + f"constexpr bool SCALAR = {_cpp(scalar)}, SPLIT = {_cpp(split)};\n" + storage_traits("Part", part) + "};\n"
    )
    return Launch(Source("decode.cu", "hq_decode", text), geometry.DECODE_TILE, 0)


@dataclass(frozen=True)
class Finish:
    """What the finishing kernel does to a sum: dtype names of its arrays, None where there is none.

    grouped  the sum is of many products, stacked along rows
    scaled   each of them has a factor of its own
    """

    out: str
    bias: str | None = None
    aux: str | None = None
    gelu: bool = False
    accumulate: bool = False
    grouped: bool = False
    scaled: bool = False


def finish_launch(finish: Finish) -> Launch:
    """The finishing kernel: bias, gelu, accumulate, cast, any row pitch."""
    tile = geometry.GROUP_FINISH_TILE if finish.grouped else geometry.FINISH_TILE
    text = (
        f"typedef {wide(finish.out)} Output;\ntypedef {wide(finish.bias or 'float32')} Bias;\n"
        f"typedef {wide(finish.aux or 'float32')} Aux;\n"
        f"constexpr bool HAS_BIAS = {_cpp(finish.bias is not None)}, HAS_AUX = {_cpp(finish.aux is not None)}, "
        f"GELU = {_cpp(finish.gelu)}, ACCUMULATE = {_cpp(finish.accumulate)}, SCALED = {_cpp(finish.scaled)};\n"
        f"constexpr int ROWS = {tile.rows};\ntypedef BFloat16 Input;\n" + _tile(geometry.SQUARE, True, 1)
        + _grouped(finish.grouped)
    )
    return Launch(Source("finish.cu", "hq_finish", text), tile, 0)


def members_launch() -> Launch:
    """The kernel that finds the member of each row tile of a group, a warp a tile."""
    return Launch(Source("members.cu", "hq_members", _TILE_CONSTANTS), Tile(geometry.THREADS // 32, 1), 0)


def group_gemm_launch() -> Launch:
    """The kernel that turns sizes into the pointers and dimensions of a grouped GEMM."""
    return Launch(Source("group_gemm.cu", "hq_group_gemm", _TILE_CONSTANTS), geometry.SETUP_TILE, 0)


def tile_scales_launch() -> Launch:
    """The kernel that lays byte scales out in 128 x 4 tiles."""
    return Launch(Source("tile_scales.cu", "hq_tile_scales", ""), geometry.SCALE_TILE, 0)
