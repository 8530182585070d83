"""A patch and a test patch in a fresh repository. What a harness may try meanwhile: test_reward_hacking.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polar_toolkit.rollout.evaluators import EvaluatorError
from polar_toolkit.rollout.task import Budget, Check, Environment, Task
from tests.toolkit.rollout.judging import PYTHON, judged
from tests.toolkit.rollout.repositories import CORRECT, make

COMMAND = f"{PYTHON} -m pytest -rA --tb=no -p no:cacheprovider tests/test_stats.py"
SOLVED = f"cat > stats.py <<'END'\n{CORRECT}END"


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """One new test that has to pass, one old one that has to stay so."""
    made = make(tmp_path / "repository")
    options = {
        "fail_to_pass": ["tests/test_stats.py::test_three"],
        "pass_to_pass": ["tests/test_stats.py::test_one"],
        "test_patch": made.test_patch,
        "test_command": COMMAND,
    }
    environment = Environment(workspace=made.folder, base_commit=made.base)
    return Task("t", "Correct it.", Check("swebench", options, carry="patch"), environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the work is done."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def changed(task: Task, **options: object) -> Task:
    """The task with other options."""
    return replace(task, check=replace(task.check, options={**task.check.options, **options}))


def test_a_solution_passes_both_lists(task: Task, folder: Path) -> None:
    """Reward 1, and each part 1."""
    verdict = judged(task, SOLVED, folder)
    assert (verdict.reward, dict(verdict.parts), verdict.note) == (1, {"f2p": 1, "p2p": 1}, "")


def test_no_work_passes_only_what_passed_before(task: Task, folder: Path) -> None:
    """Reward 0; the parts tell the lists apart."""
    verdict = judged(task, "true", folder)
    assert (verdict.reward, dict(verdict.parts)) == (0, {"f2p": 0, "p2p": 1})
    assert verdict.note == "1 of 2 tests did not pass, first 'tests/test_stats.py::test_three'"


def test_breaking_what_passed_before_is_no_solution(task: Task, folder: Path) -> None:
    """Although the new test passes."""
    verdict = judged(task, "echo 'def median(numbers): return 5' > stats.py", folder)
    assert (verdict.reward, dict(verdict.parts)) == (0, {"f2p": 1, "p2p": 0})


def test_a_harness_that_wrote_the_same_tests_is_judged_by_the_tasks(task: Task, folder: Path) -> None:
    """Its own versions give way, also where they would make the test patch fail."""
    own = "printf 'def test_three(): assert False\\n' > tests/test_stats.py; mkdir -p tests/more; touch tests/more/x"
    assert judged(task, f"{SOLVED}\n{own}", folder).reward == 1


def test_a_test_patch_that_does_not_fit_the_base_is_the_tasks_fault(task: Task, folder: Path) -> None:
    """No harness can help that."""
    broken = str(task.check.options["test_patch"]).replace("assert median([4]) == 4", "assert nothing")
    with pytest.raises(EvaluatorError, match="test_patch does not fit the base commit"):
        judged(changed(task, test_patch=broken), SOLVED, folder)


def test_tests_that_do_not_end_have_not_passed(task: Task, folder: Path) -> None:
    """The work made them hang: reward 0, within the budget of the stage."""
    hanging = replace(task, budget=Budget(post_s=8))
    verdict = judged(hanging, "printf 'import time\\ntime.sleep(60)\\n' > stats.py", folder)
    assert verdict.reward == 0
    assert verdict.note.startswith("the tests were ended by deadline; ")


def test_what_is_missing_is_named(task: Task, folder: Path) -> None:
    """Before anything is run."""
    for options, said in (({"fail_to_pass": []}, "fail_to_pass is empty"), ({"test_patch": ""}, "test_patch is empty")):
        with pytest.raises(EvaluatorError, match=said):
            judged(changed(task, **options), "true", folder)
        for left in folder.iterdir():
            left.rename(folder.parent / f"{left.name}-{len(said)}")


def test_files_are_not_judged_as_a_patch(task: Task, folder: Path) -> None:
    """The harness's own .git would tell which files are whose."""
    with pytest.raises(EvaluatorError, match="set carry to 'patch'"):
        judged(replace(task, check=replace(task.check, carry="workspace")), "true", folder)
