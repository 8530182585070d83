"""CPU time of one step, at its best.

Invariant: what is timed is the work alone: the garbage collector rests, as in timeit, and the first of several rounds,
which pays for imports and fresh memory, is not counted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def fastest[T](step: Callable[[], T], rounds: int) -> tuple[float, T]:
    """CPU milliseconds of the process in the fastest of `rounds` rounds, and what the last one returned."""
    if rounds > 1:
        step()
    gc.collect()
    gc.disable()
    try:
        taken = [_timed(step) for _ in range(rounds)]
    finally:
        gc.enable()
    return min(seconds for seconds, _ in taken) * 1e3, taken[-1][1]


def _timed[T](step: Callable[[], T]) -> tuple[float, T]:
    began = time.process_time()
    value = step()
    return time.process_time() - began, value
