"""Launch geometry: tile shapes, grids and shared memory of the kernels, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hqarray.formats import Format, Storage

THREADS = 256

MAX_GRID_Y = 65535
"""CUDA's limit on a grid's second and third extent."""


@dataclass(frozen=True)
class Tile:
    """Elements of X one block of threads holds; 32 x 64 a warp, so rows * columns is 16,384."""

    rows: int
    columns: int


SQUARE = Tile(128, 128)
TALL = Tile(256, 64)
"""Writes 256 bytes of an FP8 column at once, which DRAM likes better; has no 128-wide blocks."""


def quantize_tile(row: Format | None, column: Format | None) -> Tile:
    """The tile for a pair of formats."""
    blocks = [format.amax_block for format in (row, column) if format is not None]
    if column is None or any(block is not None and block[1] > 64 for block in blocks):
        return SQUARE
    return SQUARE


def grid(tile: Tile, m: int, k: int) -> tuple[int, int, int]:
    """Blocks along (k, m, m again): row tiles beyond 65,535 continue in z. At least one, for the scalars."""
    row_tiles = max(1, -(-m // tile.rows))
    y = min(row_tiles, MAX_GRID_Y)
    return max(1, -(-k // tile.columns)), y, -(-row_tiles // y)


def quantize_shared_bytes(tile: Tile, column: Format | None) -> int:
    """`Shared` of quantize.cu: staged columns, two tables, partial amaxes, factors."""
    stage = 16 if column is None else tile.columns * tile.rows * column.storage.element.stored_bits // 8
    return stage + 2 * 128 * 4 + 2 * 4 * 128 * 4 + 2 * 128 * 4


def dequantize_shared_bytes(tile: Tile, storage: Storage, transposed: bool) -> int:
    """The staged columns of dequantize.cu."""
    return tile.columns * tile.rows * storage.element.stored_bits // 8 if transposed else 0


def min_blocks(dtype: str, aligned: bool, shared_bytes: int) -> int:
    """Blocks of threads a multiprocessor must hold at once, which sets the registers a thread may have.

    4 (64 registers) where the patch is packed; 2 (128) for float32, whose patch alone takes 64, and where rows are
    not aligned. Shared memory beyond about 160 KiB in use takes L1 lines from the loads.
    """
    if dtype == "float32" or not aligned or shared_bytes > 40 << 10:
        return 2
    return 3 if shared_bytes > 24 << 10 else 4
