"""Harbor reads the export: the rollout details of each session."""

from typing import Any, TypedDict

import pytest
from pydantic import TypeAdapter

from benchmarks.peers.installed import take


@pytest.fixture
def sessions(exported, loaded):
    """What the documented loader makes."""
    exported("harbor")
    return loaded("harbor")["sessions"]


def test_every_trained_token_is_in_a_completion_once(sessions, once):
    """Of all sessions: Harbor needs no reward."""
    details = [detail for session in sessions for detail in session["rollout_details"]]
    turns = [turn for d in details for turn in zip(d["completion_token_ids"], d["logprobs"], strict=True)]
    once([pair for turn in turns for pair in zip(*turn, strict=True)], "one", "two", "three")


def test_a_turns_prompt_is_everything_before_it(sessions):
    """The second branch has the shared turn in its prompt, not among its completions."""
    first, second, subagent = sessions[0]["rollout_details"]
    assert first["prompt_token_ids"] == [[1, 2], [1, 2, 100, 101, 102, 103, 3]]
    assert first["completion_token_ids"] == [[100, 101, 102, 103], [104, 105]]
    assert second["prompt_token_ids"] == [[1, 2, 100, 101, 102, 103, 3, 4]]
    assert subagent["extra"]["kind"] == ["subagent"]


def test_a_detail_is_harbors_own(sessions, peers):
    """Harbor 0.25.0's TypedDict accepts each."""
    file = "harbor/models/agent/rollout_detail.py"
    detail = take("harbor", file, ["RolloutDetail"], {"TypedDict": TypedDict, "Any": Any}).RolloutDetail
    for session in sessions:
        checked = TypeAdapter(list[detail]).validate_python(session["rollout_details"], strict=True)
        assert checked == session["rollout_details"]


def test_rewards_are_the_sessions(sessions):
    """None where there is none."""
    assert [(session["session_id"], session["reward"]) for session in sessions] == [
        ("one", 1.0),
        ("two", 0.0),
        ("three", None),
    ]
