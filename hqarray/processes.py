"""Work in several processes: results in the order of the work, and nothing left running behind an error."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

Result = TypeVar("Result")

GRACE = 2.0
"""Seconds that a process has to end in before it is killed."""


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
        initializer=_serve,
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
        _end(set(multiprocessing.active_children()) - before)
        raise


def _serve() -> None:
    """What a worker does first: Ctrl-C is for the one that asked, and without that one there is nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_it() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()


def _end(processes: Iterable[Any]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():  # stopped, so that it does not hear
            process.kill()
            process.join()


__all__ = ["WorkerDied", "in_processes"]
