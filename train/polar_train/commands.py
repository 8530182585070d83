"""Commands of polar-toolkit as children of a loop: started side by side, waited for, and ended in order with it.

Invariant: a child works in a process group of its own, so that Ctrl-C reaches it through here alone; it ends when this
process is gone, and until then holds the loop's lock, so that no second loop begins beside it. What they say goes to a
log; their exit codes become errors.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from polar_train.errors import BadInput, CommandFailed

_REFUSED, _BROKEN = 2, 3
"""Exit codes of polar-toolkit: nothing was started; done, but some attempts failed by their set-up or evaluator."""
_LOOK_S = 0.1
"""Between two looks at what runs."""

PROGRAM = (sys.executable, "-m", "polar_train.tethered")

Child = subprocess.Popen[bytes]


class Stopped(Exception):
    """The loop was asked to stop; what a command had not done is done by the next loop."""


def run_all(
    commands: Sequence[Sequence[str]],
    log: Path,
    *,
    lock: int,
    stopping: Callable[[], bool],
    program: Sequence[str] = PROGRAM,
) -> None:
    """Run commands of a program side by side until all have ended; what they say is added to the log.

    `lock` is the descriptor that they hold open. When one fails, or `stopping()`, the others are ended in order.
    Raises Stopped, BadInput when one was refused, CommandFailed when one failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as streams:
        output = streams.enter_context(log.open("ab"))
        children = [
            streams.enter_context(
                Child(
                    [*program, *words],
                    stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True, pass_fds=(lock,),
                )
            )
            for words in commands
        ]  # fmt: skip
        failed = _wait(children, stopping)
    if stopping():
        raise Stopped
    if failed is not None:
        raise _error(commands[failed][0], children[failed].returncode, log)


def _wait(children: Sequence[Child], stopping: Callable[[], bool]) -> int | None:
    """Which one failed first, once all have ended."""
    failed: int | None = None
    ending = False
    while any(child.poll() is None for child in children):
        if failed is None:
            failed = _failed(children)
        if not ending and (failed is not None or stopping()):
            ending = True
            for child in children:
                child.terminate()
        time.sleep(_LOOK_S)
    return _failed(children) if failed is None else failed


def _failed(children: Sequence[Child]) -> int | None:
    bad = (index for index, child in enumerate(children) if child.poll() not in (None, 0, _BROKEN))
    return next(bad, None)


def _error(command: str, code: int, log: Path) -> BadInput | CommandFailed:
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = said[-1] if said else "nothing"
    if code == _REFUSED:
        return BadInput(f"{last} (said by `polar-toolkit {command}`, in {str(log)!r})")
    return CommandFailed(
        f"`polar-toolkit {command}` ended with {code}; the last that it said in {str(log)!r} is {last!r}; "
        "the loop, started again, goes on from here"
    )
