"""What the calls of a run share: readiness, parents across a restart, replies nobody received."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_mitm.conversation import (
    Conversation,
    Message,
    Text,
    Tool,
    history_keys,
    message_json,
    part_json,
    tools_key,
)
from polar_mitm.desk import Desk
from polar_mitm.engine import PROBE, Description, Sample
from polar_mitm.errors import BadRequest, EngineUnavailable, NotFound, TokenizerMismatch
from polar_mitm.identity import Session, load_key, mint
from polar_mitm.journal import Journal
from polar_mitm.kinds import AGENT
from polar_mitm.sampling import Sampling
from polar_mitm.tips import Parent
from polar_mitm.tokens import Template
from polar_toolkit.rollout.harnesses.scripted_engine import ScriptedEngine
from tests.mitm.house import open_house
from tests.mitm.protocols import RESPONSES

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
        self.finished += rows

    def amend(self, rows: Sequence[dict[str, Any]]) -> None:
        self.finished += rows


def within[T](
    run: Path,
    template: Template,
    work: Callable[[Desk], Any],
    engine: Described | None = None,
    wait: float = 0.2,
    memory: int = 1 << 20,
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
            memory=memory,
        )
        try:
            return await work(desk)
        finally:
            await desk.close()

    return asyncio.run(inside())


def test_quick_tokenizer_work_needs_no_other_thread_unless_the_tokenizer_is_in_use(
    qwen3: Template, tmp_path: Path
) -> None:
    """Fast tokenizers are not re-entrant: two pieces of work never overlap."""
    here, busy, go_on = threading.get_ident(), threading.Event(), threading.Event()

    def long_work() -> bool:
        busy.set()
        return go_on.wait(10)

    async def both(desk: Desk) -> None:
        assert await desk.tokens(threading.get_ident, quick=True) == here
        long = asyncio.ensure_future(desk.tokens(long_work))
        await asyncio.to_thread(busy.wait, 10)
        quick = asyncio.ensure_future(desk.tokens(threading.get_ident, quick=True))
        await asyncio.sleep(0)
        assert not quick.done()
        go_on.set()
        assert await long
        assert await quick != here

    within(tmp_path, qwen3, both)


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


# --- calls that are not in memory ---------------------------------------------------------------------------------


def row(call_id: str, *new: Message, reply: Message, history: tuple[Message, ...], **more: Any) -> dict[str, Any]:
    """A completed row of session s with four prompt tokens of its own."""
    ids = np.arange(4, dtype=np.int32)
    return {
        "session_id": "s", "call_id": call_id * 20, "choice": 0, "status": "completed", "kind": "agent",
        "prompt_shared": 0, "prompt_suffix": ids, "prompt_len": 4, "output_ids": ids + 10, "kept_len": 4,
        "history_key": history_keys((*history, *new, reply))[-1], "tools_key": tools_key(()),
        "dialect": "openai_responses", "messages": json.dumps([message_json(m) for m in new]),
        "reply": json.dumps([part_json(p) for p in reply.parts]), "answer": json.dumps({"id": call_id}),
        "tools": None, "request": "{}", "parent_call_id": None, "parent_choice": None, "thread_id": None, **more,
    }  # fmt: skip


def write(run: Path, *rows: dict[str, Any]) -> None:
    """Leave rows in a run folder as an earlier process does."""

    async def writing() -> None:
        journal = Journal.open(run)
        for each in rows:
            begun = journal.begin({k: each[k] for k in ("session_id", "call_id")})
            if each["status"] == "completed":
                await journal.finish([begun | each])
        await journal.close()

    asyncio.run(writing())


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A run folder in which an earlier process finished two calls and lost another."""
    shared = {"parent_call_id": "a" * 20, "parent_choice": 0, "prompt_shared": 8, "prompt_len": 12}
    write(
        tmp_path,
        row("a", ASKED, reply=SAID, history=()),
        row("b", ASKED, reply=SAID, history=()) | {"status": "lost"},
        row("c", MORE, reply=SAID, history=(ASKED, SAID), **shared),
    )
    return tmp_path


def response_id(run: Path, call_id: str, session_id: str = "s") -> str:
    """The id that an answer of the run has."""
    return f"resp_{mint(load_key(run), session_id, call_id * 20)}"


@pytest.mark.parametrize("echoed", [True, False], ids=["by an echoed id", "by the history"])
def test_a_request_that_continues_an_earlier_process_is_attached(
    qwen3: Template, earlier: Path, *, echoed: bool
) -> None:
    """The session is read back when a request names, or may continue, a call that is not in memory; exactly."""

    async def find(desk: Desk) -> Any:
        echoes = (response_id(earlier, "c"),) if echoed else ()
        return await desk.find_parent(SESSION, Conversation("m", (ASKED, SAID, MORE, SAID, MORE), echoes=echoes))

    found = within(earlier, qwen3, find)
    assert isinstance(found, Parent)
    assert found.evidence == ("pointer" if echoed else "history")
    assert found.tip.prompt_ids.tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 0, 1, 2, 3]
    assert found.tip.output_ids.tolist() == [10, 11, 12, 13]
    assert (found.tip.prompt_ids.dtype, found.tip.output_ids.dtype) == (np.int32, np.int32)


def test_lost_calls_of_an_earlier_process_are_no_parents(qwen3: Template, earlier: Path) -> None:
    """Nobody received their replies."""

    async def find(desk: Desk) -> list[bool]:
        await desk.find_parent(SESSION, Conversation("m", (ASKED, SAID, MORE)))
        return [desk.tips.get("s", (call_id * 20, 0)) is not None for call_id in "abc"]

    assert within(earlier, qwen3, find) == [True, False, True]


def test_a_first_request_does_not_read_the_run_folder(qwen3: Template, earlier: Path) -> None:
    """Nothing in it could be continued."""

    async def find(desk: Desk) -> object:
        assert await desk.find_parent(SESSION, Conversation("m", (ASKED,))) == "first"
        return desk.tips.get("s", ("a" * 20, 0))

    assert within(earlier, qwen3, find) is None


def test_only_the_session_that_is_meant_is_read(qwen3: Template, earlier: Path) -> None:
    """The run folder may hold thousands of others."""
    write(earlier, row("d", ASKED, reply=SAID, history=(), session_id="t"))

    async def find(desk: Desk) -> list[bool]:
        await desk.find_parent(Session("t"), Conversation("m", (ASKED, SAID, MORE)))
        return [desk.tips.get(*key) is not None for key in (("s", ("a" * 20, 0)), ("t", ("d" * 20, 0)))]

    assert within(earlier, qwen3, find) == [False, True]


def test_a_session_that_was_forgotten_is_read_again(qwen3: Template, tmp_path: Path) -> None:
    """Memory is bounded, and the next turn of a session that lay still extends what it sampled all the same."""
    old, new = (row(c, ASKED, reply=SAID, history=(), session_id=c) for c in "xy")

    async def find(desk: Desk) -> Any:
        for each in (old, new):
            desk.keep(each, {}, instructed=False)
        assert desk.tips.get("x", ("x" * 20, 0)) is None
        journal = Journal.open(tmp_path)
        await journal.finish([journal.begin({"session_id": "x", "call_id": "x" * 20}) | old])
        found = await desk.find_parent(Session("x"), Conversation("m", (ASKED, SAID, MORE)))
        await journal.close()
        return found

    assert isinstance(within(tmp_path, qwen3, find, memory=3_000), Parent)


# --- answers that a request names ---------------------------------------------------------------------------------


def continued(run: Path, template: Template, request: Conversation, *, instructed: bool = False) -> Conversation:
    return within(run, template, lambda desk: desk.continued(SESSION, request, instructed=instructed))


def test_an_earlier_answer_comes_before_the_new_messages(qwen3: Template, earlier: Path) -> None:
    """With its whole history, also after a restart; the request is then attached to it by its id."""
    named = response_id(earlier, "c")
    request = continued(earlier, qwen3, Conversation("m", (MORE,), continues=named))
    assert request.messages == (ASKED, SAID, MORE, SAID, MORE)
    assert request.echoes == (named,)


def test_the_requests_own_instructions_stay_first(qwen3: Template, earlier: Path) -> None:
    """They are not part of the earlier answer's history."""
    system = Message("system", (Text("Be brief."),))
    named = response_id(earlier, "a")
    request = continued(earlier, qwen3, Conversation("m", (system, MORE), continues=named), instructed=True)
    assert request.messages == (system, ASKED, SAID, MORE)


def test_the_earlier_instructions_do_not_carry_over(qwen3: Template, tmp_path: Path) -> None:
    """Also those that the earlier request had in common with its parent, after a restart."""
    system, parent = Message("system", (Text("Be brief."),)), {"parent_call_id": "a" * 20, "parent_choice": 0}
    write(
        tmp_path,
        row("a", system, ASKED, reply=SAID, history=(), request='{"instructions": "Be brief."}'),
        row("c", MORE, reply=SAID, history=(), request='{"$same": ["instructions"]}', **parent),
    )
    request = continued(tmp_path, qwen3, Conversation("m", (MORE,), continues=response_id(tmp_path, "c")))
    assert request.messages == (ASKED, SAID, MORE, SAID, MORE)


def test_what_the_model_is_to_go_on_with_joins_its_answer(qwen3: Template, earlier: Path) -> None:
    """Adjacent assistant messages are one message."""
    request = continued(earlier, qwen3, Conversation("m", (SAID, MORE), continues=response_id(earlier, "a")))
    assert [m.role for m in request.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize("named", ["resp_x", "unknown", "lost", "another session's"])
def test_an_unknown_answer_is_refused_in_openais_words(qwen3: Template, earlier: Path, named: str) -> None:
    """Not ours, never seen, lost in a crash, or somebody else's: all are not found."""
    ids = {
        "unknown": response_id(earlier, "z"),
        "lost": response_id(earlier, "b"),
        "another session's": response_id(earlier, "a", "t"),
    }
    with pytest.raises(BadRequest, match=r"Previous response with id 'resp_[a-z0-9]+' not found") as caught:
        continued(earlier, qwen3, Conversation("m", (MORE,), continues=ids.get(named, named)))
    assert (caught.value.field, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_an_answer_can_be_asked_for_and_deleted(qwen3: Template, earlier: Path) -> None:
    """Its plain form, until it is deleted; then it cannot be continued either."""
    named = response_id(earlier, "c")

    async def work(desk: Desk) -> None:
        assert await desk.answer(SESSION, named) == {"id": "c"}
        assert await desk.delete_answer(SESSION, named) == {"id": named, "object": "response", "deleted": True}
        for gone in (desk.answer, desk.delete_answer):
            with pytest.raises(NotFound, match="not found"):
                await gone(SESSION, named)
        with pytest.raises(BadRequest, match="not found"):
            await desk.continued(SESSION, Conversation("m", (MORE,), continues=named), instructed=False)

    within(earlier, qwen3, work)


def test_an_answer_that_nobody_gave_is_not_found(qwen3: Template, earlier: Path) -> None:
    """In OpenAI's words."""

    async def work(desk: Desk) -> None:
        with pytest.raises(NotFound, match="Response with id 'resp_x' not found"):
            await desk.answer(SESSION, "resp_x")

    within(earlier, qwen3, work)


@pytest.mark.parametrize("restart", [False, True], ids=["in memory", "after a restart"])
def test_a_request_that_names_the_answer_before_it_extends_its_context(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, *, restart: bool
) -> None:
    """Only the tool's result is sent; the prompt begins with what was sampled, byte by byte."""
    act = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
    with ScriptedEngine(qwen3_folder, [act, "There is a.txt."]).serving() as engine, ExitStack() as houses:
        house = houses.enter_context(open_house(tmp_path, engine.url, qwen3))
        body = RESPONSES.ask("Look.", instructions="Be brief.")
        answer = house.post(RESPONSES.path, body).json()
        if restart:
            houses.close()
            house = houses.enter_context(open_house(tmp_path, engine.url, qwen3))
        call = next(item for item in answer["output"] if item["type"] == "function_call")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}
        again = body | {"input": [result], "previous_response_id": answer["id"]}
        assert RESPONSES.said(house.post(RESPONSES.path, again).json())[0] == "There is a.txt."
    first, second = sorted(house.calls(), key=lambda row: row["began_ns"])
    known = np.concatenate([engine.calls[0].prompt_ids, engine.calls[0].output_ids])
    assert (second["parent_call_id"], second["parent_evidence"]) == (first["call_id"], "pointer")
    assert np.array_equal(engine.calls[1].prompt_ids[: len(known)], known)


# --- kinds that are settled later ---------------------------------------------------------------------------------


class Waiting:
    """A call that counts how often it is judged again."""

    def __init__(self) -> None:
        self.times = 0

    def reconsider(self) -> None:
        self.times += 1


def test_the_first_call_with_tools_has_the_earlier_calls_judged_again(qwen3: Template, tmp_path: Path) -> None:
    """Of its session, once; the newest four of them."""
    calls, other = [Waiting() for _ in range(6)], Waiting()

    async def work(desk: Desk) -> None:
        for call in calls:
            desk.await_evidence("s", call, 100)
        desk.await_evidence("t", other, 100)
        for _ in range(2):
            desk.judge("s", Conversation("m", (ASKED,), (Tool("run", "", "{}"),)), AGENT, None)

    within(tmp_path, qwen3, work)
    assert [call.times for call in calls] == [0, 0, 1, 1, 1, 1]
    assert other.times == 0
