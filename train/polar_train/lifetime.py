"""How a run has its folder to itself, and how it is asked to end.

Invariant: of two processes that write to a folder, one ends with a sentence; the death of a process, however sudden,
lets its folder go. It knows nothing of what is written.
"""

from __future__ import annotations

import fcntl
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from polar_train.errors import BadInput

LOOK_SECONDS = 0.5
"""Between two looks at a folder that another still holds."""


@contextmanager
def alone(out: Path, patience_s: float = 0.0) -> Generator[int]:
    """Holds the folder of a run, which the death of this process and of all that inherit the descriptor lets go.

    Raises BadInput when another process has it still after `patience_s` seconds.
    """
    if out.exists() and not out.is_dir():
        raise BadInput(f"`out` {str(out)!r} is a file: give a folder")
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + patience_s
    with (out / ".lock").open("w") as handle:
        while not _locked(handle.fileno()):
            if time.monotonic() >= until:
                raise BadInput(f"another process is training in {str(out)!r}: wait for it, or give another `out`")
            time.sleep(LOOK_SECONDS)
        yield handle.fileno()


@contextmanager
def interrupts() -> Generator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second one of them does what it does elsewhere."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.set()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        restore()


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another process holds it
        return False
    return True
