"""verl reads the export: as AgentLoopOutput, and padded as a DataProto."""

from types import ModuleType
from typing import Any, Optional

import pyarrow.parquet as pq
import pytest
import torch
from pydantic import BaseModel

from benchmarks.peers.installed import take


class DataProto:
    """Keeps what a DataProto is made from."""

    @classmethod
    def from_dict(cls, tensors, non_tensors):
        made = cls()
        made.batch, made.non_tensor_batch = tensors, non_tensors
        return made


@pytest.fixture
def batch(exported, loaded, as_module):
    """What the documented loader makes."""
    exported("verl")
    module = ModuleType("verl")
    module.DataProto = DataProto
    as_module("verl", module)
    return loaded("verl")["batch"]


def test_every_trained_token_is_in_the_batch_once(batch, once):
    """On the mask stand the sampled tokens with their logprobs."""
    mask = batch.batch["response_mask"].bool()
    once(zip(batch.batch["responses"][mask], batch.batch["rollout_log_probs"][mask], strict=True), "one", "two")


def test_prompts_are_padded_left_and_responses_right(batch):
    """The tokens of a row are one stretch, numbered from 0."""
    tensors = batch.batch
    for ids, attended, positions in zip(
        *(tensors[n] for n in ("input_ids", "attention_mask", "position_ids")), strict=True
    ):
        where = attended.nonzero()[:, 0]
        assert where.tolist() == list(range(int(where[0]), int(where[-1]) + 1))
        assert positions[where].tolist() == list(range(len(where)))
        assert (ids[where] > 0).all()


def test_the_reward_stands_at_the_last_valid_token_of_each_row(batch):
    """rm_scores has one entry a row."""
    assert batch.batch["rm_scores"].sum(dim=1).tolist() == [1.0, 1.0, 1.0, 0.0]
    row, column = batch.batch["rm_scores"].nonzero()[0].tolist()
    assert batch.batch["responses"][row, column] == 105


def test_a_row_is_an_agent_loop_output_of_verl(exported, peers):
    """verl 0.9.1's own class takes the columns, and makes of them the tensors of its queue."""
    folder, _ = exported("verl")
    known = {"BaseModel": BaseModel, "Any": Any, "Optional": Optional, "torch": torch}
    names = ["AgentLoopMetrics", "AgentLoopOutput"]
    loop = take("verl", "verl/experimental/agent_loop/agent_loop.py", names, known)
    for row in pq.read_table(folder / "agent_loop_outputs.parquet").to_pylist():
        fields = {name: row[name] for name in loop.AgentLoopOutput.model_fields if name in row}
        output = loop.AgentLoopOutput(**fields, metrics=loop.AgentLoopMetrics())
        made = output.as_dict()
        assert made["prompts"].tolist() == row["prompt_ids"]
        assert made["rollout_log_probs"].tolist() == row["response_logprobs"]
        assert float(made["rm_scores"].sum()) == row["reward_score"]


def test_the_names_are_those_of_verls_keys(exported):
    """A group, a session in it, and an output of the session, none with an underscore."""
    folder, _ = exported("verl")
    rows = pq.read_table(folder / "agent_loop_outputs.parquet").to_pylist()
    assert [(r["uid"], r["session_id"], r["index"]) for r in rows] == [
        ("0", 0, 0),
        ("0", 0, 1),
        ("0", 0, 2),
        ("0", 1, 0),
    ]
    assert [(r["min_global_steps"], r["max_global_steps"]) for r in rows] == [(0, 0), (7, 7), (0, 0), (0, 0)]
