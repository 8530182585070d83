"""TRL reads the export: its own RolloutSample, and the lists of a rollout_func."""

from dataclasses import dataclass, fields

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.peers.installed import take

WORKER = "trl.experimental.async_grpo.async_rollout_worker"


@pytest.fixture
def worker(as_module, peers):
    """TRL 1.16.0's classes, from its own file: importing the whole of it takes datasets, pandas and 20 seconds."""
    names = ["RolloutSample", "TrainingSequence"]
    module = take("trl", f"{WORKER.replace('.', '/')}.py", names, {"dataclass": dataclass, "np": np})
    as_module(WORKER, module)
    return module


def test_every_trained_token_is_in_the_samples_once(exported, loaded, worker, once):
    """A RolloutSample's mask and logprobs are as long as its input."""
    exported("trl")
    samples = loaded("trl")["samples"]
    kept = [(s.input_ids[s.completion_mask == 1], s.old_log_probs[s.completion_mask == 1]) for s in samples]
    once([pair for ids, logprobs in kept for pair in zip(ids, logprobs, strict=True)], "one", "two")


def test_the_advantage_is_the_sessions_against_its_group(exported, loaded, worker):
    """Rewards 1 and 0 of two sessions, not of four rows."""
    exported("trl")
    samples = loaded("trl")["samples"]
    assert [sample.advantage for sample in samples] == [1.0, 1.0, 1.0, -1.0]
    assert [sample.group_id for sample in samples] == [0, 0, 0, 0]
    assert [sample.model_version for sample in samples] == [0, 7, 0, 0]


def test_the_columns_have_the_fields_of_a_training_sequence(exported, worker):
    """Under the same names."""
    folder, _ = exported("trl")
    table = pq.read_table(folder / "rollout_samples.parquet")
    assert {field.name for field in fields(worker.TrainingSequence)} <= set(table.column_names)


def test_the_lists_of_a_rollout_func_say_the_same(exported):
    """Prompt and completion are the two halves of the input."""
    folder, _ = exported("trl")
    for row in pq.read_table(folder / "rollout_samples.parquet").to_pylist():
        before = [0] * len(row["prompt_ids"])
        assert row["prompt_ids"] + row["completion_ids"] == row["input_ids"]
        assert before + row["env_mask"] == row["completion_mask"]
        assert before + row["logprobs"] == row["old_log_probs"]
