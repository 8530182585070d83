"""Shows a training run to people: a table of the last steps and a bar on a terminal, a line a step elsewhere.

Invariant: what is shown is only read; a run is the same with nobody looking. The machine's log is not this, but
OUT/metrics.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, ConsoleRenderable, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polar_train.metrics import Record

SHOWN = 12
"""Steps that the table holds; fewer on a low terminal."""
PICTURES_PER_SECOND = 2
_AROUND = 8
"""Lines of a terminal that are not steps: the table's frame, the bar, and some of what was there before."""


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a step as the table and the lines show it."""

    name: str
    cell: Callable[[Record], str]


COLUMNS: tuple[Column, ...] = (
    Column("step", lambda one: str(one.step)),
    Column("reward", lambda one: "-" if one.reward_mean is None else f"{one.reward_mean:.3f}"),
    Column("loss", lambda one: f"{one.loss:.4f}"),
    Column("ratio", lambda one: f"{one.ratio_mean:.3f}"),
    Column("clip", lambda one: f"{one.clip_share:.1%}"),
    Column("KL", lambda one: f"{one.kl_mean:.1e}"),
    Column("gap", lambda one: f"{one.gap_mean:.1e}"),
    Column("lag", lambda one: f"{one.lag_mean:.1f}"),
    Column("tok/s", lambda one: _short(one.tokens_per_second)),
    Column("dead", lambda one: f"{one.dead_groups}/{one.groups}"),
    Column("s", lambda one: f"{one.seconds:.0f}"),
)


class Screen:
    """What is shown of a run, which calls `seen`, `advance` and `say`.

    A picture may be taken by another thread at any time: each of its parts is replaced, never changed.
    """

    def __init__(self, console: Console, updates: int | None, clock: Callable[[], float] = time.time) -> None:
        self._console = console
        self._updates = updates
        self._clock = clock
        self._first: Record | None = None
        self._records: tuple[Record, ...] = ()
        self._passes = (0, 0)
        self._since = clock()
        self._said = ""
        self._state = "starting"
        self._ended = False

    def seen(self, record: Record) -> None:
        """A step has ended."""
        self._first = self._first or record
        self._records = (*self._records[-(SHOWN - 1) :], record)
        self._turn("reading the next batch")
        if not self._console.is_terminal:
            self._print(", ".join(part for part in (line_of(record), self._left()) if part))

    def advance(self, done: int, planned: int) -> None:
        """So many of a step's forests have been gone through."""
        if self._state:
            self._turn("")
        self._passes = (done, planned)

    def say(self, line: str) -> None:
        """What else there is to know, or what the run is at between steps; the same again is silent.

        On a terminal it stands where the bar is in a step; when another follows before a step does, it passes above.
        """
        if line == self._said:
            return
        if not self._console.is_terminal:
            self._print(line)
        elif self._stands():
            self._print(self._said)
        self._turn(line)
        self._said = line

    def end(self) -> None:
        """Nothing is going on any more: the last picture is of what was."""
        self._ended = True

    def picture(self) -> ConsoleRenderable:
        """The table of the last steps, below it how far the run is, and what it is at."""
        parts: list[ConsoleRenderable] = [self._table()] if self._records else []
        if self._records and self._updates:
            made = f"step {self._records[-1].step} of {self._updates}"
            parts.append(Text(", ".join(part for part in (made, self._left()) if part)))
        if not self._ended:
            parts.append(self._bar())
        elif self._stands():
            parts.append(Text(self._said))
        return Group(*parts)

    def _table(self) -> Table:
        height = max(1, min(SHOWN, self._console.height - _AROUND))
        table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
        for column in COLUMNS:
            table.add_column(column.name, justify="right", no_wrap=True)
        for record in self._records[-height:]:
            table.add_row(*(column.cell(record) for column in COLUMNS))
        return table

    def _bar(self) -> ConsoleRenderable:
        done, planned = self._passes
        seconds = duration(self._clock() - self._since)
        if self._state:
            return Text(f"{self._state}, {seconds}")
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=planned, completed=done, width=30)
        row.add_row("training", bar, f"{done} of {planned} forests, {seconds}")
        return row

    def _left(self) -> str:
        """How long the rest will take by the steps seen so far; empty where that cannot be told, or nothing is left."""
        first, last = self._first, self._records[-1] if self._records else None
        if self._ended or not self._updates or not first or not last or not first.step < last.step < self._updates:
            return ""
        each = (last.at - first.at) / (last.step - first.step)
        return f"{duration(each * (self._updates - last.step))} left"

    def _stands(self) -> bool:
        """Whether what was said last still stands where the bar is in a step."""
        return self._state != "" and self._state == self._said

    def _turn(self, state: str) -> None:
        """The run is at something else; "" in a step."""
        self._state, self._passes, self._since = state, (0, 0), self._clock()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def shown(console: Console, updates: int | None) -> Generator[Screen]:
    """While this is open, a run is shown on the console; `updates` is where it ends, None where that is open.

    On a terminal the last picture stays when it closes; what others print meanwhile passes above it.
    """
    screen = Screen(console, updates)
    if not console.is_terminal:
        yield screen
        return
    with Live(get_renderable=screen.picture, console=console, refresh_per_second=PICTURES_PER_SECOND):
        try:
            yield screen
        finally:
            screen.end()


def line_of(record: Record) -> str:
    """A step in one line: "step 3, reward 0.250, loss -0.0123, ...", as the table has it."""
    return ", ".join(f"{column.name} {column.cell(record)}" for column in COLUMNS)


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 10_000 else f"{number:.0f}"


def duration(seconds: float) -> str:
    """A span of time as people say it: "40 s", "12 min", "3 h 5 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
