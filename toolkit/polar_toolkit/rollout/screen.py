"""Shows a board to people while a rollout runs: a live table on a terminal, plain lines elsewhere.

Invariant: what is shown is only read; a rollout runs the same with nobody looking. The machine's log is not this, but
rollout/events.jsonl.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from polar_toolkit.rollout.board import Board, line_of
from polar_toolkit.rollout.outcome import Outcome

if TYPE_CHECKING:
    from polar_toolkit.rollout.interceptor import Figures

TICK_S = 0.5
"""Between two looks at the interceptor's figures, and two pictures."""
STATUS_S = 30.0
"""Between two status lines where there is no terminal."""
_AROUND = 8
"""Lines of a terminal that are not groups: the header, the state of all, and some of what was there before."""


class Counted(Protocol):
    """Whatever counts calls: the interceptor."""

    async def figures(self) -> Figures:
        """What it counts at this moment."""
        ...


@asynccontextmanager
async def shown(
    board: Board, interceptor: Counted, console: Console, status_s: float = STATUS_S
) -> AsyncGenerator[None]:
    """While this is open, the board is fed with the interceptor's figures and shown on the console.

    On a terminal a table stands at the bottom, and the attempts that did not complete pass above it; elsewhere each
    attempt that ended is a line, and every `status_s` seconds there is a line on the whole.
    """
    terminal = console.is_terminal
    loop = _table(board, interceptor, console) if terminal else _lines(board, interceptor, console, status_s)
    task = asyncio.create_task(loop)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        board.listener = None
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def _table(board: Board, interceptor: Counted, console: Console) -> None:
    def tell(outcome: Outcome) -> None:
        if outcome.note:
            live.console.print(Text(line_of(outcome)))

    def picture() -> None:
        live.update(board.view(max(3, console.height - _AROUND)), refresh=True)

    # Refreshed from here: rich's own thread would read the board while it changes.
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        board.listener = tell
        try:
            while True:
                board.feed(await interceptor.figures())
                picture()
                await asyncio.sleep(TICK_S)
        finally:
            picture()


async def _lines(board: Board, interceptor: Counted, console: Console, status_s: float) -> None:
    def tell(outcome: Outcome) -> None:
        console.print(line_of(outcome), markup=False, highlight=False, soft_wrap=True)

    def state() -> None:
        console.print(" | ".join(board.lines()), markup=False, highlight=False, soft_wrap=True)

    board.listener = tell
    told = time.monotonic()
    try:
        while True:
            board.feed(await interceptor.figures())
            if time.monotonic() - told >= status_s:
                state()
                told = time.monotonic()
            await asyncio.sleep(TICK_S)
    finally:
        state()
