"""Launch geometry: tile shapes, grids and shared memory of the kernels, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hqarray.formats import Format, Storage

THREADS = 256

MAX_GRID_Y = 65535
"""CUDA's limit on a grid's second and third extent."""


@dataclass(frozen=True)
class Tile:
    """Elements of X one block of threads holds, 8 x 8 a thread, so rows * columns is 16,384."""

    rows: int
    columns: int
    lanes_across: int = 8
    """Lanes of a warp along a row: 8 (a warp covers 32 x 64) or 32 (8 x 256)."""


SQUARE = Tile(128, 128)
TALL = Tile(256, 64)
"""Writes 256 bytes of an FP8 column at once, which DRAM likes better; has no 128-wide blocks."""
WIDE = Tile(32, 512, lanes_across=32)
"""For what stays in its rows: a warp reads and writes one long run."""


def quantize_tile(row: Format | None, column: Format | None) -> Tile:
    """The tile for a pair of formats."""
    blocks = [format.amax_block for format in (row, column) if format is not None]
    if any(block is not None and block[1] > 64 for block in blocks):
        return SQUARE
    if column is not None and column.storage.element.stored_bits > 8:
        return SQUARE
    if column is None and row is not None and row.storage.element.stored_bits > 8:
        return WIDE
    return TALL


MEMBER_BYTES = 320
"""Shared memory of a grouped quantize kernel beside `quantize_shared_bytes`: the member and its arguments."""


def grouped_grid(tile: Tile, capacity: int, num_groups: int, k: int) -> tuple[int, int, int]:
    """The same for members stacked in `capacity` rows: each may end in a tile of its own, and one tile is left over."""
    row_tiles = capacity // tile.rows + num_groups + 1
    y = min(row_tiles, MAX_GRID_Y)
    return max(1, -(-k // tile.columns)), y, -(-row_tiles // y)


def grid(tile: Tile, m: int, k: int) -> tuple[int, int, int]:
    """Blocks along (k, m, m again): row tiles beyond 65,535 continue in z. At least one, for the scalars."""
    row_tiles = max(1, -(-m // tile.rows))
    y = min(row_tiles, MAX_GRID_Y)
    return max(1, -(-k // tile.columns)), y, -(-row_tiles // y)


def quantize_shared_bytes(tile: Tile, column: Format | None) -> int:
    """`Shared` of quantize.cu: staged columns, two tables, keys, partial amaxes, factors, an amax of each warp."""
    stage = 16 if column is None else tile.columns * tile.rows * column.storage.element.stored_bits // 8
    return stage + 2 * (128 * 4 + 32) + 80 + 2 * 4 * 128 * 4 + 2 * 128 * 4 + THREADS // 32 * 4


def most_blocks(format: Format | None) -> int:
    """Blocks of threads that leave a format's kernel the registers it wants: sums of errors, draws, rotated copies.

    With 64 registers, 4 blocks, kernels that draw spill 20 to 120 bytes.
    """
    if format is None:
        return 4
    if format.measures_rows:
        return 2
    sums_errors = getattr(format.scaling, "four_over_six", None) is not None
    return 3 if sums_errors or format.is_stochastic or format.storage.rht else 4


def dequantize_tile(storage: Storage, transposed: bool) -> Tile:
    """The tile over the values a part decodes to."""
    return SQUARE if transposed else WIDE


def dequantize_shared_bytes(tile: Tile, storage: Storage, transposed: bool) -> int:
    """The staged columns of dequantize.cu."""
    return tile.columns * tile.rows * storage.element.stored_bits // 8 if transposed else 0


def min_blocks(dtype: str, aligned: bool, shared_bytes: int) -> int:
    """Blocks of threads a multiprocessor must hold at once, which sets the registers a thread may have.

    4 (64 registers) where the patch is packed; 2 (128) for float32, whose patch alone takes 64, and where rows are
    not aligned. Shared memory beyond about 160 KiB in use takes L1 lines from the loads.
    """
    if dtype == "float32" or shared_bytes > 24 << 10:
        return 2
    return 4 if aligned else 3


def dequantize_min_blocks(storage: Storage, dtype: str, transposed: bool, shared_bytes: int) -> int:
    """The same for dequantize: staged bytes want 80 registers, and are as fast with 3 blocks as with 4; so do staged
    lines that are rotated back.
    """
    if dtype == "float32" or storage.element.bits > 16 or shared_bytes > 24 << 10:
        return 2
    return 3 if transposed and (storage.element.stored_bits == 8 or storage.rht) else 4


def min_blocks_before_sm_89(row: Format | None, column: Format | None, blocks: int) -> int:
    """The same where FP8 codes are made bit by bit: with 64 registers a pair of 128-blocks spills 52 to 88 bytes."""
    blocks_of_128 = [format is not None and format.amax_block is not None and format.amax_block[1] > 64
                     for format in (row, column)]
    return min(blocks, 3) if all(blocks_of_128) else blocks


DECODE_TILE = Tile(64, 256, lanes_across=32)
"""What a block of the decode kernel reads, which stays in its rows."""

FINISH_TILE = Tile(8, 1024)
"""What a block of the finishing kernel writes: 4 columns a thread."""

RECORDS_TILE = Tile(32, 1024)
"""Rows, one a lane, and bytes of codes that a block packs or unpacks."""

COMBINE_TILE = Tile(2, 2048)
"""What a block of the combining kernel writes: 8 columns a thread."""


def combine_min_blocks(dtype: str, aligned: bool) -> int:
    """Blocks of the combining kernel on a multiprocessor: as many as its registers let, where it is to be fast."""
    return 1 if not aligned else 3 if dtype == "float32" else 5


DOT_TILE = Tile(1, 1)
"""A block multiplies one row by another; its grid has no columns."""

GROUP_FINISH_TILE = Tile(32, 1024)
"""The same for many products: a block that looks for its member does more."""

SETUP_TILE = Tile(1, 1)
"""The kernel that sets up a grouped GEMM has no tile; its grid is `setup_grid`."""

ZERO_BLOCKS = 264
"""Blocks that zero the rows behind the last member: two a multiprocessor of an H200."""


def setup_grid(zeros_rest: bool) -> tuple[int, int, int]:
    """One block sets up a grouped GEMM, the others zero rows of the result."""
    return 1 + (ZERO_BLOCKS if zeros_rest else 0), 1, 1


def ragged_grid(tile: Tile, outer: int, capacity: int, num_groups: int) -> tuple[int, int, int]:
    """Blocks where members differ along k: tiles of all members in x, tiles of their equal rows in y and z."""
    _, y, z = grid(tile, outer, 1)
    return capacity // tile.columns + num_groups + 1, y, z


SCALE_TILE = Tile(128, 8)
"""Scales (lines x blocks) that a block of the tiling kernel moves."""

HISTORY_TILE = Tile(1, 1)
"""Of the kernel of delayed scaling: a block of threads for each history."""

NARROW_TILE = Tile(1, 1024)
"""Elements a block of the narrowing kernel rounds: 4 a thread."""
