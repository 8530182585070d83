"""Budgets: what counts as a turn, what is left, and that nothing is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_mitm.errors import BudgetUsed, JournalError
from polar_mitm.identity import Session
from polar_mitm.journal import Journal
from polar_mitm.usage import Usage, Used, earlier_usage

Row = dict[str, Any]
TWO_TURNS = Session("s", turns=2)


class Memory:
    """A journal that forgets, and may be broken."""

    def __init__(self, *, broken: bool = False) -> None:
        self._broken = broken

    def begin(self, row: Row) -> Row:
        return {"choice": 0, "session_id": "s", "kind": "agent"} | row

    async def finish(self, rows: Sequence[Row]) -> None:
        if self._broken:
            raise JournalError("the disk is full")

    def amend(self, rows: Sequence[Row]) -> None:
        pass


def made(usage: Usage, call_id: str, sampled: int = 3, *, choice: int = 0, **columns: Any) -> Row:
    """The row of a call that began and ended."""
    row = usage.begin({"call_id": call_id, "choice": choice}) | {"status": "completed", "output_ids": [0] * sampled}
    asyncio.run(usage.finish([row | columns]))
    return row | columns


def test_a_session_without_a_budget_samples_what_fits() -> None:
    """None is no bound."""
    usage = Usage(Memory())
    made(usage, "a")
    assert usage.left(Session("s")) is None


def test_turns_are_used_up() -> None:
    """The third call of two is refused, and the sentence says so."""
    usage = Usage(Memory())
    made(usage, "a")
    assert usage.left(TWO_TURNS) is None
    made(usage, "b")
    with pytest.raises(BudgetUsed, match="'s' has used its 2 turns"):
        usage.left(TWO_TURNS)


@pytest.mark.parametrize(
    ("kind", "turns"), [("agent", 1), ("subagent", 1), ("foreign", 1), ("auxiliary", 0), ("compaction", 0)]
)
def test_a_turn_is_what_the_model_does(kind: str, turns: int) -> None:
    """Not what its harness does for itself: how many titles there are is no matter of the model's."""
    usage = Usage(Memory())
    made(usage, "a", kind=kind)
    assert (usage.of("s").turns, usage.of("s").calls, usage.of("s").sampled) == (turns, 1, 3)


@pytest.mark.parametrize("status", ["aborted", "failed", "refused"])
def test_a_call_that_was_not_answered_is_no_turn(status: str) -> None:
    """But its tokens were sampled."""
    usage = Usage(Memory())
    made(usage, "a", status=status)
    assert (usage.of("s").turns, usage.of("s").calls, usage.of("s").sampled) == (0, 0, 3)


def test_several_choices_are_one_turn() -> None:
    """Of each, the tokens count."""
    usage = Usage(Memory())
    made(usage, "a")
    made(usage, "a", choice=1)
    assert (usage.of("s").turns, usage.of("s").sampled) == (1, 6)


def test_a_call_that_turns_out_to_be_no_turn_is_given_back() -> None:
    """A title that came before the first call with tools; taken back once, however often it is amended."""
    usage = Usage(Memory())
    row = made(usage, "a")
    usage.amend([row | {"client_delivered": True}])
    assert usage.of("s").turns == 1
    for _ in range(2):
        usage.amend([row | {"kind": "auxiliary"}])
    assert usage.of("s").turns == 0


def test_tokens_are_used_up() -> None:
    """What is left is what the next call may sample."""
    usage, session = Usage(Memory()), Session("s", tokens=5)
    made(usage, "a")
    assert usage.left(session) == 2
    made(usage, "b", 2)
    with pytest.raises(BudgetUsed, match="5 tokens"):
        usage.left(session)


def test_a_budget_of_nothing_allows_nothing() -> None:
    """Zero is a budget."""
    with pytest.raises(BudgetUsed):
        Usage(Memory()).left(Session("s", turns=0))


def test_a_call_that_cannot_be_written_is_counted_once() -> None:
    """The journal is told twice, first of the reply and then of the failure."""
    usage = Usage(Memory(broken=True))
    row = usage.begin({"call_id": "a"}) | {"status": "completed", "output_ids": [0]}
    for _ in range(2):
        with pytest.raises(JournalError):
            asyncio.run(usage.finish([row]))
    assert usage.of("s") == Used(calls=1, sampled=1, turns=1)


def test_a_call_waits_until_its_first_token() -> None:
    """Two seconds of patience; what has spoken or ended waits no more."""
    now = 0.0
    usage = Usage(Memory(), now=lambda: now)
    first, second = usage.begin({"call_id": "a"}), usage.begin({"call_id": "b"})
    assert (usage.waiting, usage.total.running) == (0, 2)
    now = 2.5
    assert usage.waiting == 2
    usage.speaks(first)
    assert usage.waiting == 1
    asyncio.run(usage.finish([second | {"status": "aborted"}]))
    assert (usage.waiting, usage.total.running, usage.of("s").running) == (0, 1, 1)


def test_what_an_earlier_process_wrote_is_counted(tmp_path: Path) -> None:
    """Each call by its last row, so that the later process says what this one said."""
    journal = Journal.open(tmp_path)
    usage = Usage(journal)
    for call_id, kind, status in (
        ("a", "agent", "completed"),
        ("b", "auxiliary", "completed"),
        ("c", "agent", "refused"),
    ):
        begun = usage.begin({"call_id": call_id, "choice": 0, "session_id": "s", "kind": kind})
        ids = {"output_ids": np.zeros(0 if status == "refused" else 4, np.int32)}
        asyncio.run(usage.finish([begun | {"status": status} | ids]))
        usage.amend([begun | {"status": status, "client_delivered": True} | ids])
    journal.close_sync()
    assert earlier_usage(tmp_path) == {"s": usage.of("s")} == {"s": Used(calls=2, sampled=8, refused=1, turns=1)}
    assert Usage(Memory(), earlier_usage(tmp_path)).total == Used(calls=2, sampled=8, refused=1)


def test_a_new_run_has_used_nothing(tmp_path: Path) -> None:
    """Without a folder of calls."""
    assert earlier_usage(tmp_path) == {}
