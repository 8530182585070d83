"""Exit status or reward file, in a real sandbox."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar_toolkit.rollout.evaluators import EvaluatorError
from polar_toolkit.rollout.task import Budget, Check, Task
from tests.toolkit.rollout.judging import judged


def task(**options: Any) -> Task:
    """One that is judged by a command."""
    return Task("t", "Do it.", Check("command", options))


def test_the_exit_status_is_the_reward(tmp_path: Path) -> None:
    """0 is 1, any other is 0, and the note says which; the command runs where the harness worked."""
    for name, status in {"right": 0, "wrong": 3}.items():
        (tmp_path / name).mkdir()
        verdict = judged(task(command=f"grep -q {name} said && exit {status}"), f"echo {name} > said", tmp_path / name)
        assert (verdict.reward, verdict.note) == ((1, "") if status == 0 else (0, "exit status 3"))


def test_a_reward_file_says_any_number(tmp_path: Path) -> None:
    """Where the task says that its command writes one."""
    command = "echo 0.25 > /logs/verifier/reward.txt; exit 1"
    assert judged(task(command=command, reward_file=True), "true", tmp_path).reward == 0.25


def test_no_reward_file_is_no_reward(tmp_path: Path) -> None:
    """The command's failure, not the harness's."""
    with pytest.raises(EvaluatorError, match="status 0 and wrote neither"):
        judged(task(command="true", reward_file=True), "true", tmp_path)


def test_a_reward_file_of_the_harness_is_not_there(tmp_path: Path) -> None:
    """What it wrote beside its workspace stays in its own sandbox."""
    with pytest.raises(EvaluatorError, match="wrote neither"):
        judged(task(command="true", reward_file=True), "mkdir -p ~/verifier; echo 1 > ~/verifier/reward.txt", tmp_path)


def test_a_command_that_hangs_is_no_judge(tmp_path: Path) -> None:
    """It is ended before the stage is, and says so."""
    hanging = replace(task(command="sleep 60"), budget=Budget(post_s=1))
    with pytest.raises(EvaluatorError, match="was ended by deadline after 1 s"):
        judged(hanging, "true", tmp_path)


def test_without_a_command_it_is_the_tasks_test_script(tmp_path: Path) -> None:
    """tests/test.sh, as in Harbor; the harness's own file of that name is another."""
    tests = tmp_path / "of-the-task"
    tests.mkdir()
    (tests / "test.sh").write_text("test -e made && test ! -e /workspace/tests/made\n")
    (tmp_path / "run").mkdir()
    by_script = Task("t", "Do it.", Check("command", tests=tests))
    assert judged(by_script, "mkdir tests; echo 'exit 1' > tests/test.sh; touch made", tmp_path / "run").reward == 1
