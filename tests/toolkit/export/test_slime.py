"""slime and miles read the export: Sample dicts, saved by torch as their debug files are."""

import json

import pytest
import torch

FIELDS = {
    "group_index", "index", "rollout_id", "prompt", "tokens", "response", "response_length", "label", "reward",
    "loss_mask", "weight_versions", "rollout_log_probs", "rollout_routed_experts", "remove_sample", "status",
    "metadata", "train_metadata", "session_id",
}  # fmt: skip


@pytest.fixture
def saved(exported, loaded):
    """The samples of the file that --load-debug-rollout-data names, as the documented loader makes it."""
    exported("slime")
    loaded("slime")
    return torch.load("rollout_0.pt", weights_only=False)["samples"]


def test_every_trained_token_is_in_the_samples_once(saved, once):
    """A sample's mask and logprobs are as long as its response."""
    responses = [sample["tokens"][-sample["response_length"] :] for sample in saved]
    rows = [zip(r, s["rollout_log_probs"], s["loss_mask"], strict=True) for r, s in zip(responses, saved, strict=True)]
    once([(token, logprob) for row in rows for token, logprob, mask in row if mask], "one", "two")


def test_a_sample_has_the_fields_of_slimes_class(saved):
    """Neither a field that Sample does not know, nor one that its conversion needs and misses."""
    assert all(sample.keys() == FIELDS for sample in saved)


def test_siblings_share_rollout_group_and_reward(saved):
    """slime counts a session once, by its rollout_id."""
    assert [s["rollout_id"] for s in saved] == [0, 0, 0, 1]
    assert [s["group_index"] for s in saved] == [0, 0, 0, 0]
    assert [s["reward"] for s in saved] == [1.0, 1.0, 1.0, 0.0]
    assert [s["index"] for s in saved] == [0, 1, 2, 3]


def test_a_sample_that_ended_at_its_length_limit_is_truncated(saved):
    """The status comes from the finish of the last call."""
    assert [s["status"] for s in saved] == ["completed", "completed", "completed", "truncated"]


def test_lines_are_json(exported):
    """The file needs no torch."""
    folder, _ = exported("slime")
    lines = (folder / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["metadata"]["trajectory_id"] for line in lines] == ["b.0", "c.0", "d.0", "e.0"]
    assert json.loads(lines[1])["weight_versions"] == ["7"]
