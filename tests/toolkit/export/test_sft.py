"""Chat JSON lines for supervised fine-tuning."""

import json

import pytest

from polar_toolkit.errors import Refusal


@pytest.fixture
def conversations(exported, loaded):
    """What the documented loader makes, by trajectory id."""
    exported("sft")
    return {line["trajectory_id"]: line for line in loaded("sft")["conversations"]}


def test_a_conversation_is_in_openais_form(conversations):
    """Reasoning, tool calls with arguments as text, and the tool's answer to them."""
    system, user, asks, answer, done = conversations["b.0"]["messages"]
    assert (system["role"], user["role"], answer["role"], done["content"]) == ("system", "user", "tool", "Written.")
    assert (asks["content"], asks["reasoning_content"]) == ("First I look.", "It may exist.")
    (call,) = asks["tool_calls"]
    assert (call["id"], call["type"], call["function"]["name"]) == ("call_1", "function", "task")
    assert json.loads(call["function"]["arguments"]) == {"prompt": "Look at the file first."}
    assert answer["tool_call_id"] == "call_1"
    assert conversations["b.0"]["tools"][0]["function"]["name"] == "task"


def test_a_reply_that_two_conversations_share_has_weight_once(conversations):
    """Every sampled reply is trained in one line."""
    weights = {
        name: [m["weight"] for m in c["messages"] if m["role"] == "assistant"] for name, c in conversations.items()
    }
    assert weights == {"b.0": [1, 1], "c.0": [0, 1], "d.0": [1], "e.0": [1], "f.0": [1]}


def test_sessions_below_the_least_reward_are_left_out_and_counted(exported):
    """Those without one, too."""
    folder, tally = exported("sft", min_reward=1.0)
    lines = (folder / "conversations.jsonl").read_text().splitlines()
    assert {json.loads(line)["session_id"] for line in lines} == {"one"}
    assert (tally.rows, tally.trained, tally.left_out) == (3, 11, {"below_min_reward": 3, "no_reward": 1})


def test_the_least_reward_is_for_this_format_only(exported):
    """Elsewhere it would move the baselines."""
    with pytest.raises(Refusal, match="is for sft"):
        exported("slime", min_reward=1.0)
