"""NCCL as CuPy offers it, over memory of the host: threads are ranks. It shows what NcclRanks tells it, without a GPU.

Signatures are those of cupy_backends/cuda/libs/nccl.pyx: addresses, counts of elements (not bytes), types, a stream.
"""

import ctypes
import queue
import threading
from types import SimpleNamespace

import numpy as np

from hqarray.interop.distributed import NcclRanks

TYPES = {1: np.uint8, 7: np.float32}  # ncclUint8, ncclFloat32
TIMEOUT = 20


class Memory(np.ndarray):
    """An array whose .data.ptr is its address, as CuPy's is."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def at(address, count, kind):
    size = count * np.dtype(TYPES[kind]).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), TYPES[kind])


class World:
    """What the threads of a group share; the module cupy.cuda.nccl besides."""

    NCCL_UINT8, NCCL_FLOAT32, NCCL_SUM, NCCL_MAX = 1, 7, 0, 2

    def __init__(self, size):
        self.size, self.barrier, self.local = size, threading.Barrier(size, timeout=TIMEOUT), threading.local()
        self.board = [None] * size
        self.lines = {(a, b): queue.Queue() for a in range(size) for b in range(size)}

    def groupStart(self):
        self.local.waiting = []

    def groupEnd(self):
        for out, line in self.local.waiting:
            sent = line.get(timeout=TIMEOUT)
            assert len(sent) == len(out)
            out[...] = sent
        del self.local.waiting

    def all(self, rank, mine):
        """What every rank has put there."""
        self.board[rank] = mine.copy()
        self.barrier.wait()
        every = list(self.board)
        self.barrier.wait()
        return every


class Communicator:
    def __init__(self, world, rank):
        self.world, self.rank = world, rank

    def rank_id(self):
        return self.rank

    def size(self):
        return self.world.size

    def allReduce(self, send, receive, count, kind, op, stream):
        reduced = {World.NCCL_MAX: np.max, World.NCCL_SUM: np.sum}[op](
            self.world.all(self.rank, at(send, count, kind)), axis=0)
        at(receive, count, kind)[...] = reduced

    def allGather(self, send, receive, count, kind, stream):
        every = self.world.all(self.rank, at(send, count, kind))
        at(receive, count * self.world.size, kind)[...] = np.concatenate(every)

    def reduceScatter(self, send, receive, count, kind, op, stream):
        assert op == World.NCCL_SUM
        every = self.world.all(self.rank, at(send, count * self.world.size, kind))
        at(receive, count, kind)[...] = np.sum(every, axis=0)[count * self.rank : count * (self.rank + 1)]

    def send(self, address, count, kind, peer, stream):
        self.world.lines[self.rank, peer].put(at(address, count, kind).copy())

    def recv(self, address, count, kind, peer, stream):
        self.world.local.waiting.append((at(address, count, kind), self.world.lines[peer, self.rank]))


class FakeRanks(NcclRanks):
    """NcclRanks on arrays of NumPy."""

    def __init__(self, communicator):
        self.communicator = communicator
        self.rank, self.size, self.engine = communicator.rank_id(), communicator.size(), "threads"
        self._nccl, self._stream = communicator.world, lambda: SimpleNamespace(ptr=0)

    def _run(self, what, call, *given):
        return super()._run(what, call, *(x.view(Memory) if isinstance(x, np.ndarray) else x for x in given))

    def _exchange(self, messages):
        super()._exchange([[[x.view(Memory) for x in arrays] for arrays in pair] for pair in messages])


def in_threads(size, function, *args):
    """What the function returns for each rank."""
    world, results = World(size), [None] * size

    def work(rank):
        results[rank] = function(FakeRanks(Communicator(world, rank)), *args)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT)
        assert not thread.is_alive()
    return results
