"""compare: numbers against a plain computation on the whole matrix, against ml_dtypes and against known tables."""

import json
import math
import tracemalloc
from dataclasses import replace
from html.parser import HTMLParser

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

import hqarray as hq
from hqarray import explore
from hqarray.formats import ROW

RAGGED = np.random.default_rng(1).standard_normal((300, 277)).astype(np.float32)
SPREAD = (RAGGED * np.exp2(np.random.default_rng(2).integers(-12, 12, RAGGED.shape))).astype(np.float32)


@pytest.mark.parametrize("name", hq.FORMATS)
@pytest.mark.parametrize("values", [RAGGED, SPREAD], ids=["normal", "spread"])
def test_numbers_are_those_of_the_whole_matrix(name: str, values: np.ndarray) -> None:
    error = hq.compare(values, name)[name]
    decoded = hq.fake_quantize(values, name).astype(np.float64)
    noise = decoded - values
    finite = np.isfinite(noise)
    if finite.all():
        assert error.relative_error == pytest.approx(np.linalg.norm(noise) / np.linalg.norm(values.astype(np.float64)))
        if noise.any():
            assert error.sqnr_db == pytest.approx(-20 * math.log10(error.relative_error))
        else:
            assert error.sqnr_db == math.inf
    else:  # float16 overflows to infinity
        assert error.relative_error == math.inf and error.sqnr_db == -math.inf
    assert error.max_error == np.abs(noise).max()
    assert error.zeroed == ((decoded == 0) & (values != 0)).mean()
    assert error.nan == 0
    part = hq.quantize(values, rowwise=name).rowwise
    assert part is not None
    assert error.bytes_per_element == part.nbytes / values.size


@pytest.mark.parametrize("format", hq.FORMATS.values(), ids=list(hq.FORMATS))
def test_every_block_fits_a_tile_a_whole_number_of_times(format: hq.Format) -> None:
    for block in (format.amax_block, format.storage.block):
        assert block is None or block[1] == ROW or all(explore.TILE % side == 0 for side in block)


@pytest.mark.parametrize("name", [*hq.FORMATS, "nvfp4(rht=true)", "nvfp4(rounding=stochastic)"])
def test_tiles_do_not_change_the_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hq.compare(SPREAD, name)[0]
    monkeypatch.setattr(explore, "TILE", 128)
    tiled = hq.compare(SPREAD, name)[0]
    for field in ("max_error", "clipped", "zeroed", "nan", "bytes_per_element"):
        assert getattr(tiled, field) == getattr(whole, field), field
    assert tiled.sqnr_db == pytest.approx(whole.sqnr_db)


def test_random_rounding_is_measured_by_the_seed() -> None:
    name = "nvfp4(rounding=stochastic)"
    first, again, other = (hq.compare(RAGGED, name, seed=seed)[0] for seed in (1, 1, 2))
    assert first == again != other
    decoded = hq.fake_quantize(RAGGED, name, seed=1)
    assert first.max_error == np.abs(decoded.astype(np.float64) - RAGGED).max()


def test_rotated_elements_are_clipped_as_they_are_stored() -> None:
    """One element of 16 alone, as large as all the rest: rotated it is a quarter of itself in each of them."""
    spike = np.zeros((64, 64), np.float32)
    spike[:, ::16] = 1
    error = hq.compare(spike, "nvfp4(rht=true)")[0]
    assert error.clipped == 0 and error.max_error < 1e-6 and error.nan == 0


def test_fp8_agrees_with_ml_dtypes() -> None:
    scale = np.float32(448) / np.abs(RAGGED).max()
    decoded = (RAGGED * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / np.float64(scale)
    expected = 10 * math.log10((RAGGED.astype(np.float64) ** 2).sum() / ((decoded - RAGGED) ** 2).sum())
    assert hq.compare(RAGGED, "fp8_e4m3")["fp8_e4m3"].sqnr_db == pytest.approx(expected, abs=1e-4)


def test_sqnr_of_the_normal_distribution_is_the_known_one() -> None:
    """Issue 2's table: N(0, 1), 4096 x 4096, default_rng(0)."""
    known = {"mxfp8": 31.52, "mxfp8(rule=floor)": 30.64, "nvfp4": 20.43}
    x = np.random.default_rng(0).standard_normal((4096, 4096), np.float32)
    tracemalloc.start()
    comparison = hq.compare(x, known)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for name, sqnr in known.items():
        assert comparison[name].sqnr_db == pytest.approx(sqnr, abs=0.02)
    assert peak < x.nbytes, "memory is bounded by the tile, not by the matrix"


def test_clipped_counts_what_saturates_and_not_what_rounds() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = 960, 957, -950, 890
    floor, up = hq.compare(x, ["mxfp8(rule=floor)", "mxfp8"])
    assert floor.clipped == 3 / 32  # largest 448 * 2 = 896
    assert floor.max_error == 64
    assert up.clipped == 0


def test_clipped_ignores_the_rounding_of_a_scale() -> None:
    x = np.random.default_rng(3).standard_normal((64, 64)).astype(np.float32)
    for name in ("fp8_e4m3", "fp8_e5m2", "fp8_block_1x128", "fp8_block_128x128", "bf16", "fp32"):
        assert hq.compare(x, name)[0].clipped == 0, name


def test_infinity_counts_as_clipped_where_it_saturates() -> None:
    x = np.ones((1, 32), np.float32)
    x[0, 5] = np.inf
    fp8, wide = hq.compare(x, ["fp8_e4m3", "fp32"])
    assert fp8.clipped == 1 / 32 and fp8.sqnr_db == math.inf
    assert wide.clipped == 0


def test_nan_is_counted_where_it_spreads() -> None:
    x = np.ones((1, 64), np.float32)
    x[0, 3] = np.nan
    mxfp8, mxfp4, nvfp4 = hq.compare(x, ["mxfp8", "mxfp4", "nvfp4"])
    assert (mxfp8.nan, mxfp4.nan, nvfp4.nan) == (1 / 64, 32 / 64, 16 / 64)
    assert mxfp8.max_error == 0


def test_a_matrix_without_a_number_has_no_error_to_show() -> None:
    for value in (np.nan, np.inf):
        for error in hq.compare(np.full((4, 64), value, np.float32)):
            assert math.isnan(error.sqnr_db) and math.isnan(error.relative_error), error.format
    assert "exact" not in repr(hq.compare(np.full((4, 64), np.nan, np.float32)))


def test_float16_overflow_is_an_infinite_error_and_clipped() -> None:
    error = hq.compare(np.array([[1.0, 1e5]], np.float32), "fp16")[0]
    assert (error.max_error, error.sqnr_db, error.clipped) == (math.inf, -math.inf, 0.5)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (2, 0, 4)])
def test_empty_matrix_has_no_error(shape: tuple[int, ...]) -> None:
    comparison = hq.compare(np.zeros(shape, np.float32))
    assert all(error.sqnr_db == math.inf and error.relative_error == 0 for error in comparison)
    assert comparison.shape == shape


def test_zeros_are_exact() -> None:
    for error in hq.compare(np.zeros((20, 40), np.float32)):
        assert (error.sqnr_db, error.max_error) == (math.inf, 0), error.format
        assert (error.clipped, error.zeroed, error.nan) == (0, 0, 0), error.format


def test_zeroed_counts_what_was_not_zero_before() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = 6, 0.2, -0.2  # E2M1 at scale 1: below 0.25 is nearer to 0
    assert hq.compare(x, "mxfp4")[0].zeroed == 2 / 32


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16, np.float32])
def test_reads_every_float_dtype_any_strides_and_any_number_of_axes(dtype: type) -> None:
    x = RAGGED.astype(dtype)
    straight = hq.compare(np.ascontiguousarray(x[:256:2, ::3]).reshape(2, 64, -1), "mxfp8")
    strided = hq.compare(x[:256:2, ::3], "mxfp8")
    assert straight[0] == strided[0]
    assert straight.dtype == np.dtype(dtype).name


@pytest.mark.gpu
def test_cupy_gives_the_numbers_of_numpy() -> None:
    cupy = pytest.importorskip("cupy")
    assert hq.compare(cupy.asarray(SPREAD)) == hq.compare(SPREAD)


def test_default_is_the_whole_table_in_its_order() -> None:
    assert [error.format for error in hq.compare(RAGGED[:4])] == list(hq.FORMATS)


def test_to_dict_is_plain() -> None:
    values = hq.compare(RAGGED[:8, :32], ["mxfp8", hq.NVFP4()]).to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["shape"] == [8, 32] and list(values["formats"]) == ["mxfp8", "nvfp4"]


@pytest.mark.parametrize("by", ["sqnr_db", "relative_error", "max_error", "zeroed", "bytes_per_element", "format"])
def test_sorted_puts_the_best_first_and_reverse_the_worst(by: str) -> None:
    comparison = hq.compare(SPREAD)
    values = [getattr(error, by) for error in comparison.sorted(by)]
    assert values == (sorted(values, reverse=True) if by == "sqnr_db" else sorted(values))
    assert [getattr(error, by) for error in comparison.sorted(by, reverse=True)] == values[::-1]
    assert set(comparison.sorted(by)) == set(comparison) and comparison.sorted(by).shape == comparison.shape


def test_sorted_keeps_the_order_of_equals_and_puts_nan_last() -> None:
    rows = [hq.compare(np.full((1, 32), value, np.float32), "mxfp4")[0] for value in (np.nan, 1, 0.9)]
    named = [replace(row, format=name) for row, name in zip([*rows, rows[1]], "abcd", strict=True)]
    comparison = explore.Comparison((1, 32), "float32", tuple(named))
    assert [error.format for error in comparison.sorted("sqnr_db")] == ["b", "d", "c", "a"]
    assert [error.format for error in comparison.sorted("sqnr_db", reverse=True)] == ["c", "b", "d", "a"]


def test_sorted_by_what_is_no_field_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"sorted\(by='sqnr'\): not one of format, sqnr_db, "):
        hq.compare(RAGGED[:2], "mxfp8").sorted("sqnr")


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_the_terminal_and_loses_no_digit(width: int) -> None:
    comparison = hq.compare(SPREAD)
    console = Console(width=width)
    with console.capture() as captured:
        console.print(comparison)
    text = captured.get()
    assert max(map(len, text.splitlines())) <= width
    for error in comparison:
        (row,) = [line for line in text.splitlines() if line.split() and line.split()[0] == error.format]
        assert row.split()[1] == explore.decibels(error.sqnr_db)


@pytest.mark.parametrize("width", [8, 12, 20, 40, 60, 79])
def test_a_narrow_terminal_shows_whole_numbers_or_folds_them(width: int) -> None:
    comparison = hq.compare(SPREAD, ["mxfp8", "nvfp4", "fp8_block_128x128(element=e5m2,pow2=true)"])
    table = comparison.table()
    text = table.text(width)
    assert max(map(len, text.splitlines())) <= width
    assert_whole_cells(table, text, width)


def assert_whole_cells(table: explore.TextTable, text: str, width: int) -> None:
    """Every cell is a word of the text; in a terminal narrower than a label and a cell, its characters are there."""
    cells = {line for row in table.rows for cell in row[1:] for line in cell.split("\n")}
    words = [word for line in text.splitlines()[1:] for word in line.split()]
    if width >= 20:
        assert cells <= set(words)
        numbers = {word for word in words if word.replace("/", "").replace(".", "").isdigit()}
        assert numbers <= cells, "a number that no cell holds was cut"
    else:
        digits = [c for row in table.rows for cell in row[1:] for c in cell if c.isdigit()]
        assert sum(c.isdigit() for line in text.splitlines() for c in line) >= len(digits)


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_title_wraps_at_the_terminal_and_not_at_the_table(width: int) -> None:
    title = f"layer: {'x' * 8} bfloat16"
    text = explore.TextTable(("a", "b"), (("c", "1"),), title).text(width)
    assert text.split("\n")[0] == (title if width > 20 else "layer: xxxxxxxx")


@pytest.mark.parametrize("name", hq.RECIPES)
def test_name_of_a_recipe_is_told_so(name: str) -> None:
    if name in hq.FORMATS:
        assert hq.compare(RAGGED[:2], [name])[0].format == name
        return
    with pytest.raises(ValueError, match=f"^'{name}' is a recipe, which names formats for the three.*compare takes"):
        hq.compare(RAGGED[:2], [name])


def test_np_matrix_is_an_array_and_a_masked_array_is_refused() -> None:
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix(RAGGED[:4])
    assert hq.compare(matrix, "mxfp8") == hq.compare(RAGGED[:4], "mxfp8")
    with pytest.raises(TypeError, match="x is a masked array"):
        hq.compare(np.ma.masked_less(RAGGED[:4], 0), "mxfp8")


def test_comparison_shows_itself_as_text_rich_and_html() -> None:
    comparison = hq.compare(RAGGED[:8], ["mxfp8", "nvfp4"])
    assert "SQNR dB" in repr(comparison) and "mxfp8" in str(comparison)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(comparison)
    assert "nvfp4" in captured.get()

    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(comparison._repr_html_())
    assert tags.count("tr") == 3


def test_html_escapes_every_cell() -> None:
    table = explore.TextTable(("<a>", "b"), (("<script>", "&"),), "<title>")
    assert table.html().count("<script>") == 0
    assert "&lt;script&gt;" in table.html() and "&lt;title&gt;" in table.html() and "<td>&amp;</td>" in table.html()


@pytest.mark.parametrize(
    ("x", "formats", "error"),
    [
        (np.ones((2, 2), np.int32), "mxfp8", TypeError),
        (np.ones((2, 2), np.float32), "mxfp9", ValueError),
        (np.array(1, np.float32), "mxfp8", ValueError),
        ([[1.0]], "mxfp8", TypeError),
    ],
)
def test_what_cannot_be_compared_is_an_error(x: object, formats: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        hq.compare(x, formats)


def test_format_that_was_not_compared_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="there are mxfp8"):
        hq.compare(RAGGED[:2], "mxfp8")["nvfp4"]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0"), (1e-9, "<0.01"), (0.0372, "3.72"), (1, "100.00"), (math.nan, "nan"), (math.inf, "inf")],
)
def test_percent(share: float, text: str) -> None:
    assert explore.percent(share) == text
