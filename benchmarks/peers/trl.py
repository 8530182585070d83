"""TRL's `_chain_to_sequences`, on one TurnRecord a call, with the trainer's own threshold."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.contestants import Json, Plain, row
from benchmarks.peers.installed import take
from benchmarks.stage.grading import Row

_FILE = "trl/experimental/async_grpo/async_rollout_worker.py"
_NAMES = (
    "TurnRecord", "TrainingSequence", "_common_prefix_len", "DriftKind", "_SampleBuilder", "_chain_to_sequences",
)  # fmt: skip
_FORK_THRESHOLD = 1024  # the default of AsyncGRPOConfig.fork_threshold_tokens in 1.16.0


class TRL(Plain):
    """All turns of a session are one chain, as they were asked."""

    package = "trl"
    native = "TurnRecords of lists"
    note = "_chain_to_sequences; functions run from the installed file"

    def __init__(self) -> None:
        self._worker = take("trl", _FILE, _NAMES, {"dataclass": dataclass, "field": field, "enum": enum})

    def convert(self, read: list[Json]) -> list[Any]:  # Any: TRL's own records
        """Records of the same lists."""
        return [self._worker.TurnRecord(one["prompt_ids"], one["output_ids"], one["logprobs"]) for one in read]

    def merge(self, native: list[Any]) -> list[Any]:  # Any: TRL's own sequences
        """Its own function."""
        return self._worker._chain_to_sequences(native, "s", _FORK_THRESHOLD)[0]

    def rows(self, merged: list[Any]) -> list[Row]:  # Any: TRL's own sequences
        """A row a sequence."""
        return [row(one.input_ids, one.completion_mask, one.old_log_probs) for one in merged]
