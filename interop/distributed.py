"""Ranks: the few collectives that sharded matrices need, on the engines that people run already.

    ranks = as_ranks(group)       # a torch.distributed process group, CuPy's NCCL communicator, or Alone()

Nothing else in the library knows how ranks talk. Arrays are NumPy's (gloo) or CuPy's (NCCL). A call is ordered after
CuPy's current stream and before what follows there; the host waits for nothing that the engine does not wait for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hqarray.buffers import ordinal_of
from hqarray.grouped_parts import on_device
from hqarray.inputs import place
from hqarray.layout import Array, namespace

from .agreement import Agreement, CollectiveError
from .pieces import BYTES, block

FLOAT32 = np.dtype(np.float32)

NOT_A_MEMBER = -100
"""What torch.distributed.new_group gives a process that is not in the group."""


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
        if finish is _nothing:
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


def _on_gpu(ordinal: int) -> tuple[Any, Any]:
    import cupy

    return cupy, cupy.cuda.Device(ordinal)


def _nothing() -> None:
    """There is nothing to wait for."""


def _chunks(rows: Array, sizes: Sequence[int]) -> list[Array]:
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
        return _nothing


# --- torch.distributed --------------------------------------------------------------------------


class TorchRanks(Ranks):
    """A process group of torch.distributed: gloo for NumPy arrays, NCCL for CuPy's.

    group  None: all processes
    """

    def __init__(self, group: Any = None) -> None:
        import torch
        import torch.distributed as dist

        from . import torch_arrays

        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("there is no process group; call torch.distributed.init_process_group(...) first")
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} of all processes is in none of this group's {self.size} places")
        self.engine = f"torch.distributed, {dist.get_backend(self.group)}"
        kinds = {device.type for device in self.group._device_types}
        self._is_cpu = "cpu" in kinds
        self.checks = self._is_cpu and ("cuda" not in kinds or not torch.cuda.is_available())
        self._dist, self._arrays, self._device = dist, torch_arrays, torch.cuda.current_device
        # torch 2.13 gave them new names
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def _run(self, what: str, call: Callable[..., Any], *given: Any) -> Any:
        """Torch's stream after CuPy's, and CuPy's after it."""
        ordinal = given[0].ordinal if isinstance(given[0], Bytes) else place(given[0])
        if ordinal < 0:
            return super()._run(what, call, *given)
        cuda = self._arrays._cuda()
        cuda.order(ordinal, torch_first=False)
        result = super()._run(what, call, *given)
        cuda.order(ordinal, torch_first=True)
        return result

    def place(self) -> tuple[Any, Any]:
        return (np, nullcontext()) if self._is_cpu else _on_gpu(self._device())

    def _options(self, kind: str, *, beside: bool = False) -> Any:
        """Options of an operation on the caller's stream, which then may have no work to wait for, or beside it."""
        options = getattr(self._dist.distributed_c10d, kind)()
        if hasattr(options, "asyncOp"):
            options.asyncOp = beside
        return options

    def _all_reduce_max(self, array: Array) -> None:
        options = self._options("AllreduceOptions")
        options.reduceOp = self._dist.ReduceOp.MAX
        work = self.group.allreduce([self._arrays.as_tensor(array)], options)  # dist.all_reduce's checks take 20 us
        if work is not None:
            work.wait()

    def _all_gather(self, array: Array, out: Array, sizes: list[int]) -> None:
        tensor = self._arrays.as_tensor
        if len(set(sizes)) == 1:
            self._gather(tensor(out), tensor(array), group=self.group)
            return
        self._to_all([(tensor(array), [tensor(chunk) for chunk in _chunks(out, sizes)])], beside=False)()

    def _spread(
        self, messages: Sequence[tuple[Bytes, Sequence[Bytes]]], beside: bool, *given: Bytes
    ) -> Callable[[], None]:
        tensors = []
        for mine, out in messages:
            own = self._tensor_of(mine)
            tensors.append((own, [own if x is mine else self._tensor_of(x) for x in out]))
        return self._to_all(tensors, beside)

    def _tensor_of(self, given: Bytes) -> Any:
        memory, start, nbytes = given
        if isinstance(memory, np.ndarray):
            return self._arrays.as_tensor(given.array())
        return self._arrays._cuda().bytes_at(memory, start, nbytes)

    def _to_all(self, messages: Sequence[tuple[Any, list[Any]]], beside: bool) -> Callable[[], None]:
        """Begin to send a tensor of each message to all ranks, into their tensors."""
        if messages[0][0].is_cuda:  # NCCL sends lists, with less of the host's time than a batch of calls
            work = self._send_lists(messages, self._options("AllToAllOptions", beside=beside))
            works = [] if work is None else [work]
        else:
            dist, calls = self._dist, []
            for mine, out in messages:
                for peer, chunk in enumerate(out):
                    if peer == self.rank:
                        if chunk is not mine:
                            chunk.copy_(mine)
                        continue
                    if chunk.numel():
                        calls.append(dist.P2POp(dist.irecv, chunk, group=self.group, group_peer=peer))
                    if mine.numel():
                        calls.append(dist.P2POp(dist.isend, mine, group=self.group, group_peer=peer))
            works = dist.batch_isend_irecv(calls) if calls else []
        if not works:  # the caller's stream has it
            return _nothing
        held = [messages]  # until all have arrived

        def finish() -> None:
            for work in works:
                work.wait()
            held.clear()

        return finish

    def _send_lists(self, messages: Sequence[tuple[Any, list[Any]]], options: Any) -> Any:
        """All messages as one operation of NCCL, by the calls of torch's own batches; its work, or None."""
        group, rank = self.group, self.rank
        lists = []
        for mine, out in messages:
            sent = [mine] * self.size
            if out[rank] is mine:  # NCCL would copy it, on the cores that serve the link
                sent[rank] = out[rank] = mine[:0]
            lists.append((out, sent))
        if len(lists) == 1:
            return group.alltoall(*lists[0], options)
        device = messages[0][0].device
        group._start_coalescing(device)
        try:
            for out, sent in lists:
                group.alltoall(out, sent, options)
        finally:
            work = group._end_coalescing(device)
        return work

    def _reduce_scatter(self, array: Array, out: Array) -> None:
        tensor = self._arrays.as_tensor
        self._scatter(tensor(out.reshape(-1)), tensor(array.reshape(-1)), group=self.group)

    def _all_to_all(self, array: Array, out: Array, sent: list[int], received: list[int]) -> None:
        tensor = self._arrays.as_tensor
        self._dist.all_to_all_single(tensor(out), tensor(array), received, sent, group=self.group)


# --- CuPy's NCCL --------------------------------------------------------------------------------


class NcclRanks(Ranks):
    """A communicator of cupy.cuda.nccl; calls run on CuPy's current stream."""

    def __init__(self, communicator: Any) -> None:
        from cupy.cuda import get_current_stream, nccl

        self.communicator = communicator
        self.rank, self.size = communicator.rank_id(), communicator.size()
        self.engine = "CuPy, NCCL"
        self._nccl, self._stream = nccl, get_current_stream

    def place(self) -> tuple[Any, Any]:
        return _on_gpu(self.communicator.device_id())

    def _all_reduce_max(self, array: Array) -> None:
        nccl, at = self._nccl, array.data.ptr
        self.communicator.allReduce(at, at, array.size, nccl.NCCL_FLOAT32, nccl.NCCL_MAX, self._stream().ptr)

    def _all_gather(self, array: Array, out: Array, sizes: list[int]) -> None:
        if len(set(sizes)) == 1:
            nccl, stream = self._nccl, self._stream().ptr
            self.communicator.allGather(array.data.ptr, out.data.ptr, array.size, nccl.NCCL_UINT8, stream)
            return
        self._exchange([([array] * self.size, _chunks(out, sizes))])

    def _reduce_scatter(self, array: Array, out: Array) -> None:
        nccl = self._nccl
        self.communicator.reduceScatter(
            array.data.ptr, out.data.ptr, out.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, self._stream().ptr
        )

    def _all_to_all(self, array: Array, out: Array, sent: list[int], received: list[int]) -> None:
        self._exchange([(_chunks(array, sent), _chunks(out, received))])

    def _spread(
        self, messages: Sequence[tuple[Bytes, Sequence[Bytes]]], beside: bool, *given: Bytes
    ) -> Callable[[], None]:
        self._exchange([([mine.array()] * self.size, [x.array() for x in out]) for mine, out in messages])
        return _nothing

    def _exchange(self, messages: Sequence[tuple[Sequence[Array], Sequence[Array]]]) -> None:
        """Of each message a chunk to each rank and one from each, all of it one operation of NCCL."""
        communicator, kind, stream = self.communicator, self._nccl.NCCL_UINT8, self._stream().ptr
        self._nccl.groupStart()
        try:
            for peer, (mine, out) in ((i, pair) for message in messages
                                      for i, pair in enumerate(zip(*message, strict=True))):
                if peer != self.rank:
                    if mine.size:
                        communicator.send(mine.data.ptr, mine.size, kind, peer, stream)
                    if out.size:
                        communicator.recv(out.data.ptr, out.size, kind, peer, stream)
        finally:
            self._nccl.groupEnd()
        for sent, received in messages:
            if sent[self.rank].data.ptr != received[self.rank].data.ptr:
                received[self.rank][...] = sent[self.rank]


# --- any of them --------------------------------------------------------------------------------


def as_ranks(engine: Any = None, *, check: bool | None = None) -> Ranks:
    """The ranks of a process group.

    engine  a torch.distributed group (None: all processes) or one-dimensional DeviceMesh, a
            cupy.cuda.nccl.NcclCommunicator, what cupyx.distributed.init_process_group gave, or Ranks
    check   whether calls first compare what the ranks gave, so that all raise the same error where it differs, or where
            one rank refuses: a small gather for each call, which waits for the device. None: with gloo they do, on GPUs
            they do not; Ranks as they are
    Raises TypeError for anything else.
    """
    ranks = _ranks_of(engine)
    if check is not None and check != ranks.checks:
        ranks = copy(ranks)
        ranks.checks = check
    return ranks


def _ranks_of(engine: Any) -> Ranks:
    if isinstance(engine, Ranks):
        return engine
    kind = type(engine)
    home = kind.__module__.partition(".")[0]
    if home == "torch" and hasattr(engine, "get_group"):  # a DeviceMesh
        if engine.ndim != 1:
            names = engine.mesh_dim_names or tuple(range(engine.ndim))
            raise TypeError(f"a DeviceMesh of {names} has a group for each; pass mesh.get_group({names[0]!r})")
        engine = engine.get_group()
    if engine is None or home == "torch":
        return TorchRanks(engine)
    if home in ("cupy", "cupyx", "cupy_backends"):
        # cupyx's class of backends names the communicator so, and offers no other way to sizes that differ
        return NcclRanks(getattr(engine, "_comm", engine))
    if isinstance(engine, int) and engine == NOT_A_MEMBER:
        raise TypeError(f"ranks are a process group, not {engine}, which new_group gives a process that is not in the "
                        f"group; call this on the group's processes alone")
    raise TypeError(
        f"ranks are a torch.distributed process group, a cupy.cuda.nccl.NcclCommunicator or Ranks, not "
        f"{kind.__name__}; Alone() is one process"
    )


def exchange(ranks: Ranks, numbers: Sequence[int], like: Array) -> list[tuple[int, ...]]:
    """What all ranks say, so many integers each, on the host. Synchronises; for what is agreed on once.

    like  an array where the engine works: it says where the numbers are sent from
    """
    module = namespace(like)
    with on_device(like.device):
        mine = module.asarray(np.array([numbers], np.int64))
        every = module.empty((ranks.size, len(numbers)), np.int64)
        ranks.all_gather(mine, every)
    return [tuple(row) for row in (every.get() if hasattr(every, "get") else every).tolist()]


__all__ = ["Alone", "Bytes", "CollectiveError", "NcclRanks", "Ranks", "TorchRanks", "as_ranks", "exchange"]
