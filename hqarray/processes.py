"""Work in several processes: results in the order of the work, and nothing left running behind an error."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

Result = TypeVar("Result")


class WorkerDied(RuntimeError):
    """A process ended before its work did: killed, or out of memory."""


def in_processes(call: Callable[..., Result], work: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[Result]:
    """call(*arguments) for each of the work, by so many processes; here, one by one, where that is one.

    Results come in the order of the work, each as soon as those before it are there. What a call raises is raised
    here, and the other processes are ended.
    """
    jobs = min(jobs, len(work))
    if jobs < 2:
        yield from (call(*arguments) for arguments in work)
        return
    before = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN),  # Ctrl-C is for the one that asked
    )
    try:
        futures = [executor.submit(call, *arguments) for arguments in work]
        for future in futures:
            try:
                yield future.result()
            except BrokenProcessPool as error:
                raise WorkerDied("a process ended before its work did (out of memory?); give fewer jobs") from error
        executor.shutdown()
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise


__all__ = ["WorkerDied", "in_processes"]
