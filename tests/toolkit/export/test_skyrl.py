"""SkyRL reads the export: its own TypedDict and its own validation of a step-wise GeneratorOutput."""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import pytest

from benchmarks.peers.installed import take


@pytest.fixture
def output(exported, loaded, as_module, peers):
    """What the documented loader makes, with SkyRL 0.4.0's TrajectoryID and GeneratorOutput."""
    known = {"dataclass": dataclass, "TypedDict": TypedDict, "ABC": ABC, "abstractmethod": abstractmethod, "Any": Any}
    base = "skyrl.train.generators.base"
    as_module(base, take("skyrl", "skyrl/train/generators/base.py", ["TrajectoryID", "GeneratorOutput"], known))
    exported("skyrl")
    return loaded("skyrl")["output"]


def test_every_trained_token_is_in_the_output_once(output, once):
    """Masks and logprobs are as long as their responses."""
    rows = zip(output["response_ids"], output["rollout_logprobs"], output["loss_masks"], strict=True)
    tokens = [one for row in rows for one in zip(*row, strict=True)]
    once([(token, logprob) for token, logprob, mask in tokens if mask], "one", "two")


def test_skyrl_finds_nothing_to_object_to(output):
    """Its check of step-wise output passes: lengths, the contiguity of sessions, the last step of each."""
    names = ["validate_generator_output", "_validate_per_token_side_channels", "_validate_step_wise_fields"]
    known = {"np": np, "logger": logging.getLogger("skyrl"), "SAMPLE_SUPPORT_FIELD": "rollout_sample_support"}
    checks = take("skyrl", "skyrl/train/utils/trainer_utils.py", names, known)
    checks.validate_generator_output(2, output, step_wise=True)


def test_the_last_row_of_a_session_has_its_reward(output):
    """Rows of one session share a TrajectoryID: the group, and the session's place in it."""
    assert output["rewards"] == [0.0, 0.0, 1.0, 0.0]
    assert output["is_last_step"] == [False, False, True, True]
    assert [one.to_string() for one in output["trajectory_ids"]] == ["g_0", "g_0", "g_0", "g_1"]
    assert output["stop_reasons"] == ["stop", "stop", "stop", "length"]
