"""The finished calls that may be continued, and which of them a request continues."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_mitm.conversation import (
    Conversation,
    Message,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    history_keys,
    message_json,
    part_json,
    tools_key,
)
from polar_mitm.tips import Kept, Parent, RootReason, Tips

TOOLS = (Tool("run", "runs", "{}"),)
ASKED = Message("user", (Text("Look."),))
REPLIED = Message("assistant", (ToolCall("call_1", "run", "{}"),))
RESULT = Message("tool", (ToolResult("call_1", "a.txt\n"),))
ANSWERED = Message("assistant", (Text("There is a.txt."),))
MORE = Message("user", (Text("Thanks."),))


def kept(call_id: str, *history: Message, tools: tuple[Tool, ...] = TOOLS, **more: Any) -> Kept:
    """A finished root with this history, reply included, of ten tokens."""
    half = np.zeros(5, np.int32)
    return Kept(call_id, 0, None, half, half, history_keys(history)[-1], tools_key(tools), **more)


def told(found: Parent | RootReason) -> tuple[str, str, int]:
    """Whose child a request is, by what, and how much of it is the parent's."""
    assert isinstance(found, Parent)
    return found.tip.call_id, found.evidence, found.messages


def request(*history: Message, tools: tuple[Tool, ...] = TOOLS) -> Conversation:
    return Conversation("m", history, tools)


def tips(*finished: Kept) -> Tips:
    known = Tips()
    for each in finished:
        known.add("s", each)
    return known


def test_a_request_that_names_its_parent_is_attached_by_pointer() -> None:
    """The echoed id says which call, the history agrees."""
    found = tips(kept("one", ASKED, REPLIED)).find("s", request(ASKED, REPLIED, RESULT), [("one", 0)])
    assert told(found) == ("one", "pointer", 2)


def test_a_request_without_an_id_is_attached_by_its_history() -> None:
    """Text-only turns carry no id in some protocols."""
    found = tips(kept("one", ASKED, ANSWERED)).find("s", request(ASKED, ANSWERED, MORE), [])
    assert told(found) == ("one", "history", 2)


def test_the_deepest_call_is_the_parent() -> None:
    """A chain is extended at its end."""
    one, two = kept("one", ASKED, REPLIED), kept("two", ASKED, REPLIED, RESULT, ANSWERED)
    found = tips(one, two).find("s", request(ASKED, REPLIED, RESULT, ANSWERED, MORE), [("one", 0)])
    assert told(found) == ("two", "history", 4)


@pytest.mark.parametrize("named", ["one", "two"])
def test_a_pointer_chooses_among_equal_siblings(named: str) -> None:
    """Two samples of one prompt said the same: the echoed id tells them apart."""
    siblings = tips(kept("one", ASKED, REPLIED), kept("two", ASKED, REPLIED))
    found = siblings.find("s", request(ASKED, REPLIED, RESULT), [(named, 0)])
    assert isinstance(found, Parent)
    assert found.tip.call_id == named


def test_without_a_pointer_the_latest_of_equal_siblings_is_taken() -> None:
    """A retry's answer is the one that the harness goes on from."""
    siblings = tips(kept("one", ASKED, REPLIED), kept("two", ASKED, REPLIED))
    found = siblings.find("s", request(ASKED, REPLIED, RESULT), [])
    assert isinstance(found, Parent)
    assert found.tip.call_id == "two"


def test_a_pointer_does_not_attach_an_edited_history() -> None:
    """An echoed id beside a changed history is a fork: the model must see the change."""
    known = tips(kept("one", ASKED, REPLIED))
    edited = Message("user", (Text("Look!"),))
    assert known.find("s", request(edited, REPLIED, RESULT), [("one", 0)]) == "edited_history"


def test_an_edited_tool_result_forks() -> None:
    """The chain up to the edit is known, what follows is another history."""
    known = tips(kept("one", ASKED, REPLIED), kept("two", ASKED, REPLIED, RESULT, ANSWERED))
    edited = Message("tool", (ToolResult("call_1", "b.txt\n"),))
    assert known.find("s", request(ASKED, REPLIED, edited, ANSWERED, MORE), []) == "edited_history"


def test_a_deleted_turn_forks() -> None:
    """The last reply is ours by its id, what stood before it is gone."""
    known = tips(kept("one", ASKED, REPLIED), kept("two", ASKED, REPLIED, RESULT, ANSWERED))
    assert known.find("s", request(ASKED, ANSWERED, MORE), [("two", 0)]) == "edited_history"


def test_a_change_of_the_tools_forks() -> None:
    """The tools stand at the head of the prompt."""
    known = tips(kept("one", ASKED, REPLIED))
    assert known.find("s", request(ASKED, REPLIED, RESULT, tools=()), [("one", 0)]) == "tools_changed"


def test_a_history_that_nobody_saw_is_a_root() -> None:
    """A conversation that began elsewhere has no parent here."""
    assert tips().find("s", request(ASKED, REPLIED, RESULT), []) == "unknown_history"


def test_another_sessions_call_is_no_parent() -> None:
    """Sessions do not share calls, not even equal ones."""
    known = tips(kept("one", ASKED, REPLIED))
    assert known.find("t", request(ASKED, REPLIED, RESULT), [("one", 0)]) == "unknown_history"


def test_a_request_without_a_reply_in_it_is_the_first() -> None:
    """Nothing was sampled yet."""
    assert tips(kept("one", ASKED, REPLIED)).find("s", request(ASKED), []) == "first"


def test_two_requests_may_continue_one_call() -> None:
    """The second becomes a branch: finding a parent takes nothing away."""
    known = tips(kept("one", ASKED, REPLIED))
    found = [known.find("s", request(ASKED, REPLIED, RESULT), [("one", 0)]) for _ in range(2)]
    assert told(found[0]) == told(found[1])


# --- contexts, kept without what the parent holds -----------------------------------------------------------------


def chain(lengths: list[int], *, call_id: str = "c") -> list[tuple[Kept, np.ndarray]]:
    """Calls that continue each other, by the numbers of new prompt tokens, and the whole prompt of each."""
    calls: list[tuple[Kept, np.ndarray]] = []
    known, history = np.empty(0, np.int32), ()
    for index, length in enumerate(lengths):
        suffix = np.arange(length, dtype=np.int32) + 1000 * index
        output = np.array([-index, -index], np.int32)
        history = (*history, ASKED, Message("assistant", (Text(f"{call_id}{index}"),)))
        parent = (f"{call_id}{index - 1}", 0) if index else None
        call = Kept(f"{call_id}{index}", 0, parent, suffix, output, history_keys(history)[-1], tools_key(TOOLS))
        calls.append((call, np.concatenate([known, suffix])))
        known = np.concatenate([known, suffix, output])
    return calls


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_a_context_is_whole_again_when_it_is_found(lengths: list[int]) -> None:
    """Parent + suffix, however long the chain, is the prompt that was sent."""
    calls = chain(lengths)
    known = tips(*(call for call, _ in calls))
    history: tuple[Message, ...] = ()
    for index, (_, prompt) in enumerate(calls):
        history = (*history, ASKED, Message("assistant", (Text(f"c{index}"),)))
        found = known.find("s", request(*history, MORE), [])
        assert isinstance(found, Parent)
        assert found.tip.prompt_ids.tolist() == prompt.tolist()
        assert (found.tip.prompt_ids.dtype, found.tip.tokens) == (np.int32, len(prompt) + 2)


def test_a_chain_costs_its_length() -> None:
    """A hundred turns of ten tokens cost a hundred times a turn, not the sum of all contexts."""
    one, hundred = tips(chain([10])[0][0]), tips(*(call for call, _ in chain([10] * 100)))
    assert hundred.size == 100 * one.size


def test_the_trees_used_longest_ago_are_forgotten_whole() -> None:
    """The last ones stay; a session that lost calls is named, so that they are read again when they are meant."""
    calls = {name: chain([10, 10], call_id=name) for name in "abc"}
    known = Tips(max_bytes=5 * calls["a"][0][0].size)
    for name in "ab":
        for call, _ in calls[name]:
            known.add(name, call)
    assert known.forgotten == set()
    assert isinstance(known.find("a", request(ASKED, Message("assistant", (Text("a0"),)), MORE), []), Parent)
    for call, _ in calls["c"]:
        known.add("c", call)
    assert [known.get(name, (f"{name}1", 0)) is not None for name in "abc"] == [True, False, True]
    assert known.forgotten == {"b"}
    assert known.get("b", ("b0", 0)) is None


def test_a_tree_larger_than_the_bound_is_kept_while_it_is_the_newest() -> None:
    """A session of one huge context must still be extended."""
    known = Tips(max_bytes=5)
    for call, _ in chain([10, 10]):
        known.add("s", call)
    assert known.get("s", ("c0", 0))
    assert known.get("s", ("c1", 0))


def test_a_call_whose_parent_was_forgotten_is_forgotten_too() -> None:
    """Its context could not be told; the session is named."""
    known = Tips()
    known.add("s", chain([10, 10])[1][0])
    assert known.get("s", ("c1", 0)) is None
    assert known.forgotten == {"s"}


def test_forgetting_one_of_equal_siblings_keeps_the_other() -> None:
    """Forgetting takes the call, not its history."""
    known = Tips(max_bytes=kept("one", ASKED, REPLIED).size)
    for name in ("one", "two"):
        known.add("s", kept(name, ASKED, REPLIED))
    found = known.find("s", request(ASKED, REPLIED, RESULT), [("one", 0)])
    assert isinstance(found, Parent)
    assert (found.tip.call_id, found.evidence) == ("two", "history")


def test_adding_a_call_again_changes_nothing() -> None:
    """Calls read again from the journal may be in memory already."""
    known = Tips()
    for _ in range(5):
        known.add("s", kept("one", ASKED, REPLIED))
    assert known.size == kept("one", ASKED, REPLIED).size


def test_a_reply_that_cannot_be_extended_is_no_parent() -> None:
    """What the harness was given is not exactly what was sampled; a faithful history is not called edited."""
    half = np.zeros(5, np.int32)
    known = tips(Kept("one", 0, None, half, half, None, tools_key(TOOLS)))
    assert known.find("s", request(ASKED, REPLIED, RESULT), [("one", 0)]) == "unknown_history"


# --- what was said ------------------------------------------------------------------------------------------------

THOUGHT = Message("assistant", (Reasoning("Hm."), Text("I look."), ToolCall("call_1", "run", "{}")))


def row(call_id: str, *new: Message, reply: Message, parent: str | None = None, **more: Any) -> dict[str, Any]:
    """A completed row, as far as it is kept."""
    return {
        "call_id": call_id, "choice": 0, "parent_call_id": parent, "parent_choice": None if parent is None else 0,
        "prompt_suffix": np.zeros(3, np.int32), "output_ids": np.zeros(2, np.int32), "kept_len": 2,
        "history_key": call_id.encode(), "tools_key": b"t", "thread_id": None, "kind": "agent",
        "dialect": "openai_responses", "tools": None,
        "messages": json.dumps([message_json(m) for m in new]),
        "reply": json.dumps([part_json(p) for p in reply.parts]), "answer": "{}", **more,
    }  # fmt: skip


def test_what_was_said_comes_back_as_it_was() -> None:
    """Reasoning, calls and results; the request's own instructions do not carry over."""
    system = Message("system", (Text("Be brief."),))
    known = tips(
        Kept.of(row("one", system, ASKED, reply=THOUGHT), instructed=True),
        Kept.of(row("two", RESULT, reply=ANSWERED, parent="one"), instructed=True),
    )
    assert known.history("s", ("two", 0)) == (ASKED, THOUGHT, RESULT, ANSWERED)
    assert known.history("s", ("one", 0)) == (ASKED, THOUGHT)


def test_a_developer_message_is_no_instructions() -> None:
    """It stands in the input, and carries over."""
    developer = Message("system", (Text("Be brief."),))
    assert tips(Kept.of(row("one", developer, reply=ANSWERED))).history("s", ("one", 0)) == (developer, ANSWERED)


def test_an_answer_of_a_stateless_protocol_cannot_be_named() -> None:
    """What was said is kept to compare with it, not to be asked for."""
    known = tips(Kept.of(row("one", ASKED, reply=ANSWERED, dialect="anthropic")))
    assert known.history("s", ("one", 0)) is None
    assert known.history("s", ("never", 0)) is None


# --- what a root comes from ---------------------------------------------------------------------------------------

EDITED = Message("tool", (ToolResult("call_1", "b.txt\n"),))


def known_calls(**more: Any) -> Tips:
    """Two calls of which the second goes on from the first, with tools in the first."""
    tools = json.dumps([asdict(tool) for tool in TOOLS])
    keys = history_keys((ASKED, REPLIED, RESULT, ANSWERED))
    return tips(
        Kept.of(row("one", ASKED, reply=REPLIED, tools=tools, history_key=keys[1])),
        Kept.of(row("two", RESULT, reply=ANSWERED, parent="one", history_key=keys[3], **more)),
    )


def test_the_nearest_call_is_the_one_that_the_newest_id_names() -> None:
    """With all that was said, offered and sampled in it."""
    past = known_calls().past("s", request(ASKED, REPLIED, EDITED, ANSWERED, MORE), [("one", 0), ("two", 0)])
    assert past.nearest is not None
    assert past.nearest.call_id == "two"
    assert past.nearest.messages == (ASKED, REPLIED, RESULT, ANSWERED)
    assert past.nearest.tools == TOOLS
    assert len(past.nearest.tokens) == 10


def test_without_an_id_the_nearest_is_the_call_that_went_on_from_what_is_shared() -> None:
    """The history is equal up to the first reply: the call after it is what was left."""
    past = known_calls().past("s", request(ASKED, REPLIED, EDITED, ANSWERED, MORE), [])
    assert past.nearest is not None
    assert past.nearest.call_id == "two"
    assert [(index, said.reply) for index, said in past.known] == [(1, REPLIED.parts)]


def test_a_history_of_which_nothing_is_known_has_no_nearest_call() -> None:
    """Nor is anything of it ours."""
    past = known_calls().past("s", request(MORE, ANSWERED, ASKED), [("never", 0)])
    assert (past.nearest, past.known, past.named) == (None, (), ())


def test_the_compactions_of_the_session_are_known() -> None:
    """By the kind of the call."""
    past = known_calls(kind="compaction").past("s", request(MORE, ANSWERED, ASKED), [])
    assert [said.reply for said in past.summaries] == [ANSWERED.parts]
    assert known_calls(kind="compaction").past("another", request(MORE, ANSWERED, ASKED), []).summaries == ()


def test_reasoning_that_was_never_sampled_is_an_edit() -> None:
    """Dropped or trimmed it is ours, in whatever reply of the chain; other reasoning must reach the model."""
    other = Message("assistant", (Reasoning("I know better."), *THOUGHT.parts[1:]))
    keys = history_keys((ASKED, THOUGHT, RESULT, ANSWERED))
    known = tips(
        Kept.of(row("one", ASKED, reply=THOUGHT, history_key=keys[1], tools_key=tools_key(TOOLS))),
        Kept.of(row("two", RESULT, reply=ANSWERED, parent="one", history_key=keys[3], tools_key=tools_key(TOOLS))),
    )
    bare = Message("assistant", THOUGHT.parts[1:])
    assert told(known.find("s", request(ASKED, bare, RESULT, ANSWERED, MORE), []))[0] == "two"
    assert known.find("s", request(ASKED, other, RESULT, ANSWERED, MORE), [("two", 0)]) == "edited_history"
