"""Plots: what they draw is what was measured elsewhere, axes are labelled, black and white is enough."""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_packaging import ROOT

import hqarray as hq
from hqarray import plots
from hqarray.formats import FORMATS

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

X = (np.random.default_rng(1).standard_normal((130, 256)) * 3).astype(np.float32)
GROUP = hq.grouped_quantize(np.ones((300, 64), np.float32), [100, 0, 7], rowwise="mxfp8", alignment=16)

PLOTS: dict[str, Callable[..., Any]] = {
    "error": lambda **ax: hq.plot_error(X, ["mxfp8", "nvfp4"], **ax),
    "tradeoff": lambda **ax: hq.plot_tradeoff(X, **ax),
    "scales": lambda **ax: hq.plot_scales(hq.quantize(X, rowwise="mxfp8").rowwise, **ax),
    "formats": lambda **ax: hq.plot_formats(**ax),
    "groups": lambda **ax: hq.plot_groups(GROUP, **ax),
    "products": lambda **ax: plots.plot_products({"a": {"fprop": 0.1, "dgrad": 0.2}}, **ax),
}


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_draws_into_the_axes_given_or_makes_a_figure(name: str) -> None:
    _, ax = plt.subplots()
    assert PLOTS[name](ax=ax) is ax
    before = plt.get_fignums()
    own = PLOTS[name]()
    assert own.figure.number not in before
    for axes in (ax, own):
        assert axes.get_xlabel() and axes.get_ylabel()
    own.figure.canvas.draw()


# --- plot_error ---------------------------------------------------------------------------------


def test_the_histogram_counts_every_element_once() -> None:
    x = X.copy()
    x[0, :5] = 0, np.nan, np.inf, 0, 0
    names = ["mxfp8", "mxfp4", "fp8_e4m3", "fp32", "nvfp4_row", "nvfp4(rht=true)", "nvfp4(rounding=stochastic)"]
    ax = hq.plot_error(x, names)
    for line, name in zip(ax.get_lines(), names, strict=True):
        finite = np.isfinite(x) & (x != 0)
        with np.errstate(all="ignore"):
            q = hq.fake_quantize(x, name, seed=0 if "stochastic" in name else None).astype(np.float64)
            errors = (np.abs(q - x) / np.abs(x.astype(np.float64)))[finite & ~np.isnan(q)]
        exact = (errors == 0).mean()
        assert line.get_label() == f"{name} ({exact:.1%} exact)"
        centers, shares = line.get_xdata(), line.get_ydata()
        assert shares.sum() == pytest.approx(100 * (1 - exact))
        low, high = np.float64(2) ** -4.5, np.float64(2) ** -4
        (bin,) = np.flatnonzero((centers > low) & (centers < high))
        assert shares[bin] == pytest.approx(100 * ((errors >= low) & (errors < high)).mean())


def test_tiles_do_not_change_the_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hq.plot_error(X, "nvfp4").get_lines()[0].get_ydata()
    monkeypatch.setattr("hqarray.explore.TILE", 128)
    assert np.array_equal(hq.plot_error(X, "nvfp4").get_lines()[0].get_ydata(), whole)


def test_lines_differ_in_dash_or_marker_and_in_lightness() -> None:
    lines = hq.plot_error(X, list(FORMATS)[:8]).get_lines()
    styles = [(line.get_linestyle(), line.get_marker()) for line in lines]
    assert len(set(styles)) == len(plots.STYLES)
    lightness = [np.dot(matplotlib.colors.to_rgb(line.get_color()), [0.299, 0.587, 0.114]) for line in lines]
    assert (np.diff(lightness) > 0).all() and lightness[-1] < 0.8


@pytest.mark.parametrize("values", [np.zeros((3, 32), np.float32), np.zeros((0, 32), np.float32)])
def test_a_matrix_without_an_error_has_an_empty_histogram(values: np.ndarray) -> None:
    assert not hq.plot_error(values, "mxfp8").get_lines()[0].get_ydata().any()


# --- plot_tradeoff ------------------------------------------------------------------------------


def points(ax: Any) -> dict[str, tuple[float, float]]:
    return {text.get_text(): tuple(map(float, text.xy)) for text in ax.texts if hasattr(text, "xy")}


def test_points_are_what_compare_measures_and_default_to_quantized_rows() -> None:
    comparison = hq.compare(X, plots.quantized_formats())
    assert {e.format for e in comparison} == {name for name, row in FORMATS.items() if row.scaling is not None}
    for ax in (hq.plot_tradeoff(X), hq.plot_tradeoff(comparison)):
        expected = {e.format: (8 * e.bytes_per_element, e.sqnr_db) for e in comparison}
        assert points(ax) == expected


def test_a_new_row_of_the_table_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "aaa_new", hq.MX("e2m3", rule="floor"))
    assert "aaa_new" in points(hq.plot_tradeoff(X))
    users = [label.get_text() for label in hq.plot_formats().get_yticklabels() if label.get_text().startswith("e2m3")]
    assert users == ["e2m3\nmxfp6_e2m3, aaa_new"]


def test_the_line_joins_what_no_other_format_beats() -> None:
    ax = hq.plot_tradeoff(X)
    drawn = set(map(tuple, np.round(np.array(ax.get_lines()[0].get_xydata()), 9)))
    measured = [tuple(np.round(point, 9)) for point in points(ax).values()]
    best = {p for p in measured if not any(q[0] <= p[0] and q[1] >= p[1] and q != p for q in measured)}
    assert best == drawn & set(measured)


def test_names_do_not_lie_on_one_another() -> None:
    ax = hq.plot_tradeoff(X, list(FORMATS))
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if hasattr(text, "xy")]
    # of an annotation the extent includes its arrow: compare the text alone
    boxes = [matplotlib.text.Text.get_window_extent(text) for text in ax.texts if hasattr(text, "xy")]
    assert len(boxes) == len(FORMATS)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_exact_formats_stand_on_top_and_lost_ones_are_named() -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 0] = 1e6
    ax = hq.plot_tradeoff(x, ["fp32", "mxfp4", "fp16"])
    places = points(ax)
    assert places["fp32 (exact)"][1] > places["mxfp4"][1]
    assert any(text.get_text() == "no SQNR: fp16" for text in ax.texts)
    hq.plot_tradeoff(np.full((1, 32), np.nan, np.float32), ["mxfp4"])


@pytest.mark.parametrize("places", [[], [0.5], [0.5] * 5, [0, 0, 1, 1], [0.1, 0.2, 0.9], [-0.2, 1.3], [0.5] * 40])
def test_places_keep_their_order_and_move_apart(places: list[float]) -> None:
    moved = plots._spaced(places, 0.06)
    assert all(-1e-9 <= place <= 1 for place in moved)
    assert all(b - a > min(0.06, 1 / max(len(places) - 1, 1)) - 1e-9 for a, b in itertools.pairwise(moved))


# --- plot_scales, plot_groups -------------------------------------------------------------------


def test_the_heat_map_holds_the_scales() -> None:
    part = hq.quantize(X, rowwise="mxfp8").rowwise
    ax = hq.plot_scales(part)
    assert np.array_equal(ax.images[0].get_array(), np.log2(part.scales.view(ml_dtypes.float8_e8m0fnu).astype(float)))
    assert ax.get_xlim() == (0, 8) and ax.get_ylim() == (130, 0)
    assert "32 elements" in ax.get_xlabel() and "1 row" in ax.get_ylabel()
    assert ax.images[0].colorbar.ax.get_ylabel() == "log2 of the scale"


@pytest.mark.parametrize("name", [name for name, row in FORMATS.items() if row.scaling is not None])
def test_scales_of_every_format_are_drawn(name: str) -> None:
    part = hq.quantize(X, rowwise=name).rowwise
    assert hq.plot_scales(part).images[0].get_array().shape == part.format.storage.num_scales(part.shape)


def test_zero_and_nan_scales_are_counted() -> None:
    x = X[:4].copy()
    x[0, :16], x[1, 3] = 0, np.nan
    ax = hq.plot_scales(hq.quantize(x, rowwise="nvfp4").rowwise)
    assert ax.get_title() == "nvfp4 (4, 256), 1 zero, 1 NaN" and ax.patch.get_hatch()
    assert not hq.plot_scales(hq.quantize(X, rowwise="nvfp4").rowwise).patch.get_hatch()


def test_of_many_scales_some_are_drawn_and_it_is_said() -> None:
    ax = hq.plot_scales(hq.quantize(np.ones((3000, 64), np.float32), rowwise="mxfp8").rowwise)
    assert ax.images[0].get_array().shape == (1000, 2) and "every 3th" not in ax.get_ylabel()
    assert "1 of 3 drawn" in ax.get_ylabel() and ax.get_ylim() == (3000, 0)


def test_bars_are_the_sizes_and_the_alignment() -> None:
    ax = hq.plot_groups(GROUP)
    heights = [[bar.get_height() for bar in bars] for bars in ax.containers]
    assert heights == [[100, 0, 7], [12, 0, 9]]
    assert [text.get_text() for text in ax.texts] == ["0"] and ax.texts[0].xy[0] == 1
    assert "107 rows of 300" in ax.get_title() and ax.get_ylabel() == "rows of the group"


def test_groups_of_every_kind_are_drawn() -> None:
    columns = GROUP.T
    assert hq.plot_groups(columns).get_ylabel() == "columns of the group"
    scattered = hq.GroupedArray.from_arrays([X, X[:5].T], rowwise="mxfp8")
    assert [b.get_height() for b in hq.plot_groups(scattered).containers[0]] == [X.size, 5 * 256]
    uniform = hq.GroupedArray.from_stacked(np.ones((3, 4, 32), np.float32), rowwise="mxfp8")
    assert [b.get_height() for b in hq.plot_groups(uniform).containers[0]] == [4, 4, 4]
    none = hq.GroupedArray.from_stacked(np.ones((0, 4, 32), np.float32), rowwise="mxfp8")
    assert "0 groups" in hq.plot_groups(none).get_title()


# --- plot_formats, plot_products ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"])
def test_code_points_are_those_of_ml_dtypes(name: str) -> None:
    element = FORMATS[name].storage.element
    codes = np.arange(1, 2 ** (element.bits - 1), dtype=np.uint8)
    values = codes.view(getattr(ml_dtypes, element.dtype_name)).astype(np.float64)
    collections = hq.plot_formats(name).collections
    drawn = sorted(segment[0, 0] for lines in collections for segment in lines.get_segments())
    assert drawn == sorted(values[np.isfinite(values)])


def test_wide_elements_are_a_line_and_users_are_named() -> None:
    ax = hq.plot_formats(["bf16", "mxfp8", "fp8_e4m3"])
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["bfloat16\nbf16", "e4m3\nmxfp8, fp8_e4m3"]
    assert list(ax.get_lines()[0].get_xdata()) == [2.0**-133, float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)]


def test_products_far_below_the_largest_stand_at_the_edge() -> None:
    errors = {"bf16": {"fprop": 1e-9, "dgrad": 0.0}, "fp8": {"fprop": 0.5, "dgrad": math.nan}}
    ax = plots.plot_products(errors)
    fprop, dgrad = ax.get_lines()
    assert list(fprop.get_xdata()) == [0.5e-3, 0.5] and list(dgrad.get_xdata()) == [0.5e-3]
    assert "left edge: below 0.0005" in ax.get_xlabel()
    plots.plot_products({"a": {"fprop": math.nan}})


def test_an_svg_keeps_text_and_is_the_same_each_time() -> None:
    def draw() -> str:
        return plots.svg(lambda ax: hq.plot_tradeoff(X, ["mxfp8", "nvfp4"], ax=ax), (6, 4))

    assert draw() == draw() and ">nvfp4</text>" in draw()


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: hq.plot_scales(hq.quantize(X, rowwise="mxfp8")), TypeError, "of a HybridArray: pass hx.rowwise$"),
        (lambda: hq.plot_scales(X), TypeError, "takes a QuantizedArray, such as hx.rowwise, not ndarray"),
        (lambda: hq.plot_scales(hq.quantize(X, rowwise="bf16").rowwise), ValueError, "has no scales to draw"),
        (lambda: hq.plot_groups(X), TypeError, "takes a GroupedArray, not ndarray; grouped_quantize"),
        (lambda: hq.plot_error(X.astype(int), "mxfp8"), TypeError, "x"),
        (lambda: hq.plot_error(np.array(1, np.float32), "mxfp8"), ValueError, "x is 0-D"),
        (lambda: hq.plot_error(X, "mxfp9"), ValueError, "unknown format 'mxfp9'"),
        (lambda: hq.plot_tradeoff(hq.compare(X, "mxfp8"), ["mxfp8"]), ValueError, "a Comparison has its formats"),
        (lambda: hq.plot_formats("mxfp9"), ValueError, "unknown format"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    assert not plt.get_fignums(), "an error leaves no empty figure"


def test_without_matplotlib_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
import hqarray as hq
try:
    hq.plot_formats()
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == 'plots need matplotlib: pip install "hqarray[explore]"\n'
