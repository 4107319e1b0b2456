"""Processes that stay: one for each rank, gloo between them on the CPU, which run functions that they are sent.

A function takes the ranks first and is importable by name; what it returns is pickled. Whatever happens, `run` ends in
`timeout` seconds: a test that would hang fails.
"""

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

ENGINE_TIMEOUT = 30
"""Seconds after which an engine gives up waiting for a rank, where a test says nothing else."""


class Failed(Exception):
    """What a function raised, on the ranks that raised: their messages, with the type's name ahead."""

    def __init__(self, messages):
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in messages.items()))
        self.messages = messages


def _serve(rank, size, folder, backend, engine_timeout, connection):
    os.dup2(os.open(f"{folder}/said-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast stays off
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"  # a minute by default, for what others want to say
    import torch
    import torch.distributed as dist

    from hqarray.interop.distributed import TorchRanks, as_ranks

    torch.set_num_threads(1)
    if backend != "gloo":
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        if count < size:  # NCCL refuses ranks that share a GPU, unless they seem to be on two hosts
            os.environ.update(NCCL_HOSTID=f"hqarray-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.cuda.set_device(rank % count)
        cupy.cuda.Device(rank % count).use()
        torch.cuda.set_stream(torch.cuda.Stream())  # two streams, neither of which waits for the other or the default
        cupy.cuda.Stream(non_blocking=True).use()
    dist.init_process_group(
        "gloo" if backend == "cupy" else backend, init_method=f"file://{folder}/store", rank=rank, world_size=size,
        timeout=timedelta(seconds=120),
    )
    ranks = TorchRanks(dist.new_group(timeout=timedelta(seconds=engine_timeout)))
    if backend == "cupy":  # gloo hands NCCL's number over
        from cupy.cuda import nccl

        number = [nccl.get_unique_id() if rank == 0 else None]
        dist.broadcast_object_list(number)
        ranks = as_ranks(nccl.NcclCommunicator(size, number[0], rank))
    connection.send(("ready", None))
    while (job := connection.recv()) is not None:
        function, args = job
        try:
            connection.send(("ok", function(ranks, *args)))
        except Exception as error:
            traceback.print_exc()
            connection.send(("raised", f"{type(error).__name__}: {error}"))
    dist.destroy_process_group()


class Pool:
    """size ranks; use as a context.

    backend  "gloo", "nccl" (torch's) or "cupy" (CuPy's communicator of NCCL)
    """

    def __init__(self, size, backend="gloo", *, timeout=60, engine_timeout=ENGINE_TIMEOUT):
        self.size, self.backend, self.timeout, self.is_broken = size, backend, timeout, False
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "hqarray.interop.torch_arrays"])  # imported once for all
        self.folder = tempfile.TemporaryDirectory()
        self.connections, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, daemon=True,
                args=(rank, size, self.folder.name, backend, engine_timeout, theirs),
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        self._collect(range(size))

    def run(self, function, *args, ranks=None):
        """What the function returns on each rank. Raises Failed where one raised, AssertionError where one hangs."""
        chosen = range(self.size) if ranks is None else ranks
        for rank in chosen:
            self.connections[rank].send((function, args))
        return self._collect(chosen)

    def said(self, rank):
        """What a rank has written to stderr."""
        return Path(self.folder.name, f"said-{rank}").read_text(encoding="utf-8")

    def kill(self, rank):
        self.is_broken = True
        self.processes[rank].kill()
        self.processes[rank].join()

    def _collect(self, ranks):
        deadline, results, raised = time.monotonic() + self.timeout, [], {}
        for rank in ranks:
            if not self.connections[rank].poll(max(0, deadline - time.monotonic())):
                said = self.said(rank)
                self.close()
                raise AssertionError(f"rank {rank} has not answered within {self.timeout} seconds; it said:\n{said}")
            kind, value = self.connections[rank].recv()
            results.append(value)
            if kind == "raised":
                raised[rank] = value
        if raised:
            self.is_broken |= any(text.startswith("CollectiveError") for text in raised.values())
            raise Failed(raised)
        return results

    def close(self):
        for connection, process in zip(self.connections, self.processes, strict=True):
            if process.is_alive():
                with contextlib.suppress(OSError):
                    connection.send(None)
        for process in self.processes:
            process.join(0.5 if self.is_broken else 5)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self.connections:
            connection.close()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
