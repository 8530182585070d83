"""Messages and replies as the steps of an ATIF trajectory."""

import json

import pytest

from polar_mitm.conversation import Message, Text, ToolCall, ToolResult, message_json, part_json
from polar_toolkit.export import Source
from polar_toolkit.export.conversations import sessions
from polar_toolkit.export.steps import Seen, steps_of


@pytest.fixture
def steps(tmp_path, book):
    """Steps of one session of calls: each of messages and the parts of a reply, the later continuing the earlier."""

    def make(*turns):
        prompt, before = [1], None
        for number, (messages, reply) in enumerate(turns):
            texts = {"messages": json.dumps([message_json(m) for m in messages]), "tools": None if before else "[]"}
            texts |= {"reply": json.dumps([part_json(p) for p in reply]), "cached_tokens": 1}
            before = book.call(f"c{number}", prompt, [9], parent=before, **texts)
            prompt = [*prompt, 9, 1]
        (session,) = sessions(Source([book.write(tmp_path / "r")], tmp_path))
        return steps_of(session, session.path(len(turns) - 1), Seen())

    return make


def ask(text):
    return Message("user", (Text(text),))


def test_steps_are_numbered_from_one(steps):
    """In the order in which things were said."""
    made = steps(([ask("Go.")], [Text("Yes.")]), ([ask("On.")], [Text("No.")]))
    assert [(step["step_id"], step["source"], step["message"]) for step in made] == [
        (1, "user", "Go."), (2, "agent", "Yes."), (3, "user", "On."), (4, "agent", "No.")
    ]  # fmt: skip


def test_a_reply_has_its_tokens(steps):
    """And says from which call, and whether it is trained."""
    step = steps(([ask("Go.")], [Text("Yes.")]))[1]
    assert step["metrics"] == {
        "prompt_tokens": 1, "completion_tokens": 1, "completion_token_ids": [9], "logprobs": [-0.5], "cached_tokens": 1
    }  # fmt: skip
    assert (step["extra"]["call_id"], step["extra"]["trained"]) == ("c0", True)


def test_a_tool_result_is_observed_by_the_step_that_made_the_call(steps):
    """Also when the harness changed its id, which is kept."""
    result = Message("tool", (ToolResult("other", "42", is_error=True),))
    made = steps(([ask("Go.")], [ToolCall("call_1", "run", '{"a": 1}')]), ([result], [Text("Yes.")]))
    (entry,) = made[1]["observation"]["results"]
    assert entry == {"source_call_id": "call_1", "content": "42", "extra": {"is_error": True, "tool_call_id": "other"}}
    assert made[1]["tool_calls"] == [{"tool_call_id": "call_1", "function_name": "run", "arguments": {"a": 1}}]


def test_a_result_without_a_call_is_a_step_of_the_system(steps):
    """A history may begin with one."""
    made = steps(([Message("tool", (ToolResult("x", "42"),))], [Text("Yes.")]))
    assert (made[0]["source"], made[0]["observation"]["results"][0]["content"]) == ("system", "42")


@pytest.mark.parametrize("arguments", ["not JSON", "[1]"])
def test_arguments_that_are_no_object_stand_under_one_name(steps, arguments):
    """ATIF wants an object."""
    made = steps(([ask("Go.")], [ToolCall("c", "run", arguments)]))
    assert list(made[1]["tool_calls"][0]["arguments"]) == ["input"]


def test_a_reply_in_a_roots_history_counts_as_copied(steps):
    """It was not sampled here."""
    made = steps(([ask("Go."), Message("assistant", (Text("I did."),)), ask("Again.")], [Text("Yes.")]))
    assert [step.get("is_copied_context", False) for step in made] == [False, True, False, False]
