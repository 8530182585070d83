"""The prompt of a call: whether it fits, what it is compared with, and who decides about the reasoning in it."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_mitm.engine import Description
from polar_mitm.errors import ContextOverflow
from polar_mitm.prompting import check_fits, is_audited
from polar_mitm.tokens import Template, load
from polar_toolkit.rollout.harnesses.scripted_engine import ScriptedEngine
from tests.mitm.house import House, open_house
from tests.mitm.protocols import ANTHROPIC, CHAT, RESPONSES

Json = dict[str, Any]


def test_a_prompt_must_leave_room_for_a_token() -> None:
    """And for the position that SGLang keeps free: two tokens short of the context is the longest prompt."""
    described = Description("m", 10, "v")
    check_fits(np.zeros(8, np.int32), described)
    with pytest.raises(ContextOverflow, match="9 tokens"):
        check_fits(np.zeros(9, np.int32), described)


def test_every_call_of_a_short_session_is_audited() -> None:
    """Whatever the length of its prompts, and every short prompt of a long session."""
    assert all(is_audited(f"call{i}", i, 100_000) for i in range(8))
    assert all(is_audited(f"call{i}", 1000, 1024) for i in range(100))


@pytest.mark.parametrize("length", [8_192, 32_768])
def test_the_audit_of_later_calls_costs_the_same_whatever_their_length(length: int) -> None:
    """On average the render of 1,024 tokens a call."""
    audited = sum(is_audited(f"call{i}", 50, length) for i in range(4_000))
    assert audited * length / 4_000 == pytest.approx(1_024, rel=0.25)


# --- over a scripted engine and a real journal --------------------------------------------------------------------

THOUGHT = "<think>\nThe user wants the files.\n</think>\n\n"
ACT = 'I look.\n<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
REPLIES = (THOUGHT + ACT, THOUGHT + "There is a.txt.", "You are welcome.")


@contextmanager
def called(folder: Path, run: Path, template: Template) -> Generator[tuple[ScriptedEngine, House]]:
    """An engine and a house in front of it."""
    with ScriptedEngine(folder, REPLIES).serving() as engine, open_house(run, engine.url, template) as house:
        yield engine, house


def without_reasoning(body: Json) -> Json:
    """As a harness that drops reasoning sends a history of chat messages."""
    dropped = {"reasoning_content", "reasoning_details"}
    return body | {"messages": [{k: v for k, v in message.items() if k not in dropped} for message in body["messages"]]}


def two_turns(house: House) -> Json:
    """A call, and the request that follows with its result."""
    body = CHAT.ask("Look.")
    return CHAT.follow(body, house.post(CHAT.path, body).json(), "a.txt\n")


def test_a_bridged_prompt_says_how_a_plain_render_would_differ(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """Here the harness dropped the reasoning, which stays in the context."""
    with called(qwen3_folder, tmp_path, qwen3) as (engine, house):
        house.post(CHAT.path, without_reasoning(two_turns(house)))
    first, second = house.calls()
    value = json.loads(second["drift"])
    assert second["parent_call_id"] == first["call_id"]
    assert (value["class"], value["at"]) == ("reasoning", second["rerender_shared"])
    assert "The user wants" in value["sampled"]
    assert "assistant\nI look." in value["rendered"]
    assert "The user wants" in engine.decode(engine.calls[1].prompt_ids)
    assert (first["drift"], first["root_window"], second["root_window"]) == (None, None, None)


def test_a_root_with_a_history_says_where_it_leaves_the_call_before(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """The call, the place and the words around it."""
    with called(qwen3_folder, tmp_path, qwen3) as (engine, house):
        body = two_turns(house)
        third = CHAT.follow(body, house.post(CHAT.path, body).json(), "Thanks.")
        house.post(CHAT.path, json.loads(json.dumps(third).replace("a.txt\\n", "b.txt\\n")))
    *_, second, edited = house.calls()
    value = json.loads(edited["root_window"])
    assert edited["root_reason"] == "edited_history"
    assert (value["class"], value["call"]) == ("edited", second["call_id"])
    assert "a.txt" in value["was"]
    assert "b.txt" in value["now"]
    assert np.array_equal(engine.calls[1].prompt_ids[: value["at"]], engine.calls[2].prompt_ids[: value["at"]])


def test_a_root_without_an_echoed_id_is_compared_with_the_call_that_went_on(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """The history is shared up to a reply: what continued that reply is the nearest."""
    with called(qwen3_folder, tmp_path, qwen3) as (_, house):
        body = two_turns(house)
        third = CHAT.follow(body, house.post(CHAT.path, body).json(), "Thanks.")
        text = re.sub(r"(call|rs)_[a-z2-7]{20}", "x", json.dumps(third)).replace("There is a.txt.", "There are two.")
        house.post(CHAT.path, json.loads(text))
    *_, second, edited = house.calls()
    value = json.loads(edited["root_window"])
    assert (value["class"], value["call"]) == ("edited", second["call_id"])
    assert "There are two." in value["now"]


def test_changed_tools_are_named(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """In the window of the root that they make."""
    with called(qwen3_folder, tmp_path, qwen3) as (_, house):
        body = two_turns(house)
        tool = json.loads(json.dumps(body["tools"][0]).replace('"run"', '"walk"'))
        house.post(CHAT.path, body | {"tools": [*body["tools"], tool]})
    row = house.calls()[-1]
    value = json.loads(row["root_window"])
    assert (row["root_reason"], value["class"], value["was"], value["now"]) == (
        "tools_changed", "tools", "", "added: walk",
    )  # fmt: skip


def test_a_summary_that_stands_for_the_history_is_a_compaction(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """Codex 0.171.0: nothing of the history comes back but one item, which names the call that summed it up."""
    summary = "The folder was listed: it holds a.txt, and nothing else was asked for."
    with (
        ScriptedEngine(qwen3_folder, ["There is a.txt.", summary, "Gladly."]).serving() as engine,
        open_house(tmp_path, engine.url, qwen3) as house,
    ):
        body = RESPONSES.ask("Look.")
        body["input"] += house.post(RESPONSES.path, body).json()["output"]
        compacted = house.post(RESPONSES.path, body | {"input": [*body["input"], {"type": "compaction_trigger"}]})
        items = [*body["input"][:1], *compacted.json()["output"], {"role": "user", "content": "Thanks."}]
        house.post(RESPONSES.path, body | {"input": items})
    _, summing, root = house.calls()
    value = json.loads(root["root_window"])
    assert (summing["kind"], root["root_reason"]) == ("compaction", "compaction")
    assert (value["class"], value["call"]) == ("compaction", summing["call_id"])
    assert "it holds a.txt" in engine.decode(engine.calls[-1].prompt_ids)


def test_the_first_call_of_a_sub_agent_says_so(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """It has no history; the harness's header says what it is for."""
    with called(qwen3_folder, tmp_path, qwen3) as (_, house):
        house.post(ANTHROPIC.path, ANTHROPIC.ask("Look."))
        house.post(ANTHROPIC.path, ANTHROPIC.ask("Find it."), x_claude_code_agent_id="a1")
    assert [row["root_reason"] for row in house.calls()] == ["first", "subagent"]


def test_a_render_holds_the_reasoning_that_the_harness_dropped(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """The history was edited behind a reply of ours, which is still there: the model goes on from what it thought."""
    with called(qwen3_folder, tmp_path, qwen3) as (engine, house):
        body = without_reasoning(two_turns(house))
        house.post(CHAT.path, json.loads(json.dumps(body).replace("Look.", "Look!")))
    row = house.calls()[-1]
    assert (row["root_reason"], json.loads(row["root_window"])["restored"]) == ("edited_history", 1)
    assert f"assistant\n{THOUGHT}I look." in engine.decode(engine.calls[1].prompt_ids)
    assert "The user wants" not in row["messages"]


# --- who decides about earlier reasoning --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict(qwen3_folder: Path) -> Template:
    """Qwen3 under polar_history_thinking=template."""
    return load(qwen3_folder, "template")


def user_turns(house: House) -> list[Json]:
    """The rows of a tool turn and a second user turn after it."""
    body = two_turns(house)
    house.post(CHAT.path, CHAT.follow(body, house.post(CHAT.path, body).json(), "Thanks."))
    return house.calls()


def test_under_preserve_a_new_user_turn_extends_the_reasoning_before_it(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """An exact edge; the drift says what the template would have dropped."""
    with called(qwen3_folder, tmp_path, qwen3) as (engine, house):
        _, second, third = user_turns(house)
    known = np.concatenate([engine.calls[1].prompt_ids, engine.calls[1].output_ids])
    assert third["parent_call_id"] == second["call_id"]
    assert np.array_equal(engine.calls[2].prompt_ids[: len(known)], known)
    assert json.loads(third["drift"])["class"] == "reasoning"


def test_under_template_a_new_user_turn_is_what_the_template_makes_of_it(
    strict: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """Qwen3's drops earlier reasoning there: a root with this reason. Within the tool turn it keeps it: an edge."""
    with called(qwen3_folder, tmp_path, strict) as (engine, house):
        first, second, third = user_turns(house)
    assert second["parent_call_id"] == first["call_id"]
    assert (third["parent_call_id"], third["root_reason"]) == (None, "template_rewrites")
    value = json.loads(third["root_window"])
    assert (value["class"], value["call"], value["restored"]) == ("other", second["call_id"], 0)
    assert "The user wants" not in engine.decode(engine.calls[2].prompt_ids)


def test_under_template_nothing_is_put_back(strict: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """The context is what the template makes of what the harness sent."""
    with called(qwen3_folder, tmp_path, strict) as (engine, house):
        body = without_reasoning(two_turns(house))
        house.post(CHAT.path, json.loads(json.dumps(body).replace("Look.", "Look!")))
    assert json.loads(house.calls()[-1]["root_window"])["restored"] == 0
    assert "The user wants" not in engine.decode(engine.calls[1].prompt_ids)
