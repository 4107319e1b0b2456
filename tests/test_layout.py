"""Layouts: inverse pairs, zero padding, and the addresses cuBLASLt expects."""

import numpy as np
import pytest

from hqarray.formats import FORMATS
from hqarray.layout import (
    ALIGNMENT,
    PITCH,
    BlockMajor,
    CodeLayout,
    RowMajor,
    Tiled128x4,
    pack_nibbles,
    part_layout,
    round_up,
    scale_layout,
    unpack_nibbles,
)

named = pytest.mark.parametrize
SHAPES = [(0, 0), (0, 33), (5, 0), (1, 1), (1, 17), (3, 32), (16, 16), (131, 259), (128, 512)]
SCALE_LAYOUTS = [RowMajor(), RowMajor(4), BlockMajor(), BlockMajor(4), BlockMajor(16), Tiled128x4()]
sizes = named("shape", SHAPES, ids=str)


@named("k", [0, 1, 2, 15, 16, 33])
@named("outer", [0, 1, 3])
def test_nibbles_pack_low_first_and_unpack_to_themselves(outer, k):
    codes = np.random.default_rng(0).integers(0, 16, (outer, k), dtype=np.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (outer, -(-k // 2)) and packed.dtype == np.uint8
    for i, j in np.ndindex(outer, k):
        assert packed[i, j // 2] >> 4 * (j % 2) & 15 == codes[i, j]
    if k % 2:
        assert not (packed[:, -1] >> 4).any()
    np.testing.assert_array_equal(unpack_nibbles(packed, k), codes)


def test_nibbles_literally():
    assert pack_nibbles(np.array([[1, 2, 3]], np.uint8)).tolist() == [[0x21, 0x03]]


@sizes
@named(("stored_bits", "itemsize"), [(8, 1), (4, 1), (16, 2), (32, 4)])
def test_codes_lie_in_zero_padded_rows_of_16_bytes(stored_bits, itemsize, shape):
    layout = CodeLayout(*shape, stored_bits, itemsize)
    outer, k = shape
    assert layout.columns == -(-k * stored_bits // 8) // itemsize
    assert layout.pitch * itemsize % PITCH == 0 and 0 <= layout.pitch - layout.columns < PITCH
    assert layout.rows % 16 == 0 and 0 <= layout.rows - outer < 16
    codes = np.arange(1, 1 + outer * layout.columns).astype(f"u{itemsize}").reshape(outer, layout.columns)
    codes[codes == 0] = 1
    padded = layout.pad(codes)
    assert padded.nbytes == layout.nbytes and padded.shape == (layout.rows, layout.pitch)
    np.testing.assert_array_equal(layout.view(padded), codes)
    assert np.count_nonzero(padded) == codes.size
    assert np.shares_memory(layout.view(padded), padded) or not codes.size


@sizes
@named("layout", SCALE_LAYOUTS, ids=repr)
def test_tile_and_untile_undo_one_another(layout, shape):
    rows, blocks = shape
    scales = np.random.default_rng(0).integers(1, 255, shape, dtype=np.uint8)
    buffer = layout.tile(scales)
    assert buffer.shape == layout.buffer_shape(rows, blocks)
    assert np.count_nonzero(buffer) == scales.size
    np.testing.assert_array_equal(layout.untile(buffer, rows, blocks), scales)
    poisoned = buffer.copy()
    poisoned[buffer == 0] = 0xFF
    np.testing.assert_array_equal(layout.untile(poisoned, rows, blocks), scales)


@sizes
@named("layout", SCALE_LAYOUTS, ids=repr)
def test_untiling_a_strided_layout_is_a_view(layout, shape):
    buffer = layout.tile(np.ones(shape, np.uint8))
    scales = layout.untile(buffer, *shape)
    if scales.size:
        assert np.shares_memory(scales, buffer) == (not isinstance(layout, Tiled128x4))


def test_tiled_scales_lie_where_cublaslt_reads_them():
    """Facts 3.4: ((i/128) * tiles + j/4) * 512 + (i%32) * 16 + (i%128)/32 * 4 + j%4."""
    rows, blocks = 260, 9
    scales = np.random.default_rng(0).integers(1, 255, (rows, blocks), dtype=np.uint8)
    flat, tiles = Tiled128x4().tile(scales).ravel(), -(-blocks // 4)
    assert flat.size == 3 * tiles * 512
    for i, j in np.ndindex(rows, blocks):
        at = ((i // 128) * tiles + j // 4) * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
        assert flat[at] == scales[i, j]


def test_block_major_scales_lie_where_cublaslt_reads_them():
    """VEC128: float32 (ceil(k/128), pad4(outer)); BLK128x128: (ceil(outer/128), pad4(ceil(k/128)))."""
    vec = part_layout(FORMATS["fp8_block_1x128"].storage, (131, 259))
    assert vec.scales_shape == (3, 132) and vec.num_scales == (131, 3)
    blk = part_layout(FORMATS["fp8_block_128x128"].storage, (131, 700))
    assert blk.scales_shape == (2, 8) and blk.num_scales == (2, 6)


@named("name", FORMATS)
def test_byte_scales_lie_block_major(name):
    storage = FORMATS[name].storage
    if storage.scale in ("e8m0", "e4m3"):
        assert scale_layout(storage) == BlockMajor(16)


@sizes
@named("name", FORMATS)
def test_segments_of_a_part_are_aligned_and_do_not_overlap(name, shape):
    layout = part_layout(FORMATS[name].storage, shape)
    scales_nbytes = int(np.prod(layout.scales_shape)) * layout.scales_dtype.itemsize
    assert layout.scales_offset % ALIGNMENT == 0 and layout.scales_offset >= layout.codes.nbytes
    assert layout.global_scale_offset >= layout.scales_offset + scales_nbytes
    assert layout.amax_offset >= layout.global_scale_offset + 4 and layout.nbytes >= layout.amax_offset + 4
    assert layout.global_scale_offset % 16 == layout.amax_offset % 16 == 0


def test_a_layout_is_made_once():
    storage = FORMATS["nvfp4"].storage
    assert part_layout(storage, (3, 5)) is part_layout(storage, (3, 5))


@named(("count", "multiple", "expected"), [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 16, 32)])
def test_round_up(count, multiple, expected):
    assert round_up(count, multiple) == expected
