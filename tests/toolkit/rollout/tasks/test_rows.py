"""Rows of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.task import Budget, Check, Environment, Task
from polar_toolkit.rollout.tasks import rows

ROW: dict[str, Any] = {
    "id": "r1", "instruction": "Do.", "image": "python:3.13", "workspace": "files", "tests": "judge",
    "prepare": ["make"], "workdir": "/srv", "env": {"A": "b"}, "init_s": 1, "run_s": 2, "post_s": 3, "turns": 4,
    "tokens": 5, "allow_hosts": ["data.example"], "check": {"kind": "command", "command": "true"},
    "metadata": {"level": 3},
}  # fmt: skip


def write(folder: Path, *lines: Any) -> Path:
    """A file of JSON lines, beside the folders that ROW names."""
    for name in ("files", "judge"):
        (folder / name).mkdir(exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_each_field_of_a_row_says_what_it_says(tmp_path: Path) -> None:
    """Folders lie beside the file."""
    assert rows.read(write(tmp_path, ROW)) == [
        Task(
            "r1",
            "Do.",
            Check("command", {"command": "true"}, tmp_path / "judge"),
            Environment("python:3.13", None, tmp_path / "files", (), ("make",), "/srv", {"A": "b"}),
            Budget(1, 2, 3, 4, 5),
            ("data.example",),
            {"format": "row", "level": 3},
        )
    ]


def test_parquet_says_the_same(tmp_path: Path) -> None:
    """A column that another row needs is null in this one."""
    path = write(tmp_path, ROW)
    pq.write_table(pa.Table.from_pylist([{**ROW, "surplus": None}]), tmp_path / "rows.parquet")
    assert rows.read(tmp_path / "rows.parquet") == rows.read(path)


def test_a_nested_instance_is_one_of_swe_bench(tmp_path: Path) -> None:
    """SkyRL's rows hold it in a column, as a table or as JSON."""
    instance = {
        "instance_id": "o__r-1", "repo": "o/r", "base_commit": "0123456", "problem_statement": "It fails.",
        "test_patch": "diff --git a/t.py b/t.py\n", "FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": [],
    }  # fmt: skip
    for nested in (instance, json.dumps(instance)):
        (task,) = rows.read(write(tmp_path, {"prompt": "x", "data_source": "swe-gym", "instance": nested}))
        assert (task.task_id, task.instruction, task.check.kind) == ("o__r-1", "It fails.", "swebench")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"rows.jsonl:1 is not JSON"),
        ("[1]", r"rows.jsonl:1 is '\[1\]': write a JSON object"),
        ({**ROW, "surplus": 1}, r"rows.jsonl:1: surplus is 'unknown'"),
        ({**ROW, "workspace": "nowhere"}, r"rows.jsonl:1: workspace is 'nowhere': .* has no such folder"),
        ({**ROW, "check": {"kind": "output", "command": "x"}}, r"check.command is 'x': a check of kind 'output'"),
        ({"id": "a", "check": {"kind": "command"}}, r"rows.jsonl:1: instruction is missing"),
        ({"instance": "{", "id": "a"}, r"rows.jsonl:1: instance is '\{': write a table, or the JSON of one"),
    ],
)
def test_a_slip_is_refused_with_its_row(line: Any, said: str, tmp_path: Path) -> None:
    """File, row, field, value."""
    with pytest.raises(Refusal, match=said):
        rows.read(write(tmp_path, line))


def test_another_file_is_refused(tmp_path: Path) -> None:
    """So is a Parquet file that is none."""
    (tmp_path / "rows.csv").touch()
    with pytest.raises(Refusal, match=r"neither .jsonl nor .parquet"):
        rows.read(tmp_path / "rows.csv")
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(Refusal, match="cannot be read as Parquet"):
        rows.read(tmp_path / "rows.parquet")
