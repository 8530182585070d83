"""The example tasks, each judged in a real sandbox by its own evaluator: what is known to be good, and what is not.

The programs within them are the work and the judge of fix-median: stats.py, test_stats.py, check.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_toolkit.rollout import tasks
from tests.toolkit.rollout.judging import judged

TASKS = Path(__file__).parent.parent / "examples" / "tasks"
NAMES = sorted(path.name for path in TASKS.iterdir())
WRONG = sorted(f"{path.parent.parent.name}/{path.stem}" for path in TASKS.glob("*/wrong/*.sh"))
WRONG_OF = {name.split("/")[0]: f"wrong/{name.split('/')[1]}.sh" for name in WRONG}


def test_there_are_ten_tasks() -> None:
    """The folder is read as one list of ten, in the order of their names."""
    assert [task.task_id for task in tasks.read(TASKS)] == NAMES
    assert len(NAMES) == 10


@pytest.mark.parametrize("name", NAMES)
def test_the_known_solution_is_worth_1(name: str, tmp_path: Path) -> None:
    """solution/solve.sh, run where the harness would work."""
    (task,) = tasks.read(TASKS / name)
    assert judged(task, (TASKS / name / "solution" / "solve.sh").read_text(), tmp_path).reward == 1


@pytest.mark.parametrize("name", NAMES)
def test_no_work_is_worth_0(name: str, tmp_path: Path) -> None:
    """The workspace as it was, and nothing printed."""
    (task,) = tasks.read(TASKS / name)
    assert judged(task, "true", tmp_path).reward == 0


@pytest.mark.parametrize("name", WRONG)
def test_what_is_known_to_be_wrong_is_worth_0(name: str, tmp_path: Path) -> None:
    """Each script in wrong/."""
    folder, script = name.split("/")
    (task,) = tasks.read(TASKS / folder)
    assert judged(task, (TASKS / folder / "wrong" / f"{script}.sh").read_text(), tmp_path).reward == 0


def test_every_task_has_something_known_to_be_wrong() -> None:
    """A judge that says yes to all would be seen."""
    assert {name.split("/")[0] for name in WRONG} == set(NAMES)


def test_the_tasks_are_judged_alike_without_a_sandbox(tmp_path: Path) -> None:
    """Kind `process` has no /tests of its own: the scripts find what lies beside them."""
    for name in ("sort-csv", "fix-median", "capital"):
        (task,) = tasks.read(TASKS / name)
        for script, reward in {"solution/solve.sh": 1, WRONG_OF[name]: 0}.items():
            (tmp_path / name / script).mkdir(parents=True)
            work = (TASKS / name / script).read_text()
            assert judged(task, work, tmp_path / name / script, kind="process").reward == reward
