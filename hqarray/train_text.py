"""The text that the training study learns: Python's own documentation, or a file."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HELD_OUT = 16
"""One part in so many, at the end, is not trained on."""

SHORTEST = 1 << 14
"""Bytes below which there is nothing to learn."""


class TextError(ValueError):
    """There is no text to train on."""


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Bytes as numbers from 0 on, in the order of their values.

    name        where it comes from
    digest      of its bytes: Python's texts differ from version to version
    train, held_out  uint8
    vocabulary  how many different bytes there are
    """

    name: str
    digest: str
    train: npt.NDArray[np.uint8]
    held_out: npt.NDArray[np.uint8]
    vocabulary: int


def read_text(path: str | None = None) -> Text:
    """The bytes of a file, or of the topics that Python's help() prints, which come with it.

    Raises TextError where there are none, too few, or only one value of them; OSError for a file that cannot be read.
    """
    name, content = _topics() if path is None else (path, Path(path).read_bytes())
    if len(content) < SHORTEST:
        raise TextError(f"{name}: {len(content)} bytes are too few to train on; {SHORTEST} or more are needed")
    known, numbers = np.unique(np.frombuffer(content, np.uint8), return_inverse=True)
    if len(known) == 1:
        raise TextError(
            f"{name}: all {len(content)} bytes are {bytes(known)!r}, which leaves nothing to learn; give a text of two "
            f"values or more"
        )
    tokens = numbers.astype(np.uint8)
    border = len(tokens) - len(tokens) // HELD_OUT
    digest = hashlib.sha256(content).hexdigest()[:16]
    return Text(name, digest, tokens[:border], tokens[border:], len(known))


def _topics() -> tuple[str, bytes]:
    try:
        module: Any = importlib.import_module("pydoc_data.topics")
    except ImportError as error:
        raise TextError(
            "this Python comes without its help texts (pydoc_data); give a text of your own with --text FILE"
        ) from error
    return "Python's help topics", "\n".join(module.topics[key] for key in sorted(module.topics)).encode()


def batches(tokens: npt.NDArray[np.uint8], count: int, batch: int, length: int, seed: int) -> npt.NDArray[np.uint8]:
    """Pieces of a text from random places: (count, batch, length), the same for the same seed."""
    if len(tokens) < length:
        raise TextError(f"{len(tokens)} bytes of text hold no piece of {length}; give a longer text")
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length + 1, (count, batch, 1))
    pieces: npt.NDArray[np.uint8] = tokens[starts + np.arange(length)]
    return pieces


__all__ = ["Text", "TextError", "batches", "read_text"]
