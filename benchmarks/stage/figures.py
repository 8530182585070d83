"""What a benchmark prints: figures with their limits, one after the other as they are measured, then as a table.

Invariant: a figure that misses its limit is printed as missed; nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    name: str
    value: float
    limit: float | None
    """None where the figure is only reported."""
    unit: str
    peer: str = ""
    """What it was measured against, with its figure."""
    least: bool = False
    """Whether the limit is a lower one."""

    @property
    def bound(self) -> str:
        """The limit as a person reads it."""
        return "" if self.limit is None else f"{'>=' if self.least else '<='} {self.limit:g}"

    @property
    def verdict(self) -> str:
        """Whether the limit holds."""
        if self.limit is None:
            return ""
        return "met" if (self.value >= self.limit if self.least else self.value <= self.limit) else "[red]missed"


Measure = Callable[[], Iterator[Figure]]


def show(title: str, measures: Iterable[tuple[str, Measure]], console: Console) -> None:
    """Take the measures, each with what it is in words, and print their figures."""
    table = Table("measure", "value", "limit", "measured against", "", title=title)
    for words, measure in measures:
        with console.status(words):
            for figure in measure():
                value = f"{figure.value:.2f} {figure.unit}"
                table.add_row(figure.name, value, figure.bound, figure.peer, figure.verdict)
                console.print(f"{figure.name}: {value} {figure.bound}", figure.verdict)
    console.print(table)
