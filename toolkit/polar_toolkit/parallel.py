"""Work on several processes, its results in the order of the jobs.

Invariant: the results do not depend on the number of workers; when the caller stops early, by an error or by Ctrl-C,
no worker is left. Jobs and results are small: data goes through files.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait

from polar_toolkit.errors import Refusal


def in_order[J, R](work: Callable[[J], R], jobs: Sequence[J], workers: int) -> Iterator[R]:
    """`work` of each job, in the order of the jobs; in this process when one worker would do.

    `work` is a function of a module, which each worker imports anew. Raises what `work` raises, and Refusal when a
    worker dies.
    """
    if min(workers, len(jobs)) <= 1:
        yield from map(work, jobs)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy Arrow's threads in an undefined state
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(workers, len(jobs)), context, initializer=_begin)
    try:
        yield from pool.map(work, jobs)
    except BrokenProcessPool as error:
        raise Refusal("a worker process died; was it out of memory? try again with --workers 1") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()  # at the normal end they have nothing to do
            child.join()


def cpus() -> int:
    """How many processes this one may run at a time."""
    return len(os.sched_getaffinity(0))


def _begin() -> None:
    """In a worker: Ctrl-C is the parent's to answer, and a worker outlives no parent, however that one ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
