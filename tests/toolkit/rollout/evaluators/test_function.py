"""A user's Python function as the judge."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from polar_toolkit.rollout.evaluators import Bench, EvaluatorError, Verdict
from polar_toolkit.rollout.evaluators.function import FUNCTION
from polar_toolkit.rollout.sandbox import Sandbox
from polar_toolkit.rollout.task import Check, Task

NO_SANDBOX = cast(Sandbox, None)  # nothing is run


def judge(folder: Path, callable_: str, source: str = "") -> Verdict:
    """What a function says of a workspace with one file."""
    (folder / "workspace").mkdir()
    (folder / "workspace" / "poem.txt").write_text("one\ntwo\n")
    (folder / "out").write_text("printed")
    (folder / "judge.py").write_text(source)
    task = Task("t", "Write.", Check("callable", {"callable": callable_}))
    return asyncio.run(
        FUNCTION.evaluate(Bench(task, NO_SANDBOX, folder / "out", folder / "workspace", folder, timeout_s=9))
    )


def test_a_function_of_a_file_says_the_reward(tmp_path: Path) -> None:
    """It gets the bench: the task, what was printed, and the workspace."""
    source = "def lines(bench): return len((bench.workspace / 'poem.txt').read_text().splitlines())\n"
    assert judge(tmp_path, f"{tmp_path}/judge.py:lines", source).reward == 2


def test_it_may_be_async_and_say_parts(tmp_path: Path) -> None:
    """A mapping with "reward"; the others are its parts."""
    source = "async def lines(bench): return {'reward': 0.5, 'lines': 2}\n"
    assert judge(tmp_path, f"{tmp_path}/judge.py:lines", source) == Verdict(0.5, {"lines": 2})


def test_a_function_of_a_module_is_imported(tmp_path: Path) -> None:
    """operator.truth says True, which is no reward."""
    with pytest.raises(EvaluatorError, match="callable 'operator:truth' is True: it has to be a finite number"):
        judge(tmp_path, "operator:truth")


def test_what_it_raises_is_the_judges_failure(tmp_path: Path) -> None:
    """With the traceback in the logs."""
    with pytest.raises(EvaluatorError, match=r"raised ZeroDivisionError.*see evaluation/callable.err"):
        judge(tmp_path, f"{tmp_path}/judge.py:lines", "def lines(bench): return 1 / 0\n")
    assert "ZeroDivisionError" in (tmp_path / "callable.err").read_text()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "write module:function"),
        ("nowhere.py:f", "is not there"),
        ("operator:nothing", "has no function 'nothing'"),
        ("no_such_module:f", "raised ModuleNotFoundError"),
    ],
)
def test_a_function_that_is_not_there_is_named(name: str, said: str, tmp_path: Path) -> None:
    """With what is missing."""
    with pytest.raises(EvaluatorError, match=said):
        judge(tmp_path, name)
