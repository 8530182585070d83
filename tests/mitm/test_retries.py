"""Requests that come again: told from first tries, and given the sample of the one they repeat."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_mitm.conversation import Reply
from polar_mitm.journal import outline
from polar_mitm.retries import Answered, Asked, Retries, Take, asked
from polar_mitm.tokens import Template
from polar_toolkit.rollout.harnesses.scripted_engine import Fault, ScriptedEngine
from tests.mitm.house import Caller, House, eventually, open_house
from tests.mitm.protocols import ANTHROPIC, CHAT, RESPONSES

Json = dict[str, Any]
BODY: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100, "stream": True}
RETRY = {"x-stainless-retry-count": "1"}


def ask(body: Json | None = None, headers: dict[str, str] | None = None, **more: Any) -> Asked:
    body = (BODY if body is None else body) | more
    return asked("s", "anthropic", body, outline(body), headers or {})


# --- what makes a repeat ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"stream": False},
        {"stream_options": {"include_usage": True}},
        {"diagnostics": {"previous_message_id": "msg_1"}},
        {"client_metadata": {"turn_id": "2"}},
        {"max_tokens": 64},
        {"thinking": {"type": "enabled", "budget_tokens": 63}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_in_a_repeat_does_not_count(change: Json) -> None:
    """Claude Code 2.1.332 asks for a stream that it could not read again, in one piece and shorter."""
    assert ask(**change).digest == ask().digest


@pytest.mark.parametrize(
    "change",
    [{"messages": []}, {"model": "n"}, {"tools": []}, {"temperature": 0}],
    ids=lambda change: next(iter(change)),
)
def test_everything_else_counts(change: Json) -> None:
    """Another question is not a repeat."""
    assert ask(**change).digest != ask().digest


def test_the_billing_block_does_not_count() -> None:
    """Claude Code 2.1.332 makes it anew for each request."""

    def system(number: int) -> Json:
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
        return {"system": [billing, {"type": "text", "text": "Be brief."}]}

    assert ask(**system(1)).digest == ask(**system(2)).digest
    assert ask(**system(1)).digest != ask(system="Be brief.").digest


def test_sessions_and_protocols_do_not_share_answers() -> None:
    """Each has its own repeats."""
    marks = outline(BODY)
    digests = {asked(s, d, BODY, marks, {}).digest for s in "st" for d in ("anthropic", "openai_chat")}
    assert len(digests) == 4


@pytest.mark.parametrize(("count", "declared"), [("0", False), ("", False), ("1", True), ("2", True)])
def test_openais_sdk_declares_its_retries(count: str, *, declared: bool) -> None:
    """Qwen Code 0.24.4 and mini-swe-agent 2.4.6 are clients of it."""
    assert ask(headers={"x-stainless-retry-count": count}).declared == declared


# --- which sample a repeat is given -------------------------------------------------------------------------------


def inside(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def answered() -> Answered:
    return Answered(Reply("id", (), "stop"), [{"output_ids": np.zeros(5, np.int32), "reply": "[]", "choice": 0}])


class Sampling:
    """Takes of one request, begun, left and ended by hand."""

    def __init__(self) -> None:
        self.retries: Retries[str] = Retries()

    def begin(self, by: Asked | None = None) -> tuple[Take[str], asyncio.Queue[str | None]]:
        take: Take[str] = Take(by or ask(), "id")
        take.task = asyncio.get_running_loop().create_future()  # pyright: ignore[reportAttributeAccessIssue] - ended by hand
        listener: asyncio.Queue[str | None] = asyncio.Queue()
        take.join(listener)
        self.retries.run(take)
        return take, listener

    def deliver(self, by: Asked | None = None) -> Take[str]:
        take, listener = self.begin(by)
        self.retries.stop(take)
        take.leave(listener)
        self.retries.delivered(take, answered())
        return take


def test_parallel_equal_requests_are_samples() -> None:
    """Nothing says that the second is the first once more."""

    async def work() -> None:
        sampling = Sampling()
        sampling.begin()
        assert sampling.retries.find(ask()) is None

    inside(work)


@pytest.mark.parametrize("again", [ask(headers=RETRY), ask(stream=False)], ids=["counted", "in one piece"])
def test_a_declared_retry_takes_over_the_running_call(again: Asked) -> None:
    """Its connection may still look open."""

    async def work() -> None:
        sampling = Sampling()
        take, _ = sampling.begin()
        assert sampling.retries.find(again) is take
        assert take.repeats == 1

    inside(work)


def test_of_several_running_calls_a_retry_is_of_none() -> None:
    """Which of the parallel samples it would be cannot be told: two of a group must not be one."""

    async def work() -> None:
        sampling = Sampling()
        for _ in range(2):
            sampling.begin()
        assert sampling.retries.find(ask(headers=RETRY)) is None

    inside(work)


def test_a_repeat_takes_over_the_call_that_nobody_listens_to() -> None:
    """Sampled, and being written down: its connection is closed, so the repeat is its client's."""

    async def work() -> None:
        sampling = Sampling()
        sampling.begin()
        take, listener = sampling.begin()
        assert take.leave(listener)
        assert sampling.retries.find(ask()) is take

    inside(work)


def test_a_call_that_is_being_ended_is_not_taken_over() -> None:
    """Its client left, the engine is aborted: the repeat is sampled anew."""

    async def work() -> None:
        sampling = Sampling()
        take, listener = sampling.begin()
        take.leave(listener)
        sampling.retries.failed(take)
        assert sampling.retries.find(ask(headers=RETRY)) is None

    inside(work)


def test_a_reply_that_nobody_received_is_given_once() -> None:
    """To any repeat; the next one is a sample."""

    async def work() -> None:
        sampling = Sampling()
        take, listener = sampling.begin()
        take.leave(listener)
        sampling.retries.stop(take)
        sampling.retries.missed(take, answered())
        assert sampling.retries.find(ask()) is take
        assert sampling.retries.find(ask()) is None

    inside(work)


def test_a_delivered_reply_is_given_to_a_declared_retry_only() -> None:
    """The client says that it did not get it; a plain second request is a second sample."""

    async def work() -> None:
        sampling = Sampling()
        take = sampling.deliver()
        assert sampling.retries.find(ask()) is None
        assert [sampling.retries.find(ask(headers=RETRY)) for _ in range(2)] == [take, take]

    inside(work)


def test_a_delivered_stream_is_given_in_one_piece_once() -> None:
    """Claude Code 2.1.332 falls back so; the same plain request after it is a sample of its own."""

    async def work() -> None:
        sampling = Sampling()
        take = sampling.deliver()
        assert sampling.retries.find(ask(stream=False, max_tokens=64)) is take
        assert sampling.retries.find(ask(stream=False, max_tokens=64)) is None

    inside(work)


@pytest.mark.parametrize("again", [ask(stream=False, max_tokens=200), ask(headers=RETRY, max_tokens=64)])
def test_a_request_for_another_length_is_no_repeat(again: Asked) -> None:
    """Only the fallback asks for less, and none for more."""

    async def work() -> None:
        sampling = Sampling()
        sampling.deliver()
        assert sampling.retries.find(again) is None

    inside(work)


def test_of_several_delivered_replies_a_retry_is_of_none() -> None:
    """Samples of one prompt, one after the other: a retry of one must not get another's."""

    async def work() -> None:
        sampling = Sampling()
        for _ in range(2):
            sampling.deliver()
        assert sampling.retries.find(ask(headers=RETRY)) is None

    inside(work)


def test_the_retry_of_a_failed_call_does_not_get_an_earlier_sample() -> None:
    """The same prompt was answered before; what is asked again is the call that failed."""

    async def work() -> None:
        sampling = Sampling()
        sampling.deliver()
        take, _ = sampling.begin()
        sampling.retries.failed(take)
        assert sampling.retries.find(ask(headers=RETRY)) is None

    inside(work)


def test_who_joins_late_hears_all_of_it() -> None:
    """The encoder of the second connection begins at the beginning."""

    async def work() -> None:
        take, first = Sampling().begin()
        take.tell("one")
        second: asyncio.Queue[str | None] = asyncio.Queue()
        take.join(second)
        take.tell("two")
        assert [[queue.get_nowait() for _ in range(2)] for queue in (first, second)] == [["one", "two"]] * 2
        assert (take.leave(first), take.leave(first), take.leave(second)) == (False, False, True)

    inside(work)


def test_finished_replies_are_bounded() -> None:
    """The oldest go: their rows stay on disk."""

    async def work() -> None:
        retries: Retries[str] = Retries(max_bytes=20 * answered().size)
        for number in range(100):
            retries.missed(Take(ask(model=str(number)), "id"), answered())
        assert len(retries.undelivered) == 10
        assert retries.find(ask(model="99")) is not None
        assert retries.find(ask(model="0")) is None

    inside(work)


# --- over a gateway and an engine ---------------------------------------------------------------------------------

LONG = "one two three four five six seven eight nine ten eleven twelve"


@contextmanager
def held(folder: Path, run: Path, template: Template) -> Generator[tuple[ScriptedEngine, House]]:
    """A house before an engine that stands still in the middle of its first reply."""
    with ScriptedEngine(folder, [LONG]).serving() as engine, open_house(run, engine.url, template) as house:
        engine.faults.append(Fault("hold", after=4))
        yield engine, house


def test_a_declared_retry_beside_its_open_connection_is_no_second_sample(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """It hears the running reply from its first word; the earlier client then leaves, and nothing is aborted."""
    with held(qwen3_folder, tmp_path, qwen3) as (engine, house):
        first = Caller(house, CHAT.path, CHAT.ask("Count.", stream=True))
        assert first.got(b"four")
        again = Caller(house, CHAT.path, CHAT.ask("Count.", stream=True), {"x-stainless-retry-count": "1"})
        assert again.got(b"four")
        first.leave()
        house.settle()
        engine.release()
        received = again.rest()
        assert all(word in received for word in (*LONG.encode().split(), CHAT.done))
        assert len(engine.calls) == 1
        eventually(lambda: house.calls()[0]["client_delivered"])
    (row,) = house.calls()
    assert (row["status"], row["repeats"], row["trainable"]) == ("completed", 1, True)


def test_a_retry_that_leaves_too_aborts_the_engine(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """Nobody is left who waits for the reply: within half a second."""
    with held(qwen3_folder, tmp_path, qwen3) as (engine, house):
        first = Caller(house, CHAT.path, CHAT.ask("Count.", stream=True))
        assert first.got(b"four")
        again = Caller(house, CHAT.path, CHAT.ask("Count.", stream=True), {"x-stainless-retry-count": "1"})
        assert again.got(b"four")
        first.leave()
        house.settle()
        assert not engine.calls[0].ended.is_set()
        began = time.monotonic()
        again.leave()
        assert engine.calls[0].ended.wait(10)
        assert time.monotonic() - began < 0.5
    (row,) = house.calls()
    assert (row["status"], row["client_delivered"]) == ("aborted", False)


def test_a_stream_that_is_asked_for_in_one_piece_is_the_same_sample(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """Claude Code 2.1.332 re-asks without `stream` and for less; the tool call that it gets is the one it had."""
    act = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
    with (
        ScriptedEngine(qwen3_folder, [act, "Another."]).serving() as engine,
        open_house(tmp_path, engine.url, qwen3) as house,
    ):
        streamed = house.post(ANTHROPIC.path, ANTHROPIC.ask("Look.", stream=True)).content
        plain = house.post(ANTHROPIC.path, ANTHROPIC.ask("Look.", max_tokens=640)).json()
        assert len(engine.calls) == 1
        assert json.dumps(plain["content"][-1]["id"]).encode() in streamed
        house.post(ANTHROPIC.path, ANTHROPIC.ask("Look.", max_tokens=640))
        assert len(engine.calls) == 2
    first, _ = house.calls()
    assert first["repeats"] == 1


def test_a_cut_reply_whose_reasoning_came_back_is_sampled_from_the_same_prompt(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """Codex 0.171.0 keeps the reasoning item that was finished before a cut and posts again, then goes on from there.

    The call that was cut is nobody's parent, and the turn after the retry extends the retry.
    """
    think = f"<think>\nI count.\n</think>\n\n{LONG}"
    with (
        ScriptedEngine(qwen3_folder, [think, think, "Done."]).serving() as engine,
        open_house(tmp_path, engine.url, qwen3) as house,
    ):
        engine.faults.append(Fault("hold", after=12))
        body = RESPONSES.ask("Count.", stream=True)
        caller = Caller(house, RESPONSES.path, body)
        assert caller.got(b"two")
        caller.leave()
        assert engine.calls[0].ended.wait(10)
        events = [json.loads(line[6:]) for line in caller.received.split(b"\n") if line.startswith(b"data: ")]
        kept = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [item["type"] for item in kept] == ["reasoning"]
        again = RESPONSES.ask("Count.") | {"input": [*body["input"], *kept]}
        answer = house.post(RESPONSES.path, again).json()
        house.post(RESPONSES.path, RESPONSES.follow(again, answer, "Go on."))
    cut, retry, after = house.calls()
    assert (cut["status"], retry["root_reason"], retry["prompt_hash"]) == ("aborted", "first", cut["prompt_hash"])
    assert "reasoning of a reply cut off" in retry["fidelity"]
    assert after["parent_call_id"] == retry["call_id"]
