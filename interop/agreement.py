"""What ranks tell one another before a call sends anything: their arguments, or why one of them refuses."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

if TYPE_CHECKING:
    from .ranks import Ranks

LONGEST = 1024
"""Bytes of what a rank tells the others."""

REFUSED = "refused: "


class CollectiveError(RuntimeError):
    """A collective failed on this rank, or was not begun: its name, rank and shapes, and the engine's own words."""


class Agreement:
    """What this rank gave to a call, and then what the others did: Ranks.agreement."""

    def __init__(self, ranks: Ranks, what: str) -> None:
        self.ranks, self.what = ranks, what

    def __enter__(self) -> list[Any]:
        self.said: list[Any] = []
        return self.said

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self.ranks.checks or self.ranks.size == 1:
            return
        if error is None:
            text = f"{self.what}: {', '.join(map(plain, self.said))}"
            self._compare(told(self.ranks, f"{crc32(text.encode()):08x} {text}"))  # the text may be cut
        elif isinstance(error, Exception):
            with suppress(Exception):  # the error that is raised says more
                told(self.ranks, f"{REFUSED}{kind.__name__}: {error}")

    def _compare(self, every: list[str]) -> None:
        for rank, text in enumerate(every):
            if text.startswith(REFUSED):
                raise CollectiveError(
                    f"{self.what} on {self.ranks} is not begun, since rank {rank} refused: {text.removeprefix(REFUSED)}"
                )
        if len(set(every)) > 1:
            each = "\n".join(f"  rank {rank} {text[9:]}" for rank, text in enumerate(every))
            raise CollectiveError(
                f"{self.what} on {self.ranks} is not begun, since the ranks gave what does not go together; give the "
                f"same on all:\n{each}"
            )


def told(ranks: Ranks, text: str) -> list[str]:
    """What each rank says, in a few hundred characters. Synchronises."""
    said = text.encode()[:LONGEST]
    module, device = ranks.place()
    with device:
        mine, every = module.zeros((1, LONGEST), np.uint8), module.empty((ranks.size, LONGEST), np.uint8)
        mine[0, : len(said)] = module.asarray(np.frombuffer(said, np.uint8))
        ranks.all_gather(mine, every)
        rows = every.get() if hasattr(every, "get") else every
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


def plain(value: Any) -> str:
    """An argument in words that are alike where its value is: numbers in memory are read."""
    value = getattr(value, "amax", value)  # a slot's
    value = value.get() if hasattr(value, "get") and hasattr(value, "dtype") else value
    return repr(value.tolist()) if isinstance(value, (np.ndarray, np.generic)) else repr(value)


__all__ = ["Agreement", "CollectiveError"]
