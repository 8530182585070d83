"""polar_toolkit.rollout.screen: the table on a terminal, lines elsewhere."""

from __future__ import annotations

import asyncio
from io import StringIO

import pytest
from rich.console import Console

from polar_toolkit.rollout.board import Board, Stage
from polar_toolkit.rollout.interceptor import Figures
from polar_toolkit.rollout.outcome import Outcome, Status
from polar_toolkit.rollout.screen import shown
from polar_toolkit.rollout.task import Attempt, Check, Task

ONE = [Attempt(Task("sum", "Add.", Check("command")), 1)]


class Counting:
    """Counts looks; the first of them can be waited for."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.looked = asyncio.Event()
        self.error = error

    async def figures(self) -> Figures:
        self.looked.set()
        if self.error is not None:
            raise self.error
        return Figures(calls=7, running=1, waiting=0, sampled=70, sessions={})


def finish(board: Board, note: str = "") -> None:
    board.enter(ONE[0].attempt_id, Stage.RUN)
    status = Status.HARNESS_ERROR if note else Status.COMPLETED
    board.end(Outcome("sum.1", "sum.1", "sum", "sum", 1, 1, 0, status, note, reward=None if note else 1.0))


async def watch(board: Board, console: Console, note: str = "", **options: float) -> None:
    counting = Counting()
    async with shown(board, counting, console, **options):
        await counting.looked.wait()
        finish(board, note)


def test_without_a_terminal_each_end_is_a_line():
    """Then a line on the whole; nothing in it moves a cursor."""
    written = StringIO()
    asyncio.run(watch(Board(ONE), Console(file=written, width=80)))
    first, last = written.getvalue().splitlines()
    assert first == "sum.1 completed, reward 1, 0 calls, 0 tokens, 0 s"
    assert last.startswith("1 of 1 attempts, reward 1.00, 0 s | 0 tokens/s, 70 sampled; calls: 7 done, 1 running")
    assert "\x1b" not in written.getvalue()


def test_on_a_terminal_the_table_ends_with_the_last_state():
    """An attempt that went wrong passes above the table with its note; others only count."""
    written = StringIO()
    console = Console(file=written, width=80, height=24, force_terminal=True)
    asyncio.run(watch(Board(ONE), console, note="it made no call"))
    text = Console(file=StringIO(), width=80).render_str(written.getvalue()).plain
    assert "sum.1 harness_error, no reward, 0 calls, 0 tokens, 0 s: it made no call" in text
    assert text.rindex("1 of 1 attempts") > text.rindex("it made no call")


def test_nothing_runs_on_once_it_is_closed():
    """No task and no listener is left."""

    async def left() -> tuple[int, object]:
        board = Board(ONE)
        await watch(board, Console(file=StringIO()))
        return len(asyncio.all_tasks()), board.listener

    assert asyncio.run(left()) == (1, None)


def test_a_fault_of_the_figures_is_raised_at_the_end():
    """It stops the picture, not the rollout; and it is not swallowed."""

    async def broken() -> None:
        counting = Counting(RuntimeError("no figures"))
        async with shown(Board(ONE), counting, Console(file=StringIO())):
            await counting.looked.wait()
            await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="no figures"):
        asyncio.run(broken())
