"""SkyRL's `merge_stepwise_output`, on a GeneratorOutput with one entry a turn."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict

import numpy as np

from benchmarks.peers.contestants import Json, Plain, row
from benchmarks.peers.installed import take
from benchmarks.stage.grading import Row

_UTILS = "skyrl/train/generators/utils.py"
_NAMES = (
    "merge_stepwise_output", "_merge_single_trajectory", "_is_prefix", "slice_generator_output",
    "concatenate_generator_outputs", "_flatten_field", "_concat_optional_field", "_last_step_only",
    "get_rollout_metrics", "_add_time_stats", "compute_turn_token_counts",
)  # fmt: skip
_VALIDATES = "skyrl.train.utils.trainer_utils"  # merging imports its last step from there, when it is called
_CHECKS = ("validate_generator_output", "_validate_per_token_side_channels", "_validate_step_wise_fields")


class SkyRL(Plain):
    """All turns of a session are one trajectory, as its proxy records them."""

    package = "skyrl"
    native = "GeneratorOutput of lists"
    note = "merge_stepwise_output, metrics and checks included; functions run from the installed files"

    def __init__(self) -> None:
        known: dict[str, object] = {"np": np, "logger": logging.getLogger("skyrl"), "defaultdict": defaultdict}
        known["SAMPLE_SUPPORT_FIELD"] = "rollout_sample_support"
        self._utils = take("skyrl", _UTILS, _NAMES, known)
        sys.modules[_VALIDATES] = take("skyrl", f"{_VALIDATES.replace('.', '/')}.py", _CHECKS, known)

    def convert(self, read: list[Json]) -> Json:
        """Parallel lists, the reward on the last turn."""
        turns = len(read)
        return {
            "prompt_token_ids": [one["prompt_ids"] for one in read],
            "response_ids": [one["output_ids"] for one in read],
            "loss_masks": [[1] * len(one["output_ids"]) for one in read],
            "rollout_logprobs": [one["logprobs"] for one in read],
            "rewards": [0.0] * (turns - 1) + [1.0],
            "stop_reasons": ["stop"] * turns,
            "trajectory_ids": [_Trajectory()] * turns,
            "is_last_step": [False] * (turns - 1) + [True],
        }

    def merge(self, native: Json) -> Json:
        """Its own function."""
        return self._utils.merge_stepwise_output(native)

    def rows(self, merged: Json) -> list[Row]:
        """A row an entry."""
        entries = zip(
            merged["prompt_token_ids"], merged["response_ids"], merged["loss_masks"], merged["rollout_logprobs"],
            strict=True,
        )  # fmt: skip
        return [
            row(prompt + response, [0] * len(prompt) + mask, [0.0] * len(prompt) + logprobs)
            for prompt, response, mask, logprobs in entries
        ]


class SkyRLCore(SkyRL):
    """The part of it that merges one trajectory, without metrics and checks."""

    note = "its _merge_single_trajectory alone"

    def merge(self, native: Json) -> Json:
        """The step that `merge_stepwise_output` takes for each trajectory."""
        return self._utils._merge_single_trajectory(native)


class _Trajectory:
    """A trajectory's id, with the one method that is asked of it."""

    instance_id, repetition_id = "s", 0

    def to_string(self) -> str:
        return "s_0"
