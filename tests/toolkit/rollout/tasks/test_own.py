"""Our own task folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.task import Budget, Check, Environment, Limits, Task
from polar_toolkit.rollout.tasks import folders

WHOLE = """
id = "whole"
[metadata]
about = "all fields"
[agent]
timeout_sec = 30
max_turns = 5
max_tokens = 1000
allowed_hosts = ["data.example"]
[environment]
docker_image = "python:3.13"
build_timeout_sec = 10
cpus = 1.5
memory_mb = 512
storage_mb = 256
pids = 64
workdir = "/srv"
env = { A = "b" }
prepare = ["make"]
base_commit = "0123456789"
uploads = [{ source = "extra", target = "lib/extra" }]
[check]
kind = "pytest"
timeout_sec = 20
carry = "patch"
tests = ["test_a.py::test_a"]
"""


def write(folder: Path, toml: str) -> Path:
    """A task's folder with everything in it."""
    for name in ("workspace", "tests", "solution", "wrong", "extra"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Do it.\n")
    return folder


def test_each_field_says_what_it_says(tmp_path: Path) -> None:
    """All of them, once."""
    folder = write(tmp_path / "folder", WHOLE)
    assert folders.read(folder) == Task(
        "whole",
        "Do it.",
        Check("pytest", {"tests": ["test_a.py::test_a"]}, folder / "tests", "patch"),
        Environment(
            "python:3.13", None, folder / "workspace", ((folder / "extra", "lib/extra"),), ("make",), "/srv",
            {"A": "b"}, Limits(512, 1.5, 64, 256), "0123456789",
        ),
        Budget(10, 30, 20, 5, 1000),
        ("data.example",),
        {"format": "folder", "about": "all fields"},
    )  # fmt: skip


def test_a_check_is_enough(tmp_path: Path) -> None:
    """The folder's name is the id; all else is as everywhere."""
    folder = write(tmp_path / "small", '[check]\nkind = "command"\n')
    read = folders.read(folder)
    assert (read.task_id, read.budget) == ("small", Budget())
    assert read.environment == Environment(workspace=folder / "workspace")


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('[check]\nkind = "command"\n[agnet]\ntimeout_sec = 3\n', "agnet is 'unknown'"),
        ('[check]\nkind = "command"\n[agent]\ntimeout = 3\n', "agent.timeout is 'unknown'"),
        ('[check]\nkind = "command"\ncontains = "x"\n', "check.contains is 'x': a check of kind 'command' has"),
        ('[check]\nkind = "magic"\n', "no evaluator is called 'magic'"),
        ('[check]\nkind = "command"\ncarry = "all"\n', "check.carry is 'all': it is one of workspace, patch"),
        ('[check]\nkind = "command"\ntimeout_sec = "long"\n', "check.timeout_sec is 'long': write a number"),
        ('id = "a b"\n[check]\nkind = "command"\n', "id is 'a b': 1 to 80 letters"),
        ('[environment]\nuploads = [{ source = "nowhere", target = "x" }]\n[check]\nkind = "command"\n',
         r"environment.uploads\[0\].source is '.*nowhere': it does not exist"),
    ],
)  # fmt: skip
def test_a_slip_is_refused_with_file_field_and_value(toml: str, said: str, tmp_path: Path) -> None:
    """A field that is overlooked would be another task."""
    with pytest.raises(Refusal, match=said):
        folders.read(write(tmp_path / "t", toml))


def test_a_file_of_a_callable_lies_in_the_tasks_folder(tmp_path: Path) -> None:
    """A module stays a name."""
    folder = write(tmp_path / "a", '[check]\nkind = "callable"\ncallable = "judge.py:f"\n')
    assert folders.read(folder).check.options == {"callable": f"{folder}/judge.py:f"}
    folder = write(tmp_path / "b", '[check]\nkind = "callable"\ncallable = "judges.mine:f"\n')
    assert folders.read(folder).check.options == {"callable": "judges.mine:f"}
