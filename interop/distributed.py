"""Ranks on the engines that people run already.

    ranks = as_ranks(group)       # a torch.distributed process group, CuPy's NCCL communicator, or Alone()

Nothing else in the library knows how ranks talk. Arrays are NumPy's (gloo) or CuPy's (NCCL). A call is ordered after
CuPy's current stream and before what follows there; the host waits for nothing that the engine does not wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any

import numpy as np

from hqarray.grouped_parts import on_device
from hqarray.inputs import place
from hqarray.layout import Array, namespace

from .ranks import Alone, Bytes, CollectiveError, Ranks, chunks_of, nothing, on_gpu

NOT_A_MEMBER = -100
"""What torch.distributed.new_group gives a process that is not in the group."""


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
        self._dist, self._given = dist, group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} of all processes is in none of this group's {self.size} places")
        backend = dist.get_backend(self.group)
        self.engine = f"torch.distributed, {backend}"
        self._is_cpu = any(device.type == "cpu" for device in self.group._device_types)
        self.checks = backend == "gloo" or (self._is_cpu and not torch.cuda.is_available())
        self._arrays, self._device = torch_arrays, torch.cuda.current_device
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

    @property
    def group(self) -> Any:
        """That of all processes is torch's to keep: where it is held until Python ends, gloo aborts at times."""
        group = self._dist.group.WORLD if self._given is None else self._given
        if group is None:
            raise ValueError("the process group was destroyed; make another one and call as_ranks() again")
        return group

    def place(self) -> tuple[Any, Any]:
        return (np, nullcontext()) if self._is_cpu else on_gpu(self._device())

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
        self._to_all([(tensor(array), [tensor(chunk) for chunk in chunks_of(out, sizes)])], beside=False)()

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
            return nothing
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
        return on_gpu(self.communicator.device_id())

    def _all_reduce_max(self, array: Array) -> None:
        nccl, at = self._nccl, array.data.ptr
        self.communicator.allReduce(at, at, array.size, nccl.NCCL_FLOAT32, nccl.NCCL_MAX, self._stream().ptr)

    def _all_gather(self, array: Array, out: Array, sizes: list[int]) -> None:
        if len(set(sizes)) == 1:
            nccl, stream = self._nccl, self._stream().ptr
            self.communicator.allGather(array.data.ptr, out.data.ptr, array.size, nccl.NCCL_UINT8, stream)
            return
        self._exchange([([array] * self.size, chunks_of(out, sizes))])

    def _reduce_scatter(self, array: Array, out: Array) -> None:
        nccl = self._nccl
        self.communicator.reduceScatter(
            array.data.ptr, out.data.ptr, out.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, self._stream().ptr
        )

    def _all_to_all(self, array: Array, out: Array, sent: list[int], received: list[int]) -> None:
        self._exchange([(chunks_of(array, sent), chunks_of(out, received))])

    def _spread(
        self, messages: Sequence[tuple[Bytes, Sequence[Bytes]]], beside: bool, *given: Bytes
    ) -> Callable[[], None]:
        self._exchange([([mine.array()] * self.size, [x.array() for x in out]) for mine, out in messages])
        return nothing

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
