"""What a merger shows to the benchmark, and what is shared by those that start from Python lists.

Invariant: `convert` makes everything that `merge` asks for, and `merge` can be run again on the same value, so that the
three steps can be timed apart. `rows` is not timed: it only puts a result into the form that is graded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow.parquet as pq

from benchmarks.stage.grading import Row
from benchmarks.stage.scenarios import PLAIN

Json = dict[str, Any]  # Any: a record of ids, or a peer's own values


class Contestant(Protocol):
    """One merger. The values between its steps are its own."""

    package: str
    """The published package; polar-mitm for this project's own."""
    native: str
    """What its function takes, in words."""
    note: str
    """What is run, and what a reader of the counts should know."""

    def read(self, folder: Path) -> Any:  # Any: see the class
        """A scenario's Parquet in memory."""
        ...

    def convert(self, read: Any) -> Any:  # Any: see the class
        """What `merge` takes."""
        ...

    def merge(self, native: Any) -> Any:  # Any: see the class
        """Finished training samples, as the project hands them to its trainer."""
        ...

    def rows(self, merged: Any) -> list[Row]:  # Any: see the class
        """The samples in the form that is graded."""
        ...


class Plain:
    """A merger that starts from records of Python lists."""

    def read(self, folder: Path) -> list[Json]:
        """The records of a scenario, ids and logprobs as lists."""
        return pq.read_table(folder / PLAIN).to_pylist()


def row(ids: list[int], mask: list[Any], logprobs: list[float]) -> Row:  # Any: 0/1, booleans or floats
    """Lists as a row; logprobs are float32 again, as they were stored."""
    return Row(np.array(ids, np.int32), np.array(mask, np.bool_), np.array(logprobs, np.float32))
