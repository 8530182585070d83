"""Counts what is written, and keeps the last rows for whoever looks on: a journal before the journal.

Invariant: it changes no row and holds back none; the figures are those of this process, a restart begins at zero.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from polar_mitm.desk import Recorder
from polar_mitm.record import Row

_KEPT_ROWS = 500


class Tally:
    """A Recorder that counts."""

    def __init__(self, journal: Recorder, *, keeps_rows: bool) -> None:
        self._journal, self._keeps_rows = journal, keeps_rows
        self._open: set[tuple[str, int]] = set()
        self._rows: OrderedDict[tuple[str, int], Row] = OrderedDict()
        self._sessions: set[str] = set()
        self._ended: dict[str, int] = {}
        self._sampled = self._trainable = 0

    def begin(self, row: Row) -> Row:
        """As the journal's."""
        stamped = self._journal.begin(row)
        self._open.add(_key(stamped))
        self._sessions.add(str(stamped.get("session_id")))
        return stamped

    async def finish(self, rows: Sequence[Row]) -> None:
        """As the journal's."""
        await self._journal.finish(rows)
        for row in rows:
            self._count(row)
        self._keep(rows)

    def amend(self, rows: Sequence[Row]) -> None:
        """As the journal's."""
        self._journal.amend(rows)
        self._keep(rows)

    def row(self, call_id: str, choice: int = 0) -> Row | None:
        """The finished row of a call, if it is among the last."""
        return self._rows.get((call_id, choice))

    def figures(self) -> dict[str, int]:
        """Calls by how they ended, sessions, tokens sampled, and of these the trainable ones."""
        return {
            "calls": len(self._open) + sum(self._ended.values()),
            "running": len(self._open),
            **dict(sorted(self._ended.items())),
            "sessions": len(self._sessions),
            "sampled tokens": self._sampled,
            "trainable tokens": self._trainable,
        }

    def _keep(self, rows: Sequence[Row]) -> None:
        self._rows |= {_key(row): row for row in rows if self._keeps_rows}
        while len(self._rows) > _KEPT_ROWS:
            self._rows.popitem(last=False)

    def _count(self, row: Row) -> None:
        self._open.discard(_key(row))
        self._ended[str(row["status"])] = self._ended.get(str(row["status"]), 0) + 1
        sampled = len(row.get("output_ids", ()))
        self._sampled += sampled
        self._trainable += sampled if row.get("trainable") else 0


def _key(row: Row) -> tuple[str, int]:
    return str(row["call_id"]), int(row["choice"])
