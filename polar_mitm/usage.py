"""What each session has used, counted as it is written, and whether it may call again.

Invariant: a session that has used its turns or its tokens, or is sealed, gets no further sample, also after a restart:
what an earlier process wrote is counted from the run folder. It changes no row and holds back none. Calls of a session
that run at the same time may each use what was left when they began.

A turn is a completed call of the agent, of its sub-agents (else an agent could go on by delegating), or of another
program with the session's credentials (else its shell could). Titles, routers and compactions are no turns: the
harness makes them, not the model, and how many there are differs from harness to harness. What is sampled for them
counts as tokens, for it costs the engine the same. A repeat that is given an earlier sample is not a call of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from polar_mitm.errors import BudgetUsed
from polar_mitm.identity import Kind, Session
from polar_mitm.journal import row_groups
from polar_mitm.rows import SCHEMA

_TURNS: tuple[Kind, ...] = ("agent", "subagent", "foreign")
_COLUMNS = ("session_id", "call_id", "choice", "status", "kind", "output_ids")
_UNCERTAIN = 16
"""Of so many of a session's last turns the kind may still change: more than `desk` has judged again."""
_SLOW_SECONDS = 2.0
_UNKNOWN = -1.0
Key = tuple[str, int]


class Recorder(Protocol):
    """What a turn needs of the journal."""

    def begin(self, row: dict[str, Any]) -> dict[str, Any]:  # Any: a row
        """Leave a trace of a call before the engine is called; returns the stamped row."""
        ...

    async def finish(self, rows: Sequence[dict[str, Any]]) -> None:  # Any: rows
        """Return once the rows are durable. Raises JournalError."""
        ...

    def amend(self, rows: Sequence[dict[str, Any]]) -> None:  # Any: rows
        """Take finished rows again, with what is known by now; nobody waits for it. Raises JournalError."""
        ...


@dataclass(slots=True)
class Used:
    """What one session, or a whole run, has used."""

    calls: int = 0
    """Completed ones."""
    running: int = 0
    sampled: int = 0
    """Tokens, also those of calls that were cut short."""
    refused: int = 0
    turns: int = 0
    last_turns: deque[str] = field(default_factory=lambda: deque[str](maxlen=_UNCERTAIN), compare=False, repr=False)
    """Ids of the last calls that were counted as turns."""


class Usage:
    """A Recorder that counts for each session."""

    def __init__(
        self, journal: Recorder, earlier: Mapping[str, Used] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`earlier`: what is in the run folder already (`earlier_usage`)."""
        self._journal, self._now = journal, now
        self._sessions = dict(earlier or {})
        self.total = Used()
        """Of the run, without its turns."""
        for used in self._sessions.values():
            self.total.calls += used.calls
            self.total.sampled += used.sampled
            self.total.refused += used.refused
        self._open: dict[Key, float | None] = {}
        """Choices that are not finished, with the time since which they have waited for their first token."""

    def begin(self, row: dict[str, Any]) -> dict[str, Any]:  # Any: a row
        """As the journal's."""
        stamped = self._journal.begin(row)
        self._open[_key(stamped)] = self._now()
        for used in self._counted(stamped):
            used.running += stamped["choice"] == 0
        return stamped

    def speaks(self, row: Mapping[str, Any]) -> None:  # Any: a row
        """The first token of a choice has come."""
        self._open[_key(row)] = None

    async def finish(self, rows: Sequence[dict[str, Any]]) -> None:  # Any: rows
        """As the journal's."""
        try:
            await self._journal.finish(rows)
        finally:  # what cannot be written was sampled all the same
            for row in rows:
                if (
                    self._open.pop(_key(row), _UNKNOWN) != _UNKNOWN
                ):  # else it is counted: a broken journal is told twice
                    for used in self._counted(row):
                        used.running -= row["choice"] == 0
                        _count(used, row, len(row.get("output_ids", ())))

    def amend(self, rows: Sequence[dict[str, Any]]) -> None:  # Any: rows
        """As the journal's; a call whose kind was judged again may be no turn."""
        self._journal.amend(rows)
        for row in rows:
            used = self._sessions.get(str(row["session_id"]))
            if used and row.get("kind") not in _TURNS and row["call_id"] in used.last_turns:
                used.last_turns.remove(row["call_id"])
                used.turns -= 1

    def left(self, session: Session) -> int | None:
        """How many tokens may be sampled for the session's next call; None for as many as fit. Raises BudgetUsed."""
        used = self._sessions.get(session.session_id, Used())
        if session.turns is not None and used.turns >= session.turns:
            raise BudgetUsed(f"session {session.session_id!r} has used its {session.turns} turns")
        if session.tokens is None:
            return None
        if used.sampled >= session.tokens:
            raise BudgetUsed(f"session {session.session_id!r} has used its {session.tokens} tokens")
        return session.tokens - used.sampled

    def of(self, session_id: str) -> Used:
        """What a session has used."""
        return self._sessions.get(session_id, Used())

    @property
    def waiting(self) -> int:
        """Choices that have waited for their first token for more than two seconds."""
        latest = self._now() - _SLOW_SECONDS
        return sum(since is not None and since < latest for since in self._open.values())

    def _counted(self, row: Mapping[str, Any]) -> tuple[Used, Used]:  # Any: a row
        return self.total, self._sessions.setdefault(str(row["session_id"]), Used())


def earlier_usage(run: Path) -> dict[str, Used]:
    """What the sealed calls of a run used, each counted by its last row. Raises UnreadableRun."""
    table = _sealed(run)
    last = table.group_by(["call_id", "choice"]).aggregate([("at", "max")])["at_max"]
    sessions: dict[str, Used] = {}
    for row in table.take(last).to_pylist():
        _count(sessions.setdefault(row["session_id"], Used()), row, row["sampled"])
    return sessions


def _sealed(run: Path) -> pa.Table:
    """The sealed rows in the order in which they were written; `sampled` are the lengths of their outputs."""
    parts = [SCHEMA.empty_table().select(_COLUMNS)]
    for path in sorted((run / "calls").glob("*.parquet")):
        parts += [table for table, _ in row_groups(path, _COLUMNS)]
    tables = [
        table.drop_columns("output_ids").append_column("sampled", lengths.value_lengths().fill_null(0))
        for table in parts
        for lengths in [table["output_ids"].combine_chunks()]
    ]
    table = pa.concat_tables(tables)
    return table.append_column("at", pa.array(range(len(table)), pa.int64()))


def _count(used: Used, row: Mapping[str, Any], sampled: int) -> None:  # Any: a row
    used.sampled += sampled
    used.refused += row["status"] == "refused"
    if row["choice"] != 0:
        return
    used.calls += row["status"] == "completed"
    if row["status"] == "completed" and row.get("kind") in _TURNS:
        used.turns += 1
        used.last_turns.append(row["call_id"])


def _key(row: Mapping[str, Any]) -> Key:  # Any: a row
    return str(row["call_id"]), int(row["choice"])
