"""A source of tasks, whatever its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout import tasks

OUTPUT = '[check]\nkind = "output"\ncontains = "x"\n'


def write(folder: Path, toml: str = OUTPUT, instruction: str = "Do it.\n") -> Path:
    """A task's folder."""
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text(instruction)
    return folder


def test_a_folder_of_tasks_is_read_by_name(tmp_path: Path) -> None:
    """What is no task is passed by."""
    write(tmp_path / "b")
    write(tmp_path / "a")
    (tmp_path / "notes").mkdir()
    (tmp_path / "README.md").touch()
    assert [task.task_id for task in tasks.read(tmp_path)] == ["a", "b"]


def test_a_single_task_is_a_list_of_one(tmp_path: Path) -> None:
    """Its folder is given."""
    assert [task.task_id for task in tasks.read(write(tmp_path / "a"))] == ["a"]


def test_a_file_of_rows_is_read(tmp_path: Path) -> None:
    """By its name's end."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "r", "instruction": "Do.", "check": {"kind": "output", "contains": "x"}}\n')
    assert [task.task_id for task in tasks.read(rows)] == ["r"]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    """With what may be given."""
    with pytest.raises(Refusal, match=r"nowhere does not exist: give a task's folder"):
        tasks.read(tmp_path / "nowhere")


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    """With what a task is."""
    with pytest.raises(Refusal, match=r"holds no task: a task is a folder with task.toml and instruction.md"):
        tasks.read(tmp_path)


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    """Their groups would be one."""
    for name in ("a", "b"):
        write(tmp_path / name, f'id = "same"\n{OUTPUT}')
    with pytest.raises(Refusal, match="two tasks are called 'same'"):
        tasks.read(tmp_path)
