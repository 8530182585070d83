"""Harbor's test script and reward files, in a real sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polar_toolkit.rollout.evaluators import EvaluatorError
from polar_toolkit.rollout.task import Check, Task
from tests.toolkit.rollout.judging import judged


def task(folder: Path, script: str, **options: Any) -> Task:
    """One with a test script."""
    tests = folder / "of-the-task"
    tests.mkdir()
    (tests / "test.sh").write_text(f"#!/bin/bash\n{script}\n")
    return Task("t", "Do it.", Check("harbor", options, tests))


def test_reward_txt_is_the_reward(tmp_path: Path) -> None:
    """Whatever the script's exit status is; bash runs it, with the variables of the verifier."""
    script = '[[ -e made ]] && echo "$WORTH" > /logs/verifier/reward.txt; exit 7'
    assert judged(task(tmp_path, script, env={"WORTH": "0.5"}), "touch made", tmp_path).reward == 0.5


def test_reward_json_has_parts(tmp_path: Path) -> None:
    """The one called reward is the reward."""
    script = """echo '{"reward": 0.75, "speed": 3, "style": 0}' > /logs/verifier/reward.json"""
    verdict = judged(task(tmp_path, script), "true", tmp_path)
    assert (verdict.reward, dict(verdict.parts)) == (0.75, {"speed": 3, "style": 0})


def test_another_part_can_be_the_reward(tmp_path: Path) -> None:
    """As the option reward_key says."""
    script = """echo '{"correctness": 1, "speed": 3}' > /logs/verifier/reward.json"""
    assert judged(task(tmp_path, script, reward_key="correctness"), "true", tmp_path).reward == 1


def test_a_script_without_a_reward_is_no_judge(tmp_path: Path) -> None:
    """The message points to what it printed."""
    with pytest.raises(EvaluatorError, match=r"status 3 and wrote neither .* see evaluation/test.out"):
        judged(task(tmp_path, "exit 3"), "true", tmp_path)
