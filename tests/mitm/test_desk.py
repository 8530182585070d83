"""What the calls of a run share: readiness, parents across a restart, replies nobody received."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_mitm.conversation import Conversation, Message, Reply, Text, history_keys, tools_key
from polar_mitm.desk import Answered, Desk, earlier_tips
from polar_mitm.engine import PROBE, Description, Sample
from polar_mitm.errors import EngineUnavailable, TokenizerMismatch
from polar_mitm.identity import Parent, Session, Tips, mint
from polar_mitm.journal import Journal
from polar_mitm.sampling import Sampling
from polar_mitm.tokens import Template

ASKED, SAID, MORE = (
    Message("user", (Text("hi"),)),
    Message("assistant", (Text("hello"),)),
    Message("user", (Text("more"),)),
)
SESSION = Session("s")


@dataclass
class Described:
    """An engine that only describes itself, after failing as often as told."""

    failures: list[Exception] = field(default_factory=list[Exception])
    mismatch: bool = False
    probes: list[Sequence[int]] = field(default_factory=list[Sequence[int]])

    async def describe(self) -> Description:
        if self.failures:
            raise self.failures.pop()
        return Description("m", 1000, "v1")

    async def check_tokenizer(self, ids: Sequence[int], vocabulary: int) -> None:
        self.probes.append(ids)
        if self.mismatch:
            raise TokenizerMismatch("not mine")

    async def generate(self, prompt: np.ndarray, sampling: dict[str, Any], rid: str) -> AsyncGenerator[Sample]:
        """Says nothing."""
        for _ in ():
            yield Sample(prompt, prompt.astype(np.float32))

    async def abort(self, rid: str) -> None:
        """Nothing to stop."""


class Memory:
    """A journal that remembers."""

    def __init__(self) -> None:
        self.finished: list[dict[str, Any]] = []

    def begin(self, row: dict[str, Any]) -> dict[str, Any]:
        return row

    async def finish(self, rows: Sequence[dict[str, Any]]) -> None:
        await asyncio.sleep(0)
        self.finished += rows


def within[T](
    run: Path, template: Template, work: Callable[[Desk], Any], engine: Described | None = None, wait: float = 0.2
) -> Any:
    """Do something with a desk, and close it."""

    async def inside() -> Any:
        desk = Desk(
            run,
            "run",
            engine=engine or Described(),
            template=template,
            journal=Memory(),
            sampling=Sampling(),
            wait=wait,
        )
        try:
            return await work(desk)
        finally:
            await desk.close()

    return asyncio.run(inside())


def test_the_engine_is_ready_once_its_tokenizer_agrees(qwen3: Template, tmp_path: Path) -> None:
    """The probe is encoded here and compared there, once."""
    engine = Described()

    async def twice(desk: Desk) -> None:
        assert await desk.ready() == await desk.ready() == Description("m", 1000, "v1")

    within(tmp_path, qwen3, twice, engine)
    assert engine.probes == [qwen3.encode(PROBE)]


def test_an_engine_that_comes_up_is_waited_for(qwen3: Template, tmp_path: Path) -> None:
    """Down twice, then there."""
    engine = Described([EngineUnavailable("down"), EngineUnavailable("down")])
    assert within(tmp_path, qwen3, Desk.ready, engine).model == "m"


def test_waiting_for_an_engine_ends(qwen3: Template, tmp_path: Path) -> None:
    """After `wait` seconds the engine's own words are raised."""
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match="down"):
        within(tmp_path, qwen3, Desk.ready, Described([EngineUnavailable("down")] * 1000))
    assert 0.2 <= time.monotonic() - began < 5


def test_another_tokenizer_is_not_waited_for(qwen3: Template, tmp_path: Path) -> None:
    """It will not change by itself."""
    engine = Described(mismatch=True)
    with pytest.raises(TokenizerMismatch):
        within(tmp_path, qwen3, Desk.ready, engine, wait=100)
    assert len(engine.probes) == 1


def test_calls_are_counted_by_session(qwen3: Template, tmp_path: Path) -> None:
    """The place of a call in its session is part of its seed."""

    async def count(desk: Desk) -> list[int]:
        return [desk.ordinal(session) for session in ("a", "b", "a", "a", "b")]

    assert within(tmp_path, qwen3, count) == [0, 0, 1, 2, 1]


def test_replies_that_nobody_received_are_bounded(qwen3: Template, tmp_path: Path) -> None:
    """The oldest of many go: their rows stay on disk."""

    async def keep(desk: Desk) -> list[bytes]:
        for index in range(1_005):
            desk.keep_undelivered(str(index).encode(), Answered(Reply("id", (), "stop"), {}))
        return list(desk.undelivered)

    kept = within(tmp_path, qwen3, keep)
    assert (len(kept), kept[0], kept[-1]) == (1000, b"5", b"1004")


def test_closing_waits_for_what_nobody_waits_for(qwen3: Template, tmp_path: Path) -> None:
    """A delivery that is being noted is written before the journal closes."""
    memory: list[Memory] = []

    async def note(desk: Desk) -> None:
        assert isinstance(desk.journal, Memory)
        memory.append(desk.journal)
        desk.note(desk.journal.finish([{"call_id": "one"}]))

    within(tmp_path, qwen3, note)
    assert memory[0].finished == [{"call_id": "one"}]


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A run folder in which an earlier process finished one call and lost another."""
    key, ids = history_keys((ASKED, SAID))[-1], np.arange(4, dtype=np.int32)
    row = {
        "session_id": "s", "call_id": "a" * 20, "prompt_shared": 0, "prompt_suffix": ids, "prompt_len": 4,
        "output_ids": ids + 10, "history_key": key, "tools_key": tools_key(()),
    }  # fmt: skip

    async def write() -> None:
        journal = Journal.open(tmp_path)
        await journal.finish([journal.begin(row) | row | {"status": "completed"}])
        journal.begin(row | {"call_id": "b" * 20})
        await journal.close()

    asyncio.run(write())
    return tmp_path


def taken_up(run: Path) -> Tips:
    """The tips of a run's earlier processes."""
    tips = Tips()
    for session_id, tip in earlier_tips(run):
        tips.add(session_id, tip)
    return tips


def test_finished_calls_of_an_earlier_process_are_parents(qwen3: Template, earlier: Path) -> None:
    """Their contexts are read from the run folder, exactly."""
    tips = taken_up(earlier)
    found = tips.find("s", Conversation("m", (ASKED, SAID, MORE)), [])
    assert isinstance(found, Parent)
    assert found.tip.prompt_ids.tolist() == [0, 1, 2, 3]
    assert found.tip.output_ids.tolist() == [10, 11, 12, 13]
    assert (found.tip.prompt_ids.dtype, found.tip.output_ids.dtype) == (np.int32, np.int32)


def test_lost_calls_of_an_earlier_process_are_no_parents(earlier: Path) -> None:
    """Nobody received their replies."""
    tips = taken_up(earlier)
    assert tips.knows("s", "a" * 20, 0)
    assert not tips.knows("s", "b" * 20, 0)


@pytest.mark.parametrize("echoed", [True, False], ids=["by an echoed id", "by the history"])
def test_a_request_that_continues_an_earlier_process_is_attached(
    qwen3: Template, earlier: Path, *, echoed: bool
) -> None:
    """The run folder is read when a request names, or may continue, a call that is not in memory."""

    async def find(desk: Desk) -> Any:
        echoes = (mint(desk.key, "s", "a" * 20),) if echoed else ()
        return await desk.find_parent(SESSION, Conversation("m", (ASKED, SAID, MORE), echoes=echoes))

    found = within(earlier, qwen3, find)
    assert isinstance(found, Parent)
    assert found.evidence == ("pointer" if echoed else "history")


def test_a_first_request_does_not_read_the_run_folder(qwen3: Template, earlier: Path) -> None:
    """Nothing in it could be continued."""

    async def find(desk: Desk) -> bool:
        assert await desk.find_parent(SESSION, Conversation("m", (ASKED,))) == "first"
        return desk.tips.knows("s", "a" * 20, 0)

    assert not within(earlier, qwen3, find)
