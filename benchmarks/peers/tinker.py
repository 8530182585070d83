"""tinker-cookbook's `trajectory_to_data`, on transitions of tinker's ModelInput; it ends in tinker's own Datum."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch

from benchmarks.peers.contestants import Json, Plain, row
from benchmarks.peers.installed import take
from benchmarks.stage.grading import Row

_NAMES = (
    "trajectory_to_data", "_is_prefix", "_flat_ob_token_len", "_flat_ob_to_model_input", "_flatten_chunks",
    "_drop_first_position", "_drop_last_position",
)  # fmt: skip
_SHIFT = "create_rightshifted_model_input_and_leftshifted_targets"


class TinkerCookbook(Plain):
    """All turns of a session are one trajectory."""

    package = "tinker-cookbook"
    native = "Transitions of ModelInput"
    note = "trajectory_to_data, to Datum tensors, without provenance; functions run from the installed files"

    def __init__(self) -> None:
        self._tinker: Any = importlib.import_module("tinker")
        dataclass_names = {"dataclass": dataclasses.dataclass, "field": dataclasses.field, "tinker": self._tinker}
        self._types = take(
            "tinker-cookbook", "tinker_cookbook/rl/types.py", ["Transition", "Trajectory"], dataclass_names
        )
        completers = take("tinker-cookbook", "tinker_cookbook/completers.py", ["TokensWithLogprobs"], dataclass_names)
        self._tokens = completers.TokensWithLogprobs
        shift = take("tinker-cookbook", "tinker_cookbook/supervised/common.py", [_SHIFT], {"tinker": self._tinker})
        known = {
            "tinker": self._tinker, "torch": torch, "TensorData": self._tinker.TensorData, "dataclasses": dataclasses,
            "PARSE_ERROR_MASKED_METRIC_KEY": "masked", _SHIFT: getattr(shift, _SHIFT),
        }  # fmt: skip
        self._processing = take("tinker-cookbook", "tinker_cookbook/rl/data_processing.py", _NAMES, known)

    def convert(self, read: list[Json]) -> Any:  # Any: tinker-cookbook's Trajectory
        """Observations and actions; no provenance, which nothing here would use."""
        transitions = [
            self._types.Transition(
                ob=self._tinker.ModelInput.from_ints(one["prompt_ids"]),
                ac=self._tokens(one["output_ids"], one["logprobs"]),
                reward=0.0,
                episode_done=False,
            )
            for one in read
        ]
        return self._types.Trajectory(transitions, final_ob=self._tinker.ModelInput.empty())

    def merge(self, native: Any) -> list[Any]:  # Any: tinker-cookbook's Trajectory, tinker's Datum
        """Its own function."""
        return self._processing.trajectory_to_data(native, 1.0, include_provenance=False)

    def rows(self, merged: list[Any]) -> list[Row]:  # Any: tinker's Datum
        """A Datum's inputs are its tokens but the last, everything else is of its tokens but the first."""
        return [self._row(datum) for datum in merged]

    def _row(self, datum: Any) -> Row:  # Any: tinker's Datum
        inputs = {name: tensor.to_numpy().tolist() for name, tensor in datum.loss_fn_inputs.items()}
        first = datum.model_input.to_ints()[:1]
        return row(first + inputs["target_tokens"], [0, *inputs["mask"]], [0.0, *inputs["logprobs"]])
