"""What the CUDA kernels are made from: launch geometry and rendered traits; every one compiles within its budget."""

import importlib.util
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

import hqarray as hq
from hqarray import formats, testing
from hqarray.formats import BFLOAT16, ELEMENTS, FORMATS, MX, ROW, Element, FP8Block, as_format
from hqarray.rawkernels import catalogue, geometry, loader, traits

KERNELS = sorted(loader.SOURCES.glob("*.cu"))
NAMES = list(FORMATS)
ROWS = list(FORMATS.values())
PAIRS = [pair for pair in itertools.product([None, *ROWS], repeat=2) if pair != (None, None)]
MOST_SHARED = 99 << 10
"""Bytes a block may have on sm_86, sm_89 and sm_120, the least of all; an H200 gives 227 KiB."""


def has_compiler():
    """Whether cuda-core and an NVRTC package are installed."""
    try:
        core = importlib.util.find_spec("cuda.core")
    except ModuleNotFoundError:
        core = None
    return core is not None and loader.nvrtc_version() != "toolkit"


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no cuda-core and NVRTC: pip install 'hqarray[kernels]'")


# --- geometry -----------------------------------------------------------------------------------

TILES = {
    *(geometry.quantize_tile(row, column) for row, column in PAIRS),
    *(geometry.dequantize_tile(row.storage, turned) for row in ROWS for turned in (False, True)),
}
SHAPES = [
    (0, 0), (0, 300), (300, 0), (1, 1), (1, 1000), (1000, 1), (8, 8), (63, 65), (64, 64), (128, 128), (127, 129),
    (256, 256), (257, 513), (5000, 40), (65535 * 64, 64), (65535 * 64 + 1, 1), (65535 * 128 + 1, 129),
    (65535 * 256, 8), (65535 * 256 + 1, 8), (3 * 65535 * 256 + 77, 300), (1 << 24, 1 << 10), (1 << 10, 1 << 24),
    (46341, 46341), (1, (1 << 31) + 5), ((1 << 31) + 5, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_grid_covers_every_tile_once(tile, shape):
    m, k = shape
    x, y, z = geometry.grid(tile, m, k)
    assert 1 <= x < 1 << 31
    assert 1 <= y <= geometry.MAX_GRID_Y
    assert 1 <= z <= geometry.MAX_GRID_Y
    assert (x - 1) * tile.columns < max(k, 1) <= max(x * tile.columns, 1)
    row_tiles = (np.arange(y)[None, :] + np.arange(z)[:, None] * y).ravel()  # as tile.cuh's locate counts them
    wanted = -(-m // tile.rows)
    assert (row_tiles[row_tiles < wanted] == np.arange(wanted)).all()
    assert len(row_tiles) - max(wanted, 1) < y, "a slice of the grid that finds no tile"


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_patches_of_a_block_cover_the_tile_once(tile):
    threads = np.arange(geometry.THREADS)
    lane, warp = threads % 32, threads // 32
    across, warps_across = tile.lanes_across, tile.columns // (8 * tile.lanes_across)
    rows = (warp // warps_across * (32 // across) + lane // across) * 8
    columns = (warp % warps_across * across + lane % across) * 8
    count = np.zeros((tile.rows, tile.columns), int)
    for row, column in zip(rows, columns, strict=True):
        count[row : row + 8, column : column + 8] += 1
    assert (count == 1).all()


@pytest.mark.parametrize(("row", "column"), PAIRS, ids=lambda row: "-" if row is None else row.name)
def test_tile_holds_whole_blocks_of_both_formats(row, column):
    tile = geometry.quantize_tile(row, column)
    for format, lines, length in ((row, tile.rows, tile.columns), (column, tile.columns, tile.rows)):
        if format is not None and format.amax_block is not None:
            block = format.amax_block
            assert lines % block[0] == 0
            assert block[1] == ROW or length % block[1] == 0


def test_blocks_of_128_and_wide_columns_take_the_square_tile_copied_rows_the_wide_others_the_tall_one():
    for row, column in PAIRS:
        blocks = [format.amax_block for format in (row, column) if format is not None]
        square = any(block is not None and block[1] in (128, ROW) for block in blocks)
        square |= column is not None and column.storage.element.bits > 8
        copied = column is None and row is not None and row.storage.element.bits > 8
        tile = geometry.WIDE if copied else geometry.SQUARE if square else geometry.TALL
        assert geometry.quantize_tile(row, column) == tile


def test_a_grid_of_groups_has_a_tile_for_each_end_and_one_behind():
    rng = np.random.default_rng(0)
    for tile in (geometry.SQUARE, geometry.WIDE):
        for num_groups in (1, 7, 64, 1000):
            for capacity in (0, 1, 4096, 100_000):
                columns, y, z = geometry.grouped_grid(tile, capacity, num_groups, 4096)
                sizes = rng.multinomial(capacity, np.ones(num_groups) / num_groups)
                assert y * z > sum(-(-sizes // tile.rows))
                assert columns * tile.columns >= 4096
                assert y <= geometry.MAX_GRID_Y


def test_shared_memory_fits_every_chip_and_leaves_room_for_l1():
    launches = [traits.quantize_launch(*pair, dtype, True) for pair in PAIRS for dtype in catalogue.DTYPES]
    launches += [traits.dequantize_launch(row.storage, dtype, turned, True)
                 for row in catalogue.STORED.values() for dtype in catalogue.DTYPES for turned in (False, True)]
    launches += [traits.transpose_launch(row.storage) for row in catalogue.STORED.values() if row.transposable]
    for launch in launches:
        blocks = int(re.search(r"#define MIN_BLOCKS .*?(\d)\)?\n", launch.source.text)[1])
        assert launch.shared_bytes <= MOST_SHARED
        assert blocks * launch.shared_bytes <= 160 << 10
        assert blocks * geometry.THREADS <= 1536, "threads that the smallest multiprocessor holds"


@pytest.mark.parametrize(("bits", "transposed", "expected"), [(4, True, 8192), (8, True, 16384), (32, True, 65536)])
def test_staged_columns_take_a_tile_of_codes(bits, transposed, expected):
    storage = next(row.storage for row in ROWS if row.storage.element.stored_bits == bits)
    tile = geometry.dequantize_tile(storage, transposed)
    assert geometry.dequantize_shared_bytes(tile, storage, transposed) == expected
    assert geometry.dequantize_shared_bytes(geometry.WIDE, storage, False) == 0


@needs_compiler
@pytest.mark.parametrize(("row", "column"), [("nvfp4", "nvfp4"), ("mxfp8", None), (None, "fp8_block_1x128"),
                                             ("mxfp4", "fp32")])
def test_shared_memory_is_what_the_kernel_takes(row, column):
    """The kernel refuses less than its struct; the number given is at most one table larger."""
    pair = (None if name is None else FORMATS[name] for name in (row, column))
    launch = traits.quantize_launch(*pair, "float32", True)
    table = 128 * 4 + 32
    given = f"SHARED_BYTES = {launch.shared_bytes};"
    assert given in launch.source.text
    loader.compile_cubin(launch.source, "sm_90a")
    too_few = f"SHARED_BYTES = {launch.shared_bytes - table - 1};"
    less = replace(launch.source, text=launch.source.text.replace(given, too_few))
    with pytest.raises(RuntimeError, match="the launch reserves too little shared memory"):
        loader.compile_cubin(less, "sm_90a")


# --- traits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "facts"), [
    ("nvfp4_16x16", ["hq::Element<2, 1, 1, hq::FINITE>", "bits = 4", "stored_bits = 4", "scaling = TWO_LEVEL",
                     "scale = E4M3_SCALE", "scale_rows = 1", "scale_columns = 16", "block_rows = 16",
                     "block_columns = 16", "global_scale = true", "bound = float(448.0)", "hardware_fp8 = false"]),
    ("mxfp6_e3m2(rule=even)", ["hq::Element<3, 2, 3, hq::FINITE>", "bits = 6", "stored_bits = 8", "scale = E8M0",
                               "scaling = POWER_OF_TWO", "rounding = EVEN", "block_columns = 32",
                               "hardware_fp6 = true", "global_scale = false"]),
    ("fp8_block_128x128(element=e5m2,pow2=true,epsilon=0.25)",
     ["hq::Element<5, 2, 15, hq::IEEE>", "scale = FLOAT32", "scaling = RECIPROCAL", "block_rows = 128",
      "block_columns = 128", "pow2 = true", "epsilon = float(0.25)", "one_scale = false", "hardware_fp8 = true"]),
    ("fp8_e4m3", ["hq::Element<4, 3, 7, hq::NAN_ONLY>", "one_scale = true", "block_columns = 0", "pow2 = false"]),
    ("fp8_e5m2", ["global_per_row = false", "rht = false", "scale_rows = 1"]),
    ("bf16", ["bits = 16", "typedef BFloat16 Wide", "scaling = NO_SCALING", "scale = NO_SCALE"]),
])
def test_row_renders_to_what_it_says(name, facts):
    text = traits.format_traits("Row", as_format(name)).replace(",", ";").replace("\n", "").replace("int ", "")
    for fact in facts:
        assert f"{fact};".replace(",", ";") in text or f"{fact} ".replace(",", ";") in text, fact


@pytest.mark.parametrize(("name", "facts"), [
    ("fp8_row_e4m3", [f"i64 scale_columns = {formats.ROW}", "scale_rows = 1", "one_scale = false",
                      "scale = FLOAT32", "global_per_row = false"]),
    ("nvfp4_row", ["global_scale = true, global_per_row = true", "scale_columns = 16", "rht = false"]),
    ("nvfp4(rht=true)", ["rht = true", "global_per_row = false", "signs = 0xd7e8"]),
])
def test_storage_renders_to_what_it_says(name, facts):
    text = traits.storage_traits("Part", as_format(name).storage)
    for fact in facts:
        assert f"{fact};" in text or f"{fact}, " in text, fact


def test_spans_of_whole_rows_are_told_in_31_bits():
    """A kernel counts sizes in 32 bits, and a span that divides by them must not be zero there."""
    for name, axis in itertools.product(catalogue.STORED, catalogue.AXES):
        storage = as_format(name).storage
        launches = [traits.dequantize_launch(storage, "bfloat16", axis == "k", True, True),
                    traits.decode_launch(storage, "bfloat16", storage.bf16_terms, storage.bf16_terms > 1, axis)]
        for launch in launches:
            spans = re.findall(r"#define (\w+) hq::Span<(\d+), (\d+)>", launch.source.text)
            assert {name for name, _, _ in spans} == {"Codes", "Scales", "GlobalScales"}
            for _, divide, multiple in spans:
                assert 0 < int(divide) < 1 << 31 and 0 < int(multiple) <= 128
                assert (1 << 31) - (1 << 20) + int(divide) - 1 < 1 << 32, "a size that a kernel rounds up overflows"


def test_every_stored_format_is_decoded():
    for row in catalogue.STORED.values():
        assert traits.dequantize_launch(row.storage, "bfloat16", False, True).source.file == "dequantize.cu"


def test_left_out_direction_is_not_present():
    assert "present = false" in traits.format_traits("Column", None)
    assert "present = true" in traits.format_traits("Row", FORMATS["mxfp8"])


def test_two_names_of_one_row_share_their_kernels():
    launches = [traits.quantize_launch(row, None, "bfloat16", True).source for row in (MX("e4m3"), as_format("mxfp8"))]
    assert launches[0] == launches[1]
    other = traits.quantize_launch(MX("e4m3", "floor"), None, "bfloat16", True).source
    assert other != launches[0]


def test_every_row_is_in_the_catalogue_in_each_direction():
    names = {kernel.name for kernel in catalogue.specialisations()}
    everything = {kernel.name for kernel in catalogue.specialisations(pairs=True)}
    for name, dtype in itertools.product(NAMES, catalogue.DTYPES):
        assert f"quantize {name} / {name} {dtype}" in names
        assert (f"quantize {name} / {name} {dtype} unaligned" in names) == (dtype != "float16")
        for pair in (f"{name} / -", f"- / {name}"):
            assert {f"quantize {pair} {dtype}", f"quantize {pair} {dtype} unaligned"} <= everything
            assert f"quantize {pair} bfloat16" in names
    pairs = {kernel.name for kernel in catalogue.specialisations(pairs=True, dtypes=["bfloat16"])}
    assert {f"quantize {row} / {column} bfloat16" for row in NAMES for column in NAMES} <= pairs


@pytest.fixture
def e3m4(monkeypatch):
    """A row that a user adds to the elements: three exponent bits, four of mantissa."""
    element = Element("e3m4", 3, 4, 3, "nan")
    monkeypatch.setitem(formats.ELEMENTS, "e3m4", element)
    return element


@needs_compiler
def test_an_added_element_needs_no_cuda_file(e3m4):
    mx, block = MX("e3m4"), FP8Block("e3m4")
    launches = [
        traits.quantize_launch(mx, mx, "bfloat16", True), traits.quantize_launch(mx, block, "float32", True),
        traits.quantize_launch(FORMATS["mxfp4"], mx, "bfloat16", False),
        *(traits.dequantize_launch(mx.storage, "bfloat16", turned, True) for turned in (False, True)),
    ]
    for launch in launches:
        assert "hq::Element<3, 4, 3, hq::NAN_ONLY>" in launch.source.text
        assert loader.compile_cubin(launch.source, "sm_90a")[0].startswith(b"\x7fELF")


@pytest.mark.parametrize("element", [Element("e1m2", 1, 2, 1, "none"), Element("e5m2_finite", 5, 2, 15, "none"),
                                     Element("e6m1", 6, 1, 31, "ieee"), Element("e4m3_low", 4, 3, 30, "nan")],
                         ids=lambda element: element.name)
def test_element_that_the_kernels_would_get_wrong_is_refused(element):
    storage = replace(FORMATS["mxfp8"].storage, element=element)
    with pytest.raises(NotImplementedError, match=f"{element.name} has no CUDA kernels"):
        traits.dequantize_launch(storage, "bfloat16", False, True)


def test_hardware_conversions_serve_only_the_elements_they_know():
    for element in (Element("e4m3_ieee", 4, 3, 7, "ieee"), Element("e5m2_low", 5, 2, 16, "ieee"),
                    Element("e2m3_nan", 2, 3, 1, "nan"), Element("e3m4", 3, 4, 3, "nan")):
        text = traits.storage_traits("Part", replace(FORMATS["mxfp8"].storage, element=element))
        assert "hardware_fp8 = false" in text
        assert "hardware_fp6 = false" in text
    for name in ("e4m3", "e5m2"):
        text = traits.storage_traits("Part", replace(FORMATS["mxfp8"].storage, element=ELEMENTS[name]))
        assert "hardware_fp8 = true" in text


# --- files and compilation ----------------------------------------------------------------------


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_first_line_of_a_kernel_says_its_grid_and_tile(path):
    first = path.read_text().partition("\n")[0]
    assert first.startswith("// ")
    assert "grid" in first
    assert "tile" in first


@pytest.fixture(scope="module")
def compiled():
    """Registers and spills of every main kernel on sm_90a, by name; .ci/run compiles for the other architectures."""
    kernels = [kernel for kernel in catalogue.specialisations(dtypes=["bfloat16"]) if kernel.main]
    return {kernel: used["sm_90a"] for kernel, used in catalogue.compile_all(kernels, ["sm_90a"])}


@needs_compiler
def test_main_kernels_are_of_every_format(compiled):
    names = {kernel.name for kernel in compiled}
    stored = {}
    for name in FORMATS:
        assert {f"quantize {name} / - bfloat16", f"quantize - / {name} bfloat16",
                f"quantize {name} / {name} bfloat16"} <= names
    for name, row in catalogue.STORED.items():
        first = stored.setdefault(row.storage, name)  # formats stored alike are decoded by one kernel
        assert {f"dequantize {first} rows bfloat16", f"dequantize {first} columns bfloat16",
                f"dequantize groups {first} rows", f"dequantize groups {first} columns"} <= names


@needs_compiler
def test_main_kernels_compile_and_do_not_spill(compiled):
    excess = {kernel.name: used for kernel, used in compiled.items() if kernel.excess("sm_90a", used)}
    assert not excess


def test_allowed_spills_are_of_main_kernels_small_and_have_a_reason():
    main = {kernel.name for kernel in catalogue.specialisations() if kernel.main}
    for (name, arch), spill in catalogue.ALLOWED_SPILLS.items():
        assert name in main
        assert arch in catalogue.ARCHES
        assert 0 < spill.most <= 16
        assert len(spill.reason) > 20


def test_a_spill_of_a_main_kernel_is_an_excess(monkeypatch):
    spilling = loader.Resources(64, 8, 8, 4)
    source = loader.Source("quantize.cu", "hq_quantize", "")
    kernel = catalogue.Specialisation("quantize mxfp8 / - bfloat16", source, True)
    assert kernel.excess("sm_90a", spilling) == 8
    assert kernel.excess("sm_90a", replace(spilling, spill_stores=0, spill_loads=0)) == 0
    assert replace(kernel, main=False).excess("sm_90a", spilling) == 0
    monkeypatch.setitem(catalogue.ALLOWED_SPILLS, (kernel.name, "sm_90a"), catalogue.Spill(8, "measured"))
    assert kernel.excess("sm_90a", spilling) == 0
    assert kernel.excess("sm_80", spilling) == 8
    assert kernel.excess("sm_90a", replace(spilling, spill_stores=12)) == 4


@pytest.mark.gpu
def test_added_element_equals_the_reference_on_the_gpu(e3m4):
    cupy = pytest.importorskip("cupy")
    for dtype, kind in itertools.product((BFLOAT16, np.dtype(np.float32)), ("wide", "nans", "infinities")):
        x = testing.matrix(kind, (145, 280), dtype)
        for row, column in ((MX("e3m4"), MX("e3m4")), (FP8Block("e3m4"), MX("e3m4", "even"))):
            expected = hq.quantize(x, rowwise=row, columnwise=column)
            actual = hq.quantize(cupy.asarray(x), rowwise=row, columnwise=column)
            testing.assert_bitwise_equal(actual, expected)
            for source in ("rowwise", "columnwise"):
                testing.assert_bitwise_equal(actual.dequantize(source=source), expected.dequantize(source=source))
