"""The whole path of a call, over a scripted engine, a real journal and a gateway on loopback."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_mitm.errors import BadRequest
from polar_mitm.identity import register
from polar_mitm.journal import read_calls
from polar_mitm.rows import full_prompts, token_hash
from polar_mitm.tokens import Template
from polar_mitm.turn import parse_body
from polar_toolkit.rollout.harnesses.scripted_engine import Fault, Script, ScriptedEngine
from tests.mitm.house import Caller, Gate, House, eventually, open_house
from tests.mitm.protocols import ANTHROPIC, CHAT, PROTOCOLS, RESPONSES, Protocol

Json = dict[str, Any]
ACT = 'Let me have a look at it.\n<tool_call>\n{"name": "run", "arguments": {"command": "ls /marker"}}\n</tool_call>'
REPLIES = (ACT, "There is a.txt.", "You are welcome.")
LONG = "one two three four five six seven eight nine ten eleven twelve"
by_protocol = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: p.name)


@contextmanager
def called(
    folder: Path, run: Path, template: Template, script: Script = REPLIES, **options: Any
) -> Generator[tuple[ScriptedEngine, House]]:
    """An engine and a house in front of it."""
    with ScriptedEngine(folder, script).serving() as engine, open_house(run, engine.url, template, **options) as house:
        yield engine, house


# --- a call and its row -------------------------------------------------------------------------------------------


@by_protocol
def test_the_streamed_and_the_plain_answer_say_the_same(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, protocol: Protocol
) -> None:
    """Text and tool calls, whichever way the harness asks."""
    with called(qwen3_folder, tmp_path, qwen3) as (_, house):
        plain = house.post(protocol.path, protocol.ask("Look.")).json()
        stream = house.post(protocol.path, protocol.ask("Look.", stream=True)).content
    assert (
        protocol.said_in(stream)
        == protocol.said(plain)
        == ("Let me have a look at it.", [("run", {"command": "ls /marker"})])
    )


def test_a_finished_call_is_a_completed_row(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """Ids and logprobs are the engine's, to the bit; the answer is the one that was given."""
    with called(qwen3_folder, tmp_path, qwen3) as (engine, house):
        answer = house.post(CHAT.path, CHAT.ask("Look.", temperature=0.2), user_agent="pi/1.6.0").json()
    (row,) = house.calls()
    (call,) = engine.calls
    assert row["output_ids"] == call.output_ids.tolist()
    assert row["logprobs"] == np.array(call.logprobs, np.float32).tolist()
    assert row["prompt_suffix"] == call.prompt_ids.tolist()
    assert row["prompt_hash"] == token_hash(call.prompt_ids)
    assert json.loads(row["answer"]) == answer
    assert row["versions"] == [{"start": 0, "end": len(call.output_ids), "version": "scripted-0"}]
    assert row["began_ns"] <= row["first_token_ns"] <= row["ended_ns"]
    assert json.loads(row["sampling_asked"])["temperature"] == 0.2
    assert json.loads(row["sampling_applied"])["temperature"] == row["temperature"] == 1.0
    expected = {
        "status": "completed", "trainable": True, "untrainable_reason": None, "finish": "tool_calls", "choice": 0,
        "client_delivered": True, "root_reason": "first", "dialect": "openai_chat", "path": CHAT.path,
        "run_id": "run-1", "session_id": "default", "kind": "agent", "user_agent": "pi/1.6.0",
        "model": "some-model", "stream": False,
        "error_kind": None, "error": None, "prompt_len": len(call.prompt_ids), "prompt_shared": 0,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected


@by_protocol
def test_the_next_turn_extends_the_sampled_context(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, protocol: Protocol
) -> None:
    """The engine's second prompt begins with its first prompt and its own sampled ids, byte by byte."""
    with called(qwen3_folder, tmp_path, qwen3) as (engine, house):
        body = protocol.ask("Look.")
        answer = house.post(protocol.path, body).json()
        house.post(protocol.path, protocol.follow(body, answer, "a.txt\n"))
    first, second = house.calls()
    known = np.concatenate([engine.calls[0].prompt_ids, engine.calls[0].output_ids])
    assert np.array_equal(engine.calls[1].prompt_ids[: len(known)], known)
    assert (second["parent_call_id"], second["parent_evidence"]) == (first["call_id"], "pointer")
    assert (second["prompt_shared"], second["root_reason"]) == (len(known), None)
    assert second["prompt_suffix"] == engine.calls[1].prompt_ids[len(known) :].tolist()
    assert second["rerender_shared"] is not None


@by_protocol
def test_a_text_only_turn_is_attached_too(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, protocol: Protocol
) -> None:
    """By an echoed id: every protocol has one for a reply without calls."""
    with called(qwen3_folder, tmp_path, qwen3, ["Hello.", "Fine."]) as (_, house):
        body = protocol.ask("Hi.")
        house.post(protocol.path, protocol.follow(body, house.post(protocol.path, body).json(), "How are you?"))
    first, second = house.calls()
    assert second["parent_call_id"] == first["call_id"]
    assert second["parent_evidence"] == "pointer"


def test_a_reply_whose_ids_were_dropped_is_attached_by_its_history(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """A harness that keeps only the text of what was said."""
    with called(qwen3_folder, tmp_path, qwen3, ["Hello.", "Fine."]) as (_, house):
        body = CHAT.ask("Hi.")
        house.post(CHAT.path, body)
        said = [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "How are you?"}]
        house.post(CHAT.path, body | {"messages": body["messages"] + said})
    first, second = house.calls()
    assert (second["parent_call_id"], second["parent_evidence"]) == (first["call_id"], "history")


def test_prompts_are_whole_again_when_read(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """What is stored as parent + suffix is what the engine was sent."""
    with called(qwen3_folder, tmp_path, qwen3) as (engine, house):
        body = CHAT.ask("Look.")
        for result in ("a.txt\n", "Thanks.", "Bye."):
            body = CHAT.follow(body, house.post(CHAT.path, body).json(), result)
    table = read_calls(house.run)
    prompts = full_prompts(table)
    for row, call in zip(table.to_pylist(), engine.calls, strict=True):
        assert np.array_equal(prompts[row["call_id"], 0], call.prompt_ids)


def test_an_answer_cut_by_its_length_says_so(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """The harness's bound is applied, and a cut call is text."""
    with called(qwen3_folder, tmp_path, qwen3) as (_, house):
        answer = house.post(CHAT.path, CHAT.ask("Look.", max_tokens=5)).json()
    (row,) = house.calls()
    assert answer["choices"][0]["finish_reason"] == row["finish"] == "length"
    assert len(row["output_ids"]) == 5
    assert row["trainable"]


def test_an_answer_under_a_schema_is_not_trainable(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """The grammar is applied, and named as the reason."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    with called(qwen3_folder, tmp_path, qwen3) as (engine, house):
        house.post(CHAT.path, CHAT.ask("Look.", response_format=schema))
    (row,) = house.calls()
    assert (row["trainable"], row["untrainable_reason"]) == (False, "grammar")
    assert json.loads(engine.calls[0].sampling["json_schema"]) == {"type": "object"}


def test_a_foreign_call_is_answered_and_not_trained(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """The agent's shell may call the model with the harness's credentials."""
    with called(qwen3_folder, tmp_path, qwen3) as (_, house):
        key = f"Bearer s:{register(house.run, 's')}"
        house.post(CHAT.path, CHAT.ask("Look."), user_agent="pi/1.6.0", authorization=key)
        other = house.post(CHAT.path, CHAT.ask("Look too."), user_agent="curl/8", authorization=key)
        assert other.status_code == 200
    _, row = house.calls()
    assert (row["kind"], row["trainable"], row["untrainable_reason"]) == ("foreign", False, "foreign")


def test_a_weight_update_in_the_middle_of_a_call_is_not_seen(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """The call is gone on from what it had; its row says which weights sampled what."""

    def script(prompt: str) -> str:
        engine.version = f"v{len(engine.calls)}"
        return LONG

    with called(qwen3_folder, tmp_path, qwen3, script) as (engine, house):
        engine.faults.append(Fault("abort", after=4))
        answer = house.post(CHAT.path, CHAT.ask("Count.")).json()
    (row,) = house.calls()
    assert CHAT.said(answer) == (LONG, [])
    assert row["output_ids"] == [i for call in engine.calls for i in call.output_ids.tolist()]
    assert [(v["start"], v["version"]) for v in row["versions"]] == [(0, "v1"), (4, "v2")]
    assert row["trainable"]


# --- durable before visible ---------------------------------------------------------------------------------------


@by_protocol
def test_a_call_and_the_end_are_given_out_after_fsync(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, protocol: Protocol
) -> None:
    """Text streams; the tool call's bytes, its id and the terminal event wait for the disk."""
    gate = Gate()
    with called(qwen3_folder, tmp_path, qwen3, sink=gate.sink) as (_, house):
        gate.shut = True
        caller = Caller(house, protocol.path, protocol.ask("Look.", stream=True))
        assert caller.got(b"Let me")
        assert gate.reached.wait(10)
        assert not caller.got(b"marker", 0.3)
        assert not any(
            mark in caller.received for mark in (protocol.done, b"tool_use", b"call_", b'"finish_reason": "')
        )
        gate.open()
        assert caller.got(protocol.done)
        assert b"ls /marker" in caller.rest().replace(b"\\", b"")


def test_a_plain_answer_is_given_out_after_fsync(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """Not a byte before."""
    gate = Gate()
    with called(qwen3_folder, tmp_path, qwen3, sink=gate.sink) as (_, house):
        gate.shut = True
        caller = Caller(house, CHAT.path, CHAT.ask("Look."))
        assert gate.reached.wait(10)
        assert not caller.got(b"HTTP", 0.3)
        gate.open()
        assert b"marker" in caller.rest()


@by_protocol
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
def test_a_disk_error_ends_the_call_with_an_error(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, protocol: Protocol, *, stream: bool
) -> None:
    """The provider's own error, and neither the tool call nor a successful end."""
    gate = Gate()
    with called(qwen3_folder, tmp_path, qwen3, sink=gate.sink) as (_, house):
        gate.shut = True
        caller = Caller(house, protocol.path, protocol.ask("Look.", stream=stream))
        assert gate.reached.wait(10)
        gate.open(OSError(28, "No space left on device"))
        received = caller.rest()
    assert (protocol.failed if stream else b"HTTP/1.1 500") in received
    assert b"No space left" in received
    assert b"marker" not in received
    assert protocol.done not in received


def test_after_a_disk_error_every_call_is_an_error(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """Also one that is refused before it reaches the engine: the provider's shape, not a bare 500."""
    gate = Gate()
    with called(qwen3_folder, tmp_path, qwen3, sink=gate.sink) as (_, house):
        gate.shut = True
        gate.open(OSError(5, "Input/output error"))
        for body in (CHAT.ask("Look."), CHAT.ask("Look."), {"model": 3}):
            answer = house.post(CHAT.path, body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        garbled = house.client.post(CHAT.path, content=b"x", headers={"content-encoding": "br"})
        assert (garbled.status_code, garbled.json()["error"]["type"]) == (500, "server_error")


# --- clients that leave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
def test_a_client_that_leaves_aborts_the_engine_within_half_a_second(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, *, stream: bool
) -> None:
    """What was sampled is recorded as an aborted call that nobody received and nobody trains."""
    with called(qwen3_folder, tmp_path, qwen3, [LONG]) as (engine, house):
        engine.faults.append(Fault("hold", after=8))
        caller = Caller(house, CHAT.path, CHAT.ask("Count.", stream=stream))
        assert engine.holding.wait(10)
        assert not stream or caller.got(b" eight")
        began = time.monotonic()
        caller.leave()
        assert engine.calls[0].ended.wait(10)
        assert time.monotonic() - began < 0.5
    (row,) = house.calls()
    sampled = len(row["output_ids"])
    assert sampled == 8 or not stream
    assert row["output_ids"] == engine.calls[0].output_ids[:sampled].tolist()
    assert len(row["logprobs"]) == sampled
    expected = {"status": "aborted", "untrainable_reason": "aborted", "trainable": False, "client_delivered": False}
    assert {name: row[name] for name in expected} == expected


@pytest.mark.parametrize("again", [True, False], ids=["asked again as a stream", "asked again plainly"])
def test_a_reply_that_nobody_received_is_given_to_the_repeated_request(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, *, again: bool
) -> None:
    """The sample was finished when its client left: the next try gets it, and nothing is sampled twice."""
    gate = Gate()
    with called(qwen3_folder, tmp_path, qwen3, sink=gate.sink) as (engine, house):
        gate.shut = True
        caller = Caller(house, CHAT.path, CHAT.ask("Look.", stream=True))
        assert gate.reached.wait(10)
        caller.leave()
        house.settle()
        gate.open()
        eventually(lambda: len(house.desk.retries.undelivered) == 1)
        answer = house.post(CHAT.path, CHAT.ask("Look.", stream=again))
    said = CHAT.said_in(answer.content) if again else CHAT.said(answer.json())
    (row,) = house.calls()
    assert len(engine.calls) == 1
    assert said == ("Let me have a look at it.", [("run", {"command": "ls /marker"})])
    assert (row["status"], row["client_delivered"]) == ("completed", True)


def test_another_request_does_not_get_the_reply_that_nobody_received(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """Only the very same request is a repeat."""
    gate = Gate()
    with called(qwen3_folder, tmp_path, qwen3, sink=gate.sink) as (engine, house):
        gate.shut = True
        caller = Caller(house, CHAT.path, CHAT.ask("Look.", stream=True))
        assert gate.reached.wait(10)
        caller.leave()
        house.settle()
        gate.open()
        eventually(lambda: len(house.desk.retries.undelivered) == 1)
        house.post(CHAT.path, CHAT.ask("Look!"))
    assert len(engine.calls) == 2
    assert [row["client_delivered"] for row in house.calls()] == [False, True]


def test_two_equal_requests_at_once_are_two_samples(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """Parallel samples of one prompt are what a group is made of."""
    with called(qwen3_folder, tmp_path, qwen3) as (engine, house):
        engine.faults += [Fault("hold", after=4), Fault("hold", after=4)]
        callers = [Caller(house, CHAT.path, CHAT.ask("Look.")) for _ in range(2)]
        eventually(lambda: len(engine.calls) == 2 and all(len(c.output_ids) == 4 for c in engine.calls))
        eventually(lambda: len(engine._held) == 2)  # pyright: ignore[reportPrivateUsage] - both stand still
        engine.release()
        assert all(b"marker" in caller.rest() for caller in callers)
    assert [row["status"] for row in house.calls()] == ["completed", "completed"]


def test_headers_come_at_once_while_the_engine_is_full(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """The harness has its first bytes before the engine has taken the call, and then the answer."""
    with called(qwen3_folder, tmp_path, qwen3) as (engine, house):
        engine.faults += [Fault("overloaded")] * 4
        caller = Caller(house, CHAT.path, CHAT.ask("Look.", stream=True))
        assert caller.got(b"HTTP/1.1 200")
        assert caller.got(b"assistant")
        assert engine.calls == []
        assert b"[DONE]" in caller.rest()
    assert house.calls()[0]["status"] == "completed"


def test_closing_records_what_is_in_flight(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """SIGTERM: the call ends as an aborted row with the tokens that were sampled, and its stream with an error."""
    with called(qwen3_folder, tmp_path, qwen3, [LONG]) as (engine, house):
        engine.faults.append(Fault("hold", after=8))
        caller = Caller(house, CHAT.path, CHAT.ask("Count.", stream=True))
        assert engine.holding.wait(10)
        assert caller.got(b"one")
    received = caller.rest()
    assert b"[DONE]" not in received
    assert b"the interceptor is being stopped" in received
    (row,) = house.calls()
    assert (row["status"], len(row["output_ids"])) == ("aborted", 8)


# --- histories that changed ---------------------------------------------------------------------------------------


@by_protocol
def test_an_edited_tool_result_forks_and_the_model_sees_the_edit(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, protocol: Protocol
) -> None:
    """The echoed ids are right, one byte of the result is not: a root, rendered from what the harness says now."""
    with called(qwen3_folder, tmp_path, qwen3) as (engine, house):
        body = protocol.ask("Look.")
        second = protocol.follow(body, house.post(protocol.path, body).json(), "a.txt\n")
        third = protocol.follow(second, house.post(protocol.path, second).json(), "Thanks.")
        edited = json.loads(json.dumps(third).replace("a.txt\\n", "b.txt\\n"))
        house.post(protocol.path, edited)
    row = house.calls()[-1]
    assert (row["parent_call_id"], row["root_reason"]) == (None, "edited_history")
    prompt = engine.decode(engine.calls[-1].prompt_ids)
    assert "<tool_response>\nb.txt\n" in prompt
    assert "<tool_response>\na.txt\n" not in prompt


@by_protocol
def test_a_deleted_turn_forks_and_the_model_does_not_see_it(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, protocol: Protocol
) -> None:
    """The harness dropped its first exchange: what was sampled in its sight is not extended."""
    key = "input" if protocol is RESPONSES else "messages"
    with called(qwen3_folder, tmp_path, qwen3, ["Hello.", "Fine.", "Bye."]) as (engine, house):
        body = protocol.ask("First words.")
        second = protocol.follow(body, house.post(protocol.path, body).json(), "Second words.")
        third = protocol.follow(second, house.post(protocol.path, second).json(), "Third words.")
        first_turn = len(second[key]) - 1
        house.post(protocol.path, third | {key: third[key][first_turn:]})
    row = house.calls()[-1]
    assert row["parent_call_id"] is None
    assert row["root_reason"] == "edited_history"
    assert "First words." not in engine.decode(engine.calls[-1].prompt_ids)


def test_changed_tools_fork(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """The tools stand at the head of the prompt."""
    with called(qwen3_folder, tmp_path, qwen3) as (engine, house):
        body = ANTHROPIC.ask("Look.")
        second = ANTHROPIC.follow(body, house.post(ANTHROPIC.path, body).json(), "a.txt\n")
        house.post(ANTHROPIC.path, json.loads(json.dumps(second).replace('"runs"', '"runs anything"')))
    assert house.calls()[-1]["root_reason"] == "tools_changed"
    assert "runs anything" in engine.decode(engine.calls[-1].prompt_ids)


def test_two_requests_that_extend_one_call_are_two_branches(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """Neither takes the parent away from the other."""
    with called(qwen3_folder, tmp_path, qwen3) as (_, house):
        body = CHAT.ask("Look.")
        answer = house.post(CHAT.path, body).json()
        for result in ("a.txt\n", "b.txt\n"):
            house.post(CHAT.path, CHAT.follow(body, answer, result))
    first, *branches = house.calls()
    assert [row["parent_call_id"] for row in branches] == [first["call_id"]] * 2


@by_protocol
def test_the_turn_after_a_restart_extends_the_call_before_it(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, protocol: Protocol
) -> None:
    """The ids are signed with the run's key, and the sampled context is read back from the run folder."""
    with ScriptedEngine(qwen3_folder, REPLIES).serving() as engine:
        body = protocol.ask("Look.")
        with open_house(tmp_path, engine.url, qwen3) as house:
            answer = house.post(protocol.path, body).json()
        with open_house(tmp_path, engine.url, qwen3) as house:
            house.post(protocol.path, protocol.follow(body, answer, "a.txt\n"))
    first, second = sorted(house.calls(), key=lambda row: row["began_ns"])
    known = np.concatenate([engine.calls[0].prompt_ids, engine.calls[0].output_ids])
    assert second["parent_call_id"] == first["call_id"]
    assert np.array_equal(engine.calls[1].prompt_ids[: len(known)], known)


def test_text_that_is_no_unicode_is_no_crash(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """JSON can carry half a character: in a message it is a 400, in a name it is written as a question mark."""
    with called(qwen3_folder, tmp_path, qwen3) as (_, house):
        said = house.client.post(CHAT.path, content=json.dumps(CHAT.ask("\ud83d")))
        named = house.client.post(CHAT.path, content=json.dumps(CHAT.ask("Look.", model="\ud83d", **{"\ud83d": 1})))
    assert (said.status_code, said.json()["error"]["type"]) == (400, "invalid_request_error")
    assert named.status_code == 200
    refused, answered = house.calls()
    assert (refused["status"], answered["status"]) == ("refused", "completed")
    assert (answered["model"], answered["fidelity"]) == ("?", ["?"])


# --- pieces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b'"x"', b"null"])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    """Also one that is nested beyond the parser's depth."""
    with pytest.raises(BadRequest, match="JSON"):
        parse_body(body)
