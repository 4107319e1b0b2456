"""Cards of containers: what they say, what they read, and that pictures hold the scales."""

import base64
import math
import re
import struct
import zlib
from contextlib import nullcontext
from html.parser import HTMLParser
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hqarray as hq
from hqarray import display, ops

RNG = np.random.default_rng(5)
X = (RNG.standard_normal((70, 200)) * np.exp2(RNG.integers(-9, 9, (70, 1)))).astype(np.float32)


def containers() -> dict[str, Any]:
    hx = hq.quantize(X, rowwise="mxfp8", columnwise="nvfp4")
    return {
        "hybrid": hx,
        "part": hx.rowwise,
        "grouped": hq.grouped_quantize(X, [20, 0, 50], rowwise="mxfp8", columnwise="fp8_e4m3"),
        "uniform": hq.GroupedArray.from_stacked(np.stack([X, X]), rowwise="nvfp4"),
        "scattered": hq.GroupedArray.from_arrays([X, X[:0], X.T], rowwise="mxfp4", columnwise="mxfp8"),
        "grouped part": hq.grouped_quantize(X, [20, 0, 50], rowwise="nvfp4").rowwise,
        "scattered part": hq.GroupedArray.from_arrays([X, X.T], rowwise="mxfp4").rowwise,
        "empty": hq.quantize(X[:0], rowwise="mxfp8", columnwise="nvfp4"),
        "no groups": hq.GroupedArray.from_stacked(np.zeros((0, 4, 32), np.float32), rowwise="mxfp8"),
        "empty groups": hq.grouped_quantize(X[:0], [0, 0], rowwise="mxfp8", columnwise="nvfp4"),
    }


def decoded(html: str) -> list[np.ndarray]:
    """Pixels of the PNG images of a card, read by a reader that shares nothing with the writer but zlib."""
    images = []
    for data in re.findall(r"data:image/png;base64,([^\"]+)", html):
        file = base64.b64decode(data)
        assert file[:8] == b"\x89PNG\r\n\x1a\n"
        place, chunks = 8, {}
        while place < len(file):
            length, kind = struct.unpack(">I4s", file[place : place + 8])
            body = file[place + 8 : place + 8 + length]
            (check,) = struct.unpack(">I", file[place + 8 + length : place + 12 + length])
            assert check == zlib.crc32(kind + body)
            chunks[kind], place = body, place + 12 + length
        width, height, depth, color = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
        assert (depth, color) == (8, 6)
        rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 4 * width)
        assert not rows[:, 0].any()
        images.append(rows[:, 1:].reshape(height, width, 4))
    return images


@pytest.mark.parametrize("name", containers())
def test_a_card_is_well_formed_and_leaves_colours_to_the_page(name: str) -> None:
    html = containers()[name]._repr_html_()
    open_tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: None if tag == "img" else open_tags.append(tag)  # type: ignore
    parser.handle_endtag = lambda tag: open_tags.remove(tag)  # type: ignore[method-assign]
    parser.feed(html)
    assert not open_tags
    assert "color" not in re.sub(r"data:[^\"]*", "", html), "a colour of its own fits one theme alone"
    for fact in ("shape", "engine", "device", "cpu", "fp32: NumPy"):
        assert fact in html


@pytest.mark.parametrize("name", hq.FORMATS)
def test_a_card_shows_every_format_in_both_directions(name: str) -> None:
    array = hq.quantize(X, rowwise=name, columnwise=name)
    html = array._repr_html_()
    pictures = 2 * (array.rowwise.format.storage.scale != "none")
    assert html.count(name) >= 2 and len(decoded(html)) == pictures
    assert ("rowwise scales" in html) == bool(pictures)


def test_log2_of_scales_is_that_of_ml_dtypes() -> None:
    part = hq.quantize(X, rowwise="mxfp8").rowwise
    expected = np.log2(part.scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64))
    sample = display.sample_scales(part.scales, part.format.storage)
    assert np.array_equal(sample.log2, expected[:: sample.steps[0], :: sample.steps[1]])
    part = hq.quantize(X, rowwise="nvfp4").rowwise
    values = np.ascontiguousarray(part.scales).view(ml_dtypes.float8_e4m3fn).astype(np.float64) * part.global_scale[0]
    sample = display.sample_scales(part.scales, part.format.storage, part.global_scale, (4096, 4096))
    assert sample.steps == (1, 1)
    with np.errstate(divide="ignore"):
        assert np.array_equal(sample.log2, np.log2(values))


def test_a_global_scale_of_each_row_is_taken_with_its_row() -> None:
    part = hq.quantize(np.ones((100, 32), np.float32), rowwise="nvfp4").rowwise
    wholes = np.exp2(np.arange(100, dtype=np.float32))
    sample = display.sample_scales(part.scales, part.format.storage, wholes)
    alone = display.sample_scales(part.scales, part.format.storage)
    assert sample.log2 - alone.log2 == pytest.approx(np.repeat(np.arange(0, 100, 4.0)[:, None], 2, axis=1))


class Device(nullcontext):  # type: ignore[type-arg]
    id = 0


class OnDevice:
    """Scales of which only slices can be taken, and what they hold copied."""

    copied = 0
    device = Device()

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape

    def __getitem__(self, index: Any) -> "OnDevice":
        return OnDevice(self.values[index])

    def get(self) -> np.ndarray:
        OnDevice.copied += self.values.size
        return self.values.copy()


def test_no_more_than_a_sample_is_copied_from_a_device() -> None:
    part = hq.quantize(RNG.standard_normal((1000, 5000)).astype(np.float32), rowwise="mxfp8").rowwise
    OnDevice.copied = 0
    sample = display.sample_scales(OnDevice(part.scales), part.format.storage)
    assert 0 < OnDevice.copied <= display.SAMPLE[0] * display.SAMPLE[1]
    assert sample.log2.size == OnDevice.copied and sample.steps == (32, 3)


def test_darker_is_smaller_zero_is_transparent_and_nan_is_red() -> None:
    x = np.exp2(np.arange(8, dtype=np.float32)).repeat(32).reshape(1, -1)
    part = hq.quantize(x, rowwise="mxfp8").rowwise
    (image,) = decoded(part._repr_html_())
    side = image.shape[1] // 8
    lightness = image[0, ::side, :3].astype(int) @ [299, 587, 114]
    assert (np.diff(lightness) > 0).all() and (image[..., 3] == 255).all()
    x[0, :32], x[0, 40] = 0, np.nan
    html = hq.quantize(x, rowwise="nvfp4").rowwise._repr_html_()
    (image,) = decoded(html)
    assert image[0, 0, 3] < 128 and tuple(image[0, 2 * (image.shape[1] // 16)]) == display.NAN_COLOR
    assert "2 zero (grey), 1 NaN (red)" in html


def test_one_scale_is_one_shade() -> None:
    html = hq.quantize(X, rowwise="fp8_e4m3")._repr_html_()
    (image,) = decoded(html)
    assert len(np.unique(image.reshape(-1, 4), axis=0)) == 1
    scale = float(hq.quantize(X, rowwise="fp8_e4m3").rowwise.scales[0, 0])
    assert f"2<sup>{math.log2(scale):.3g}</sup>" in html


@pytest.mark.parametrize("shape", [(1, 32), (5, 70), (64, 4096), (4096, 64), (3000, 3000)])
def test_a_picture_stays_small(shape: tuple[int, int]) -> None:
    html = hq.quantize(np.ones(shape, np.float32), rowwise="mxfp8", columnwise="nvfp4")._repr_html_()
    for image in decoded(html):
        assert image.shape[0] <= display.BOX[0] and image.shape[1] <= display.BOX[1]
    assert len(html) < 20_000


def test_a_group_shows_members_that_are_not_empty() -> None:
    html = containers()["grouped"]._repr_html_()
    assert "rowwise scales of members 0, 2" in html and "columnwise scales, one for each member" in html
    assert len(decoded(html)) == 3
    many = hq.grouped_quantize(X, [2] * 35, rowwise="mxfp8")._repr_html_()
    assert "members 0, 7, 14, 20, 27, 34" in many
    assert "members 0, 2" in containers()["scattered"]._repr_html_()


def test_sizes_on_a_device_are_read_for_the_picture() -> None:
    sizes = OnDevice(np.array([20, 0, 50], np.int32))
    known = hq.grouped_quantize(X, [20, 0, 50], rowwise="mxfp8")
    rows = type(known.rows)(3, None, None, sizes, "int32", 70)
    part = type(known.rowwise)(known.rowwise.format, known.rowwise.layout, rows, known.rowwise.memory, False)
    html = hq.GroupedArray(part, None, rows, known.columns)._repr_html_()
    assert decoded(html)[0].shape == decoded(known._repr_html_())[0].shape
    assert "3 on the device (int32)" in html


def test_an_engine_that_cannot_be_asked_for_is_told_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(storage: Any, ordinal: int) -> Any:
        raise ImportError("no module nvmath")

    monkeypatch.setattr(ops, "engine_of_likes", broken)
    assert "not known: no module nvmath" in containers()["hybrid"]._repr_html_()


def test_engines_that_differ_are_shown_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "engine_of_likes", lambda storage, ordinal: storage.scale)
    html = containers()["hybrid"]._repr_html_()
    assert "engine, rowwise</th>" in html and "engine, columnwise</th>" in html


def test_text_is_escaped() -> None:
    picture = display.Picture("<b>", (display.ScaleSample(np.zeros((1, 1)), (1, 1)),))
    html = display.html_card("<script>", [("<i>", "&")], [picture])
    assert not any(tag in html for tag in ("<script>", "<i>", "<b>")) and "&amp;" in html


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 100])
def test_spread_takes_the_first_and_the_last(count: int) -> None:
    taken = list(display.spread(range(count)))
    assert len(taken) == min(count, display.MEMBERS) and taken == sorted(set(taken))
    assert not count or (taken[0], taken[-1]) == (0, count - 1)


@pytest.mark.gpu
def test_cards_of_cupy_arrays_show_the_pictures_of_numpys() -> None:
    cupy = pytest.importorskip("cupy")
    for name in hq.FORMATS:
        ours, theirs = (hq.quantize(x, rowwise=name, columnwise=name) for x in (X, cupy.asarray(X)))
        for a, b in zip(decoded(ours._repr_html_()), decoded(theirs._repr_html_()), strict=True):
            assert np.array_equal(a, b)
        assert "cuda:0" in theirs._repr_html_()
    sizes = [20, 0, 50]
    on_host = hq.grouped_quantize(X, sizes, rowwise="mxfp8", columnwise="nvfp4")
    grouped = hq.grouped_quantize(cupy.asarray(X), cupy.asarray(sizes, np.int32), rowwise="mxfp8", columnwise="nvfp4")
    for a, b in zip(decoded(on_host._repr_html_()), decoded(grouped._repr_html_()), strict=True):
        assert np.array_equal(a, b)
