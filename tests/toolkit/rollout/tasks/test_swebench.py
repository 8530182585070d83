"""Rows of SWE-bench and its kin."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.task import Task
from polar_toolkit.rollout.tasks import swebench
from polar_toolkit.rollout.tasks.fields import Fields

TEST_PATCH = (
    "diff --git a/tests/forms_tests/tests.py b/tests/forms_tests/tests.py\n--- a/x\n"
    "diff --git a/tests/data.json b/tests/data.json\n"
)
ROW: dict[str, Any] = {
    "instance_id": "astropy__astropy-12907", "repo": "astropy/astropy", "base_commit": "d16bfe05a744909de4b27f58",
    "problem_statement": "It is wrong.\n", "patch": "THE SOLUTION", "test_patch": TEST_PATCH, "hints_text": "A HINT",
    "FAIL_TO_PASS": '["a.py::t1"]', "PASS_TO_PASS": '["a.py::t2"]', "version": "4.3", "difficulty": "15 min",
}  # fmt: skip


def task(**changes: Any) -> Task:
    """The task of a row with other values."""
    return swebench.task(Fields("rows:1", {**ROW, **changes}))


def test_a_row_is_a_repository_and_a_check_of_its_tests() -> None:
    """What the harness is told, where it works, and how it is judged."""
    read = task()
    assert (read.task_id, read.instruction) == ("astropy__astropy-12907", "It is wrong.")
    assert (read.environment.workdir, read.environment.base_commit) == ("/testbed", ROW["base_commit"])
    assert (read.check.kind, read.check.carry) == ("swebench", "patch")
    assert read.check.options["fail_to_pass"] == ["a.py::t1"]
    assert read.check.options["pass_to_pass"] == ["a.py::t2"]


def test_solution_and_hints_are_not_carried_along() -> None:
    """Neither in the environment nor in the metadata."""
    read = task()
    said = json.dumps(dict(read.metadata)) + repr(read.environment) + read.instruction
    assert "SOLUTION" not in said
    assert "HINT" not in said
    assert read.metadata == {
        "format": "swebench", "instance_id": ROW["instance_id"], "repo": ROW["repo"], "ignored": ["difficulty"],
    }  # fmt: skip


def test_lists_and_small_letters_are_read_as_well() -> None:
    """As in rows that were derived."""
    read = task(FAIL_TO_PASS=None, fail_to_pass=["x"], PASS_TO_PASS=[])
    assert (read.check.options["fail_to_pass"], read.check.options["pass_to_pass"]) == (["x"], [])


@pytest.mark.parametrize(
    ("changes", "image"),
    [
        ({}, "swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"),
        ({"instance_id": "Project-MONAI__MONAI-3715", "repo": "Project-MONAI/MONAI"},
         "xingyaoww/sweb.eval.x86_64.project-monai_s_monai-3715:latest"),
        ({"image_name": "own/image:1"}, "own/image:1"),
        ({"docker_image": "own/image:2"}, "own/image:2"),
    ],
)  # fmt: skip
def test_the_image_is_the_rows_or_the_published_one(changes: dict[str, Any], image: str) -> None:
    """SWE-bench's scheme for its repositories, SWE-Gym's for all others."""
    assert task(**changes).environment.image == image


def test_the_tests_of_the_patch_are_run_as_the_repository_wants() -> None:
    """The Python files of the test patch; a row's own command goes before."""

    def options(**changes: Any) -> tuple[str, str]:
        found = task(**changes).check.options
        return found["test_command"], found["log_format"]

    assert options() == ("python -m pytest -rA --tb=no -p no:cacheprovider tests/forms_tests/tests.py", "pytest")
    assert options(repo="django/django") == (
        "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 forms_tests.tests", "unittest",
    )  # fmt: skip
    assert options(repo="sympy/sympy") == ("bin/test -C --verbose tests/forms_tests/tests.py", "sympy")
    assert options(test_cmd="make check") == ("make check", "pytest")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"FAIL_TO_PASS": "a.py::t1"}, "rows:1: FAIL_TO_PASS is 'a.py::t1': write a list of tests' names"),
        ({"PASS_TO_PASS": None}, "rows:1: PASS_TO_PASS is missing"),
        ({"base_commit": None}, "rows:1: base_commit is missing"),
        ({"test_patch": None}, "rows:1: test_patch is missing"),
    ],
)
def test_a_row_that_cannot_be_judged_is_refused(changes: dict[str, Any], said: str) -> None:
    """With row, field and value."""
    with pytest.raises(Refusal, match=said):
        task(**changes)
