"""What pytest's report says of the expected tests. That nothing of a workspace steers it: test_reward_hacking.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_toolkit.rollout.evaluators import EvaluatorError
from polar_toolkit.rollout.evaluators.pytest import declared, outcomes, passing
from polar_toolkit.rollout.task import Check, Environment, Task
from tests.toolkit.rollout.judging import PYTHON, judged

REPORT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" tests="6">
<testcase classname="test_a" name="test_one" file="test_a.py" time="0.1" />
<testcase classname="deep.test_b.TestB.TestC" name="test_two[x::y]" file="deep/test_b.py" />
<testcase classname="deep.test_b.TestB.TestC" name="test_two[z]" file="deep/test_b.py"><failure>no</failure></testcase>
<testcase classname="test_a" name="test_skipped" file="test_a.py"><skipped /></testcase>
<testcase classname="test_a" name="test_torn_down" file="test_a.py" />
<testcase classname="test_a" name="test_torn_down" file="test_a.py"><error>at the end</error></testcase>
</testsuite></testsuites>"""


def test_a_report_is_read_by_the_ids_of_the_tests() -> None:
    """With classes and parameters; failed, skipped and badly torn down are not passed."""
    assert outcomes(REPORT) == {
        "test_a.py::test_one": True,
        "deep/test_b.py::TestB::TestC::test_two[x::y]": True,
        "deep/test_b.py::TestB::TestC::test_two[z]": False,
        "test_a.py::test_skipped": False,
        "test_a.py::test_torn_down": False,
    }


@pytest.mark.parametrize("report", ["", REPORT[:-30], "<testsuites />"])
def test_a_report_that_is_cut_short_says_nothing(report: str) -> None:
    """Nothing is known to have passed."""
    assert outcomes(report) == {}


def test_an_id_without_parameters_stands_for_all_its_cases() -> None:
    """One that failed is enough; a test that was not run has not passed."""
    found = {"a.py::t[1]": True, "a.py::t[2]": True, "a.py::u[1]": True, "a.py::u[2]": False}
    assert passing(["a.py::t", "a.py::u", "a.py::u[1]", "a.py::v"], found) == ["a.py::t", "a.py::u[1]"]


def test_expected_are_the_tests_that_stand_in_the_files(tmp_path: Path) -> None:
    """They are read and not run: what runs could leave some out."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "test_a.py").write_text("def test_one(): ...\ndef helper(): ...\nasync def test_two(): ...\n")
    (tmp_path / "deep" / "b_test.py").write_text("class TestB:\n  def test_x(self): ...\n  def setup(self): ...\n")
    (tmp_path / "conftest.py").write_text("def test_no(): ...\n")
    assert declared(tmp_path) == ["deep/b_test.py::TestB::test_x", "test_a.py::test_one", "test_a.py::test_two"]


def task(folder: Path, source: str, **options: object) -> Task:
    """A task with one test file and a conftest.py of its own."""
    (folder / "tests").mkdir()
    (folder / "tests" / "test_a.py").write_text(source)
    (folder / "tests" / "conftest.py").write_text("import pytest\n@pytest.fixture\ndef seven(): return 7\n")
    return Task("t", "Do.", Check("pytest", {"python": PYTHON, **options}, folder / "tests"), Environment())


def test_the_tasks_own_conftest_is_used(tmp_path: Path) -> None:
    """It comes from where the tests come from."""
    own = task(tmp_path, "from work import n\ndef test_a(seven): assert n == seven\ndef test_b(): assert n < 9\n")
    (tmp_path / "run").mkdir()
    verdict = judged(own, "echo 'n = 7' > work.py", tmp_path / "run")
    assert (verdict.reward, dict(verdict.parts), list(verdict.artifacts)) == (
        1,
        {"passed": 2, "expected": 2},
        ["junit"],
    )


def test_some_that_passed_are_no_success(tmp_path: Path) -> None:
    """The parts tell how many, the note which."""
    own = task(tmp_path, "def test_a(): pass\ndef test_b(): assert False\n")
    (tmp_path / "run").mkdir()
    verdict = judged(own, "true", tmp_path / "run")
    assert (verdict.reward, dict(verdict.parts)) == (0, {"passed": 1, "expected": 2})
    assert verdict.note == "1 of 2 tests did not pass, first 'test_a.py::test_b'"


def test_named_tests_alone_are_expected(tmp_path: Path) -> None:
    """The option `tests`."""
    own = task(tmp_path, "def test_a(): pass\ndef test_b(): assert False\n", tests=["test_a.py::test_a"])
    (tmp_path / "run").mkdir()
    assert judged(own, "true", tmp_path / "run").reward == 1


def test_a_task_without_tests_is_refused(tmp_path: Path) -> None:
    """Nothing expected would be everything passed."""
    with pytest.raises(EvaluatorError, match="no test is expected"):
        judged(Task("t", "Do.", Check("pytest", {"python": PYTHON})), "true", tmp_path)


def test_an_interpreter_without_pytest_is_the_tasks_fault(tmp_path: Path) -> None:
    """No report is worth 0 only where there could have been one."""
    (tmp_path / "run").mkdir()
    own = task(tmp_path, "def test_a(): pass\n", python="/usr/bin/false")
    with pytest.raises(EvaluatorError, match="'/usr/bin/false' has no pytest"):
        judged(own, "true", tmp_path / "run")


def test_without_a_sandbox_it_is_the_same(tmp_path: Path) -> None:
    """Kind `process` has places for the tests and for the report."""
    own = task(tmp_path, "from work import n\ndef test_a(seven): assert n == seven\n")
    for number, reward in {7: 1, 8: 0}.items():
        (tmp_path / str(number)).mkdir()
        assert judged(own, f"echo 'n = {number}' > work.py", tmp_path / str(number), kind="process").reward == reward
