"""What containers show of themselves in Jupyter: a card of facts and small pictures of their scales.

Plain HTML with styles on the elements and colours that come from the page, so it fits light and dark themes and is
no matter to other cells. Of a device's scales a sample is read, at most SAMPLE of a part.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from .formats import Storage, scale_values
from .layout import Array

Floats = npt.NDArray[np.float64]

SAMPLE = (32, 64)
"""Most scales of a part that are read for a picture: rows, blocks."""

MEMBERS = 6
"""Most members of a group whose scales are shown."""

BOX = (96, 256)
"""Pixels: the height and the width that a picture of a part takes at most, but for one pixel a scale."""

LARGEST = 12
"""Pixels: the side of one scale at most."""

RAMP = np.array([(0, 34, 78), (55, 76, 108), (108, 110, 114), (165, 151, 114), (222, 196, 87), (254, 232, 56)], float)
"""Colours of the smallest to the largest scale: of even steps in lightness, as grey on paper too (cividis)."""

NAN_COLOR, ZERO_COLOR = (214, 39, 40, 255), (128, 128, 128, 60)


@dataclass(frozen=True, slots=True)
class ScaleSample:
    """Some scales of a part, every steps[0]-th row and steps[1]-th block: log2 of what is decoded.

    A scale of zero is -inf, one that is NaN is NaN.
    """

    log2: Floats
    steps: tuple[int, int]


def sample_scales(
    scales: Array, storage: Storage, global_scale: Array | None = None, most: tuple[int, int] = SAMPLE
) -> ScaleSample:
    """At most so many of the (rows, blocks) scales of a part, evenly spread and copied to the host.

    global_scale  float32 (1,), or (rows,) of one a row, multiplied in
    """
    rows, blocks = (max(1, -(-n // limit)) for n, limit in zip(scales.shape, most, strict=True))
    stored = _host(scales[::rows, ::blocks])
    table = scale_values(storage.scale)
    values = (stored if table is None else table[stored]).astype(np.float64)
    if global_scale is not None:
        values = values * _host(global_scale[::rows]).astype(np.float64).reshape(-1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return ScaleSample(np.log2(values), (rows, blocks))


def _host(array: Array) -> npt.NDArray[Any]:
    if isinstance(array, np.ndarray):
        return array
    with array.device:  # a strided view is gathered there before it is copied
        copied: npt.NDArray[Any] = array.get()
    return copied


@dataclass(frozen=True, slots=True)
class Picture:
    """Samples of one part's scales, of one member each, and what is to be said of them."""

    caption: str
    samples: tuple[ScaleSample, ...]

    def html(self) -> str:
        """Images in one colour range, the caption and the range below. Nothing where there is no scale."""
        samples = [sample for sample in self.samples if sample.log2.size]
        if not samples:
            return ""
        numbers = np.concatenate([sample.log2[np.isfinite(sample.log2)] for sample in samples])
        low, high = (float(numbers.min()), float(numbers.max())) if numbers.size else (0.0, 0.0)
        shapes = [sample.log2.shape for sample in samples]
        counts = max(rows for rows, _ in shapes), sum(blocks for _, blocks in shapes)
        height, width = (min(LARGEST, max(1, most // count)) for most, count in zip(BOX, counts, strict=True))
        images = "".join(
            _image(_colors(sample.log2, low, high).repeat(height, 0).repeat(width, 1), self.caption)
            for sample in samples
        )
        said = f"<div>{escape(self.caption)}</div><div>{self._range(low, high)}</div>"
        return f'<div style="display:inline-block;vertical-align:top;margin:6px 16px 0 0">{images}{said}</div>'

    def _range(self, low: float, high: float) -> str:
        values = np.concatenate([sample.log2.ravel() for sample in self.samples])
        marks = ((np.isneginf(values).sum(), "zero (grey)"), (np.isnan(values).sum(), "NaN (red)"))
        said = [_power(low)] if low == high else [f"{_power(low)} (dark) to {_power(high)} (bright)"]
        said = said if np.isfinite(values).any() else []
        said += [f"{count} {what}" for count, what in marks if count]
        steps = [max(numbers) for numbers in zip(*(sample.steps for sample in self.samples), strict=True)]
        thinned = [f"1 of {step} {what}" for step, what in zip(steps, ("rows", "blocks"), strict=True) if step > 1]
        return ", ".join([*said, *([f"{' and '.join(thinned)} shown"] if thinned else [])])


def _power(log2: float) -> str:
    return f"2<sup>{log2:.3g}</sup>"


def _colors(log2: Floats, low: float, high: float) -> npt.NDArray[np.uint8]:
    """RGBA (rows, blocks, 4) of a sample, the range of colours from low to high."""
    with np.errstate(invalid="ignore"):
        place = (log2 - low) / (high - low) if high > low else np.where(np.isfinite(log2), 0.5, log2)
    position = np.clip(np.nan_to_num(place), 0, 1) * (len(RAMP) - 1)
    below = np.minimum(position.astype(int), len(RAMP) - 2)
    share = (position - below)[..., None]
    pixels = np.empty((*log2.shape, 4), np.uint8)
    pixels[..., :3] = np.rint(RAMP[below] * (1 - share) + RAMP[below + 1] * share)
    pixels[..., 3] = 255
    pixels[np.isneginf(log2)] = ZERO_COLOR
    pixels[np.isnan(log2)] = NAN_COLOR
    return pixels


def _image(pixels: npt.NDArray[np.uint8], what: str) -> str:
    # of its own size: a page that scales an image blurs it, and Jupyter removes the style that says not to
    data = base64.b64encode(png(pixels)).decode("ascii")
    style = "display:inline-block;margin:0 4px 0 0;vertical-align:top;max-width:none"
    return f'<img src="data:image/png;base64,{data}" style="{style}" alt="{escape(what)}">'


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file of RGBA pixels (rows, columns, 4), rows not filtered: PNG specification, 3rd edition, 5 and 11.2."""
    height, width = pixels.shape[:2]
    rows = np.zeros((height, 1 + 4 * width), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def html_card(title: str, facts: Sequence[tuple[str, str]], pictures: Sequence[Picture] = ()) -> str:
    """A table of facts, pictures below it; every text is escaped."""
    left = "text-align:left;vertical-align:top"
    body = "".join(
        f'<tr><th style="{left};font-weight:500;white-space:nowrap">{escape(key)}</th>'
        f'<td style="{left}">{escape(value)}</td></tr>'
        for key, value in facts
    )
    caption = f'<caption style="{left};font-weight:600;caption-side:top">{escape(title)}</caption>'
    shown = "".join(picture.html() for picture in pictures)
    return f'<div style="font-size:13px"><table style="margin:0">{caption}<tbody>{body}</tbody></table>{shown}</div>'


def spread(numbers: Sequence[int], most: int = MEMBERS) -> Iterator[int]:
    """At most so many of the numbers, evenly spread, the first and the last among them."""
    if len(numbers) <= most:
        yield from numbers
    else:
        yield from (numbers[round(i * (len(numbers) - 1) / (most - 1))] for i in range(most))


__all__ = ["MEMBERS", "SAMPLE", "Picture", "ScaleSample", "html_card", "png", "sample_scales", "spread"]
