"""Cases that separate a faithful recorder from a plausible one, on the live path, with the right values written out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_mitm.rows import full_prompts
from polar_mitm.tokens import Template
from polar_toolkit import calls, trajectories
from polar_toolkit.rollout.harnesses.scripted_engine import Fault
from polar_toolkit.tree import grow
from tests.mitm.house import Caller, eventually
from tests.mitm.protocols import ANTHROPIC, CHAT, EVERY, GEMINI, RESPONSES, Protocol
from tests.mitm.test_turn import called

Json = dict[str, Any]  # Any: bodies
CALL = '{"name": "run",  "arguments": {"command":   "ls", "n": 1}}'
ACT = f"<think>\nLook.\n</think>\n\n  I look. \n\n<tool_call>\n{CALL}\n</tool_call>"
REPLIES = (ACT, "There is a.txt.", "Done.")
REMINDER = "<system-reminder>\nToday is Monday.\n</system-reminder>"


# --- what a harness spells anew stays exact -----------------------------------------------------------------------


def respelled(body: Json) -> Json:
    """Arguments with their keys in another order and other white space."""
    given = json.loads(json.dumps(body))
    (call,) = given["messages"][1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"command": "ls", "n": 1}
    call["function"]["arguments"] = '{ "n": 1,\n"command": "ls" }'
    return given


def trimmed(body: Json) -> Json:
    """The reply's text without the white space at its ends, and without its reasoning."""
    kept = [{k: v for k, v in m.items() if "reasoning" not in k} for m in body["messages"]]
    return body | {"messages": [m | {"content": m["content"].strip()} for m in kept]}


def renamed(body: Json) -> Json:
    """Call ids of the harness's own; the reasoning still names the call."""
    return json.loads(re.sub(r"call_[a-z2-7]{20}[0-9a-f]{2}[a-z2-7]{8,10}", "toolu_1", json.dumps(body)))


def everything(body: Json) -> Json:
    """All of it at once."""
    return renamed(trimmed(respelled(body)))


@pytest.mark.parametrize(
    ("change", "evidence"),
    [(respelled, "pointer"), (trimmed, "pointer"), (renamed, "pointer"), (everything, "history")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_reply_that_is_spelled_anew_is_still_the_sampled_one(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, change: Callable[[Json], Json], evidence: str
) -> None:
    """Key order, white space, dropped reasoning, rewritten ids: one exact edge, and the original ids in the prompt."""
    with called(qwen3_folder, tmp_path, qwen3, REPLIES) as (engine, house):
        body = CHAT.ask("Look.")
        house.post(CHAT.path, change(CHAT.follow(body, house.post(CHAT.path, body).json(), "a.txt\n")))
    first, second = house.calls()
    assert (second["parent_call_id"], second["parent_evidence"]) == (first["call_id"], evidence)
    tip = np.concatenate([engine.calls[0].prompt_ids, engine.calls[0].output_ids])
    assert np.array_equal(engine.calls[1].prompt_ids[: len(tip)], tip)


# --- reminders ----------------------------------------------------------------------------------------------------


def test_a_reminder_inside_a_tool_loop_goes_on_exactly(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """It comes after the tool's result, as a new message: what was sampled before it stays as it was, thinking too."""
    with called(qwen3_folder, tmp_path, qwen3, REPLIES) as (engine, house):
        body = CHAT.ask("Look.")
        second = CHAT.follow(body, house.post(CHAT.path, body).json(), "a.txt\n")
        second["messages"].append({"role": "user", "content": REMINDER})
        third = CHAT.follow(second, house.post(CHAT.path, second).json(), "Thanks.")
        house.post(CHAT.path, third)
    rows = house.calls()
    assert [row["parent_call_id"] for row in rows] == [None, rows[0]["call_id"], rows[1]["call_id"]]
    prompt = engine.decode(engine.calls[2].prompt_ids)
    assert prompt.count(REMINDER) == prompt.count("<think>\nLook.\n</think>\n\n  I look. \n\n") == 1


def test_a_reminder_that_is_put_into_an_earlier_message_forks(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """The model has to see it there: a root, whose window says that a reminder is what came."""
    with called(qwen3_folder, tmp_path, qwen3, REPLIES) as (engine, house):
        body = CHAT.ask("Look.")
        second = CHAT.follow(body, house.post(CHAT.path, body).json(), "a.txt\n")
        second["messages"][0] = {"role": "user", "content": f"Look.\n{REMINDER}"}
        house.post(CHAT.path, second)
    row = house.calls()[-1]
    assert (row["parent_call_id"], row["root_reason"]) == (None, "edited_history")
    assert json.loads(row["root_window"])["class"] == "reminder"
    assert REMINDER in engine.decode(engine.calls[1].prompt_ids)


# --- two calls of one parent at once ------------------------------------------------------------------------------


def test_two_calls_that_go_on_from_one_at_once_share_its_context_and_train_it_once(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """Both are exact children; of the three replies each token is trained at one place."""
    with called(qwen3_folder, tmp_path, qwen3, REPLIES) as (engine, house):
        body = CHAT.ask("Look.")
        answer = house.post(CHAT.path, body).json()
        engine.faults += [Fault("hold", after=2), Fault("hold", after=2)]
        both = [Caller(house, CHAT.path, CHAT.follow(body, answer, result)) for result in ("a.txt\n", "b.txt\n")]
        eventually(lambda: len(engine._held) == 2)  # pyright: ignore[reportPrivateUsage] - both stand still
        engine.release()
        assert all(b"There is a.txt." in caller.rest() for caller in both)
    first, *branches = house.calls()
    assert [(row["parent_call_id"], row["parent_evidence"]) for row in branches] == [(first["call_id"], "pointer")] * 2
    built = trajectories.build(grow(calls.read(tmp_path)))
    trained = sorted(float(lp) for one in built for lp in one.logprobs[one.loss_mask == 1])
    assert len(built) == 2
    assert trained == sorted(np.float32(lp).item() for call in engine.calls for lp in call.logprobs)
    assert len(full_prompts(calls.table(tmp_path))) == 3


# --- a call that is cut -------------------------------------------------------------------------------------------

BOUNDS: dict[str, Json] = {
    "openai_chat": {"max_tokens": 24},
    "openai_responses": {"max_output_tokens": 24},
    "anthropic": {"max_tokens": 24},
    "gemini": {"generationConfig": {"maxOutputTokens": 24}},
}
ENDS: dict[str, Callable[[Json], Any]] = {
    "openai_chat": lambda answer: answer["choices"][0]["finish_reason"],
    "openai_responses": lambda answer: (answer["status"], answer["incomplete_details"]["reason"]),
    "anthropic": lambda answer: answer["stop_reason"],
    "gemini": lambda answer: answer["candidates"][0]["finishReason"],
}


@pytest.mark.parametrize(
    ("protocol", "end"),
    [
        (CHAT, "length"),
        (RESPONSES, ("incomplete", "max_output_tokens")),
        (ANTHROPIC, "max_tokens"),
        (GEMINI, "MAX_TOKENS"),
    ],
    ids=lambda value: value.name if isinstance(value, Protocol) else "",
)
def test_a_call_that_is_cut_by_the_bound_is_no_call(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, protocol: Protocol, end: Any
) -> None:
    """The length wins over the tool call, which is text; its tokens are trained, and the row says what happened."""
    with called(qwen3_folder, tmp_path, qwen3, REPLIES) as (_, house):
        answer = house.post(protocol.path, protocol.ask("Look.", **BOUNDS[protocol.name])).json()
    (row,) = house.calls()
    text, found = protocol.said(answer)
    assert (ENDS[protocol.name](answer), found) == (end, [])
    assert '{"name": "run"' in text
    assert (row["finish"], row["reply_faults"], row["trainable"]) == ("length", ["truncated_tool_call"], True)
    assert len(row["output_ids"]) == 24


# --- a request that says nothing of streaming ---------------------------------------------------------------------


@pytest.mark.parametrize("protocol", EVERY, ids=lambda protocol: protocol.name)
def test_a_request_without_stream_is_answered_in_one_piece(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, protocol: Protocol
) -> None:
    """As JSON, never as events: clients that fall back from a broken stream leave the field out."""
    with called(qwen3_folder, tmp_path, qwen3, REPLIES) as (_, house):
        answer = house.post(protocol.path, protocol.ask("Look."))
    assert answer.headers["content-type"].startswith("application/json")
    assert protocol.said(answer.json())[1] == [("run", {"command": "ls", "n": 1})]
