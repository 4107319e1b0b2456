"""Ranks: the few collectives that sharded matrices need, which an engine of distributed.py does; and one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hqarray.buffers import ordinal_of
from hqarray.layout import Array

from .agreement import Agreement, CollectiveError
from .pieces import BYTES, block

FLOAT32 = np.dtype(np.float32)


class Bytes(NamedTuple):
    """Bytes of a buffer, which is a NumPy array of bytes or CuPy's MemoryPointer: where they begin, and how many."""

    memory: Any
    start: int
    nbytes: int

    def array(self) -> Array:
        """An array over them."""
        return block(self.memory, self.start, (self.nbytes,))

    @property
    def shape(self) -> tuple[int]:
        return (self.nbytes,)

    @property
    def dtype(self) -> np.dtype[Any]:
        return BYTES

    @property
    def ordinal(self) -> int:
        return ordinal_of(self.memory)


class Ranks(ABC):
    """So many processes, each with a rank; an engine says how five collectives are done.

    rank    of this process
    size    how many there are
    engine  named in errors
    checks  whether calls that matrices take part in first compare what the ranks gave, see agreement

    Sizes are counted along the first axis and known to the host; what lies on a device has sizes there only in the
    sense of `experts`, which sends equal shares. Arrays are C-contiguous.
    """

    rank: int
    size: int
    engine: str
    checks: bool = False

    def agreement(self, what: str) -> Agreement:
        """Around what a call does with its arguments before it sends anything.

            with ranks.agreement("dispatch") as said:
                ...                             # an error in here is raised on this rank, and told to the others
                said += format, x.shape[1]      # what must be alike on all ranks

        At its end, where `checks` is set, every rank reads what the others said, and all raise CollectiveError where
        one refused or said something else. Otherwise it costs nothing.
        """
        return Agreement(self, what)

    def all_reduce_max(self, array: Array) -> None:
        """Each element becomes the largest that any rank holds there; float32, in place."""
        if array.dtype != FLOAT32 or not _contiguous(array):
            self._refuse("all_reduce_max", "float32", array)
        if self.size > 1 and array.size:
            self._run("all_reduce_max", self._all_reduce_max, array)

    def all_gather(self, array: Array, out: Array, sizes: Sequence[int] | None = None) -> None:
        """What all ranks hold, one after another, on every rank.

        array  (n, ...)
        out    (sum of all n, ...)
        sizes  n of each rank; None: all alike. Unequal ones are sent from rank to rank.
        """
        shares = [len(array)] * self.size if sizes is None else [int(n) for n in sizes]
        fits = len(shares) == self.size and shares[self.rank] == len(array) and sum(shares) == len(out)
        if not fits or not _alike(array, out):
            self._refuse("all_gather", f"rows {shares}, one number for each rank", array, out)
        if out.size:
            self._run("all_gather", self._all_gather, _rows(array), _rows(out), shares)

    def reduce_scatter(self, array: Array, out: Array) -> None:
        """The sum over all ranks of what they hold for this one, float32: array (size, *out.shape)."""
        fits = array.dtype == out.dtype == FLOAT32 and array.shape == (self.size, *out.shape)
        if not fits or not _contiguous(array, out):
            self._refuse("reduce_scatter", "float32 (size, ...) and (...)", array, out)
        if out.size:
            self._run("reduce_scatter", self._reduce_scatter, array, out)

    def all_to_all(
        self, array: Array, out: Array, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> None:
        """Rows for each rank go there, in the order of ranks; rows from each rank arrive, in that order.

        sent, received  rows for and from each rank; None: equal shares
        """
        shares = [[len(x) // self.size] * self.size if given is None else [int(n) for n in given]
                  for x, given in ((array, sent), (out, received))]
        fits = all(len(n) == self.size and sum(n) == len(x) for n, x in zip(shares, (array, out), strict=True))
        if not fits or not _alike(array, out) or shares[0][self.rank] != shares[1][self.rank]:
            self._refuse("all_to_all", f"rows {shares[0]} sent and {shares[1]} received", array, out)
        if array.nbytes or out.nbytes or sent is not None:
            self._run("all_to_all", self._all_to_all, _rows(array), _rows(out), *shares)

    def start_spread(
        self, messages: Sequence[tuple[Bytes, Sequence[Bytes]]], *, beside: bool = True
    ) -> Callable[[], None]:
        """Begin to send bytes to all ranks, each into places of its own; (mine, out): rank i's bytes go to out[i].

        out      one for each rank; where this rank's is mine, the same object, nothing is copied
        beside   engines that have a stream of their own work beside the caller's, which costs two changes of stream
        returns  what must be called before the places are read, or what is sent is written: it makes CuPy's stream wait
                 (on the CPU the host)
        """
        for mine, out in messages:
            if len(out) != self.size or out[self.rank].nbytes != mine.nbytes:
                self._refuse("start_spread", f"bytes for {self.size} ranks", mine, *out)
        given = messages[0][0], *messages[0][1]
        finish: Callable[[], None] = self._run("start_spread", partial(self._spread, messages, beside), *given)
        if finish is nothing:
            return finish
        return partial(self._run, "start_spread", lambda *_: finish(), *given)

    # --- what an engine does; arrays are (rows, bytes) but for sums and maxima ---

    @abstractmethod
    def place(self) -> tuple[Any, Any]:
        """NumPy or CuPy, whose arrays it sends, and a context of the device that they lie on."""

    @abstractmethod
    def _all_reduce_max(self, array: Array) -> None: ...

    @abstractmethod
    def _all_gather(self, array: Array, out: Array, sizes: list[int]) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, array: Array, out: Array) -> None: ...

    @abstractmethod
    def _all_to_all(self, array: Array, out: Array, sent: list[int], received: list[int]) -> None: ...

    @abstractmethod
    def _spread(
        self, messages: Sequence[tuple[Bytes, Sequence[Bytes]]], beside: bool, *given: Bytes
    ) -> Callable[[], None]: ...

    # --- errors ---

    def _refuse(self, what: str, wanted: str, *arrays: Array) -> NoReturn:
        raise ValueError(f"{what} on {self} takes C-contiguous {wanted}, not {_described(arrays)}")

    def _run(self, what: str, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except Exception as error:  # whatever the engine raises
            self._fail(what, error, given)

    def _fail(self, what: str, error: Exception, given: Sequence[Any]) -> NoReturn:
        arrays = [x for x in given if hasattr(x, "dtype")]
        raise CollectiveError(f"{what} failed on {self} with {_described(arrays)}: {error}") from error

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.engine})"


def _described(arrays: Sequence[Array]) -> str:
    return ", ".join(f"{tuple(x.shape)} {x.dtype.name}" for x in arrays)


def _contiguous(*arrays: Array) -> bool:
    return all(x.flags.c_contiguous for x in arrays)


def _alike(array: Array, out: Array) -> bool:
    is_whole: bool = array.flags.c_contiguous and out.flags.c_contiguous
    return is_whole and bool(array.dtype == out.dtype) and bool(array.shape[1:] == out.shape[1:])


def _rows(array: Array) -> Array:
    """(n, ...) as (n, bytes), so that an engine needs no type but bytes."""
    if array.ndim <= 2 and array.dtype == BYTES:  # as codes are; views take the time of a launch on a GPU
        return array
    return array.reshape(-1).view(np.uint8).reshape(len(array), prod(array.shape[1:]) * array.itemsize)


def on_gpu(ordinal: int) -> tuple[Any, Any]:
    import cupy

    return cupy, cupy.cuda.Device(ordinal)


def nothing() -> None:
    """There is nothing to wait for."""


def chunks_of(rows: Array, sizes: Sequence[int]) -> list[Array]:
    ends = np.cumsum([0, *sizes]).tolist()
    return [rows[start:end] for start, end in pairwise(ends)]


# --- one process --------------------------------------------------------------------------------


class Alone(Ranks):
    """One rank: what a program is without the others, and the reference of what they do together."""

    rank, size, engine = 0, 1, "one process"

    def place(self) -> tuple[Any, Any]:
        return np, nullcontext()

    def _all_reduce_max(self, array: Array) -> None:
        raise NotImplementedError  # never called: one rank's is the largest

    def _all_gather(self, array: Array, out: Array, sizes: list[int]) -> None:
        out[...] = array

    def _reduce_scatter(self, array: Array, out: Array) -> None:
        out[...] = array[0]

    def _all_to_all(self, array: Array, out: Array, sent: list[int], received: list[int]) -> None:
        out[...] = array

    def _spread(
        self, messages: Sequence[tuple[Bytes, Sequence[Bytes]]], beside: bool, *given: Bytes
    ) -> Callable[[], None]:
        for mine, (out,) in messages:
            if out is not mine:
                out.array()[...] = mine.array()
        return nothing


__all__ = ["Alone", "Bytes", "CollectiveError", "Ranks", "chunks_of", "nothing", "on_gpu"]
