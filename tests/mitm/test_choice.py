"""One call of several choices, cut at stop strings, forced, scored: over a scripted engine and a real journal."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from polar_mitm.choice import finish_of
from polar_mitm.conversation import Text, ToolCall
from polar_mitm.identity import Session
from polar_mitm.journal import read_calls
from polar_mitm.record import Incoming
from polar_mitm.rows import full_prompts
from polar_mitm.tokens import Template
from polar_mitm.turn import count
from polar_mitm.wire import DIALECTS
from polar_toolkit.rollout.harnesses.scripted_engine import Fault, Script, ScriptedEngine
from tests.mitm.house import House, open_house
from tests.mitm.protocols import CHAT
from tests.mitm.wire.replies import events

Json = dict[str, Any]
LONG = "one two three four five six seven eight nine ten eleven twelve"


@contextmanager
def called(
    folder: Path, run: Path, template: Template, script: Script, **options: Any
) -> Generator[tuple[ScriptedEngine, House]]:
    """An engine and a house in front of it."""
    with ScriptedEngine(folder, script).serving() as engine, open_house(run, engine.url, template, **options) as house:
        yield engine, house


def test_the_finish_tells_the_harness_what_to_do() -> None:
    """A cut reply is `length`, whatever stands in it; a tool call is to be run."""
    call, text = ToolCall("c", "run", "{}"), Text("hi")
    assert finish_of({"type": "length"}, (call,)) == "length"
    assert finish_of({"type": "stop"}, (text, call)) == "tool_calls"
    assert finish_of({"type": "stop"}, (text,)) == finish_of(None, ()) == "stop"


# --- several choices ----------------------------------------------------------------------------------------------


def several(*texts: str) -> Script:
    """Another text for each generation, in the order in which they are asked for."""
    left = [*texts]
    return lambda _: left.pop(0)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
def test_each_choice_is_a_sample_of_its_own(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, *, stream: bool
) -> None:
    """With its own row, id and seed; the prompt is counted once, the output of all."""
    with called(qwen3_folder, tmp_path, qwen3, several("One.", "Two."), sampling='{"seed": 7}') as (engine, house):
        answer = house.post(CHAT.path, CHAT.ask("Say.", n=2, stream=stream))
    said = sorted(texts_in(answer) if stream else [c["message"]["content"] for c in answer.json()["choices"]])
    rows = house.calls()
    assert said == ["One.", "Two."]
    assert [(row["choice"], row["status"], row["client_delivered"]) for row in rows] == [
        (0, "completed", True), (1, "completed", True),
    ]  # fmt: skip
    assert len({row["call_id"] for row in rows}) == 1
    assert len({call.rid for call in engine.calls}) == len({c.sampling["sampling_seed"] for c in engine.calls}) == 2
    if not stream:
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == rows[0]["prompt_len"]
        assert usage["completion_tokens"] == sum(len(row["output_ids"]) for row in rows)


def texts_in(answer: httpx.Response) -> list[str]:
    """The text of each choice of a chat stream."""
    said: dict[int, str] = {}
    for _, value in events(answer.content):
        for choice in value["choices"] if isinstance(value, dict) else ():
            said[choice["index"]] = said.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return [*said.values()]


def test_a_later_call_continues_the_choice_that_it_repeats(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """Every choice may be gone on from."""
    with called(qwen3_folder, tmp_path, qwen3, several("One.", "Two.", "Three.")) as (engine, house):
        body = CHAT.ask("Say.", n=2)
        answer = house.post(CHAT.path, body).json()
        chosen = next(c for c in answer["choices"] if c["message"]["content"] == "Two.")
        house.post(CHAT.path, CHAT.follow(body | {"n": 1}, {"choices": [chosen]}, "Go on."))
    *choices, last = house.calls()
    (parent,) = [row for row in choices if json.loads(row["reply"])[0]["text"] == "Two."]
    assert (last["parent_call_id"], last["parent_choice"]) == (parent["call_id"], parent["choice"])
    assert np.array_equal(full_prompts(read_calls(house.run))[last["call_id"], 0], engine.calls[2].prompt_ids)


def test_when_one_choice_fails_the_call_does_and_each_is_recorded(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """The others are ended: nobody would get them."""
    with called(qwen3_folder, tmp_path, qwen3, several(LONG, LONG), wait=0.2) as (engine, house):
        engine.faults += [Fault("hold", after=4), Fault("overloaded"), *[Fault("overloaded")] * 50]
        answer = house.post(CHAT.path, CHAT.ask("Say.", n=2))
        assert answer.status_code == 503
    first, second = sorted(house.calls(), key=lambda row: -len(row["output_ids"]))
    assert (first["status"], len(first["output_ids"])) == ("aborted", 4)
    assert (second["status"], second["error_kind"]) == ("failed", "engine_unavailable")


# --- stop strings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
def test_a_stop_string_ends_the_reply_and_the_engine(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, *, stream: bool
) -> None:
    """The engine is aborted; what it sampled from the stop on is recorded as none of the answer."""
    with called(qwen3_folder, tmp_path, qwen3, [LONG]) as (engine, house):
        engine.faults.append(Fault("hold", after=8))
        answer = house.post(CHAT.path, CHAT.ask("Count.", stop=["five s"], stream=stream))
    text = "".join(texts_in(answer)) if stream else answer.json()["choices"][0]["message"]["content"]
    (row,) = house.calls()
    assert text == "one two three four"
    assert (row["status"], row["finish"], row["trainable"], row["kept_len"]) == ("completed", "stop", True, 4)
    assert row["output_ids"] == engine.calls[0].output_ids.tolist()
    assert len(row["output_ids"]) == 8
    assert engine.calls[0].disconnected
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == 4


def test_the_turn_after_a_stop_string_goes_on_from_what_was_given_out(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """The next prompt holds the kept ids and the end of the turn, and nothing of the stop."""
    with called(qwen3_folder, tmp_path, qwen3, [LONG, "Fine."]) as (engine, house):
        body = CHAT.ask("Count.", stop=["five s"])
        house.post(CHAT.path, CHAT.follow(body, house.post(CHAT.path, body).json(), "Go on."))
    first, second = house.calls()
    known = np.concatenate([engine.calls[0].prompt_ids, first["output_ids"][:4]])
    assert (second["parent_call_id"], second["prompt_shared"]) == (first["call_id"], len(known))
    assert np.array_equal(engine.calls[1].prompt_ids[: len(known)], known)
    assert engine.decode(engine.calls[1].prompt_ids[len(known) :]).startswith("<|im_end|>\n<|im_start|>user\nGo on.")


def test_a_reply_cut_inside_a_token_is_not_gone_on_from(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """No ids are exactly what the harness was given: the next turn is a render of it."""
    with called(qwen3_folder, tmp_path, qwen3, [LONG, "Fine."]) as (engine, house):
        body = CHAT.ask("Count.", stop=["ve s"])
        house.post(CHAT.path, CHAT.follow(body, house.post(CHAT.path, body).json(), "Go on."))
    first, second = house.calls()
    assert (first["history_key"], second["parent_call_id"]) == (None, None)
    assert "four fi<|im_end|>" in engine.decode(engine.calls[1].prompt_ids)


# --- forced tools -------------------------------------------------------------------------------------------------

FORCED = {"type": "function", "function": {"name": "run"}}


@pytest.mark.parametrize("choice", [FORCED, "required"], ids=["this one", "any"])
def test_a_forced_call_is_begun_in_the_prompt(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, choice: Json | str
) -> None:
    """The template's own beginning of such a call is context; the model samples the rest."""
    rest = ' {"command": "ls"}}\n</tool_call>'
    with called(qwen3_folder, tmp_path, qwen3, lambda _: rest) as (engine, house):
        answer = house.post(CHAT.path, CHAT.ask("Look.", tool_choice=choice)).json()
    (row,) = house.calls()
    assert engine.decode(engine.calls[0].prompt_ids).endswith('<tool_call>\n{"name": "run", "arguments":')
    assert CHAT.said(answer) == ("", [("run", {"command": "ls"})])
    assert qwen3.decode(row["output_ids"]) == f"{rest}<|im_end|>"
    assert (row["finish"], row["trainable"]) == ("tool_calls", True)
    assert answer["usage"]["prompt_tokens"] == row["prompt_len"] == len(engine.calls[0].prompt_ids)


def test_the_turn_after_a_forced_call_extends_it(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """The forced beginning stays where it stood."""
    replies = [' {"command": "ls"}}\n</tool_call>', "Done."]
    with called(qwen3_folder, tmp_path, qwen3, lambda _: replies.pop(0)) as (engine, house):
        body = CHAT.ask("Look.", tool_choice=FORCED)
        answer = house.post(CHAT.path, body).json()
        house.post(CHAT.path, CHAT.follow(body, answer, "a.txt") | {"tool_choice": "auto"})
    known = np.concatenate([engine.calls[0].prompt_ids, engine.calls[0].output_ids])
    assert np.array_equal(engine.calls[1].prompt_ids[: len(known)], known)


# --- what else a client may ask for -------------------------------------------------------------------------------


def test_a_client_gets_the_logprobs_of_the_visible_text(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """Token by token, with their bytes; they are the engine's."""
    with called(qwen3_folder, tmp_path, qwen3, ["<think>\nhm\n</think>\n\nnaïve 🧭."]) as (engine, house):
        answer = house.post(CHAT.path, CHAT.ask("Say.", logprobs=True)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == "naïve 🧭."
    assert [token["logprob"] for token in content] == engine.calls[0].logprobs[-len(content) - 1 : -1]


def test_reasoning_tokens_are_counted_as_they_were_sampled(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """Not by encoding their text again."""
    thought = "<think>\nhm, yes.\n</think>"
    with called(qwen3_folder, tmp_path, qwen3, [f"{thought}\n\nYes."]) as (engine, house):
        usage = house.post(CHAT.path, CHAT.ask("Say.")).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(engine.encode(thought))
    assert usage["completion_tokens"] == len(engine.calls[0].output_ids)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ('{"name": "run", "arguments": {oops}}\n</tool_call>', "malformed_tool_call"),
        ('{"name": "run", "arguments": "ls"}\n</tool_call>', "malformed_tool_call"),
        ('{"name": "run", "arguments": {"x": NaN}}\n</tool_call>', "malformed_tool_call"),
        ('{"name": "fly", "arguments": {}}\n</tool_call>', "unknown_tool"),
        ('{"name": "run", "arg', "truncated_tool_call"),
    ],
)
def test_what_is_no_call_of_an_offered_tool_is_text_and_trainable(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, call: str, fault: str
) -> None:
    """As it was sampled; the row says why."""
    with called(qwen3_folder, tmp_path, qwen3, [f"I look.\n<tool_call>\n{call}"]) as (_, house):
        answer = house.post(CHAT.path, CHAT.ask("Look.")).json()
    (row,) = house.calls()
    assert CHAT.said(answer) == (f"I look.\n<tool_call>\n{call}", [])
    assert (row["reply_faults"], row["trainable"], row["finish"]) == ([fault], True, "stop")


def test_counted_tokens_are_those_of_the_call(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """Tools, history and a forced call included; nothing is sampled and no row written."""
    with called(qwen3_folder, tmp_path, qwen3, ["Hello.", "Fine."]) as (_, house):
        body = CHAT.ask("Hi.")
        second = CHAT.follow(body, house.post(CHAT.path, body).json(), "How are you?") | {"tool_choice": FORCED}
        (dialect,) = [d for d in DIALECTS if d.name == "openai_chat"]
        incoming = Incoming(dialect, Session("default"), "h", CHAT.path, {}, json.dumps(second).encode())
        counted = house.inside(count(house.desk, incoming))
        before = len(house.calls())
        house.post(CHAT.path, second)
    assert before == 1
    assert house.calls()[-1]["prompt_len"] == counted
