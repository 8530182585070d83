"""The tally: figures that are right, and rows that can be looked up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from polar_mitm.tally import Tally

Row = dict[str, Any]


class Memory:
    """A journal in memory."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def begin(self, row: Row) -> Row:
        return {"choice": 0, **row}

    async def finish(self, rows: Sequence[Row]) -> None:
        self.rows += rows

    def amend(self, rows: Sequence[Row]) -> None:
        self.rows += rows


def ended(tally: Tally, call_id: str, **columns: Any) -> Row:
    """The row of a call that began and finished."""
    row = tally.begin({"call_id": call_id, "session_id": "s"}) | {"status": "completed"} | columns
    asyncio.run(tally.finish([row]))
    return row


def test_calls_sessions_and_tokens_are_counted() -> None:
    """By how the calls ended, and by whether their tokens may be trained."""
    tally = Tally(Memory(), keeps_rows=False)
    ended(tally, "a", output_ids=[1, 2, 3], trainable=True)
    ended(tally, "b", output_ids=[1], trainable=False)
    ended(tally, "c", status="refused")
    tally.begin({"call_id": "d", "session_id": "t"})
    assert tally.figures() == {
        "calls": 4, "running": 1, "completed": 2, "refused": 1, "sessions": 2, "sampled tokens": 4,
        "trainable tokens": 3,
    }  # fmt: skip


def test_a_row_that_is_amended_counts_once() -> None:
    """It was delivered meanwhile; whoever looks sees the later row."""
    tally = Tally(Memory(), keeps_rows=True)
    row = ended(tally, "a", output_ids=[1, 2], trainable=True)
    tally.amend([row | {"client_delivered": True}])
    assert tally.figures()["sampled tokens"] == 2
    assert tally.row("a") == row | {"client_delivered": True}


def test_every_row_reaches_the_journal_unchanged() -> None:
    """It only looks."""
    memory = Memory()
    row = ended(Tally(memory, keeps_rows=True), "a")
    assert memory.rows == [row]


def test_rows_are_kept_only_when_somebody_may_look() -> None:
    """mitmdump shows nothing."""
    looked, unseen = Tally(Memory(), keeps_rows=True), Tally(Memory(), keeps_rows=False)
    ended(looked, "a")
    ended(unseen, "a")
    assert (looked.row("a") is not None, unseen.row("a"), looked.row("b")) == (True, None, None)


def test_only_the_last_rows_are_kept() -> None:
    """Memory is bounded."""
    tally = Tally(Memory(), keeps_rows=True)
    for number in range(501):
        ended(tally, str(number))
    assert tally.row("0") is None
    assert tally.row("500") is not None
