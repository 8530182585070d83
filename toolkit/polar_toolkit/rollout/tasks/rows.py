"""Tasks as rows of a .jsonl or .parquet file: of SWE-bench and its kin, or rows of one's own.

Invariant: a row with FAIL_TO_PASS is one of SWE-bench's kind, any other has an instruction and a check of its own; an
error names the row. Rows of one's own:

    {"id": ..., "instruction": ..., "image": ..., "workspace": "folder beside the file", "check": {"kind": ...}, ...}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout import evaluators
from polar_toolkit.rollout.task import WORKDIR, Budget, Check, Environment, Task
from polar_toolkit.rollout.tasks import swebench
from polar_toolkit.rollout.tasks.fields import Fields, plain, task_id


def read(path: Path) -> list[Task]:
    """The tasks of a file, in its order. Raises Refusal."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise Refusal(f"{path} is neither .jsonl nor .parquet: give a file of rows, or a folder")
    lines = _of_parquet(path) if path.suffix == ".parquet" else _of_jsonl(path)
    return [_task(path.parent, f"{path}:{number}", row) for number, row in lines]


def _of_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:  # Any: JSON
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise Refusal(f"{path}:{number} is not JSON ({error}): correct or remove the line") from error
        if not isinstance(row, dict):
            raise Refusal(f"{path}:{number} is {line[:80]!r}: write a JSON object")
        yield number, row


def _of_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:  # Any: columns of any type
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise Refusal(f"{path} cannot be read as Parquet ({error}): write it anew") from error
    yield from enumerate(table.to_pylist(), start=1)


def _task(folder: Path, where: str, row: dict[str, Any]) -> Task:  # Any: JSON
    flat = {**row, **_nested(where, row.get("instance"))}
    flat.pop("instance", None)
    fields = Fields(where, flat)
    return swebench.task(fields) if swebench.is_one(fields) else _own(folder, fields)


def _nested(where: str, instance: Any) -> dict[str, Any]:  # Any: JSON
    """The table in which SkyRL's rows hold the instance, or its JSON where their columns differ."""
    try:
        found = json.loads(instance) if isinstance(instance, str) else instance or {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        Fields(where, {}).refuse("instance", instance, "write a table, or the JSON of one")
    return found


def _own(folder: Path, fields: Fields) -> Task:
    check, environment = fields.table("check"), _environment(folder, fields)
    kind = check.text("kind")
    known, options = evaluators.find(kind).options, check.rest()
    for name, value in options.items():
        if name not in known:
            check.refuse(name, value, f"a check of kind {kind!r} has the options {', '.join(sorted(known))}")
    default = Budget()
    read = Task(
        task_id=task_id(fields.text("id"), fields),
        instruction=fields.text("instruction"),
        check=Check(kind, options, _folder(folder, fields, "tests")),
        environment=environment,
        budget=Budget(
            init_s=fields.number("init_s", default.init_s),
            run_s=fields.number("run_s", default.run_s),
            post_s=fields.number("post_s", default.post_s),
            turns=fields.count("turns", None),
            tokens=fields.count("tokens", None),
        ),
        allow_hosts=fields.words("allow_hosts"),
        metadata={"format": "row", **plain(fields.table("metadata").rest())},
    )
    if left := fields.left():
        fields.refuse(left[0], "unknown", "there is no such field; docs/tasks.md lists them (or put it into metadata)")
    return read


def _environment(folder: Path, fields: Fields) -> Environment:
    return Environment(
        image=fields.text("image", default=""),
        workspace=_folder(folder, fields, "workspace"),
        prepare=fields.words("prepare"),
        workdir=fields.text("workdir", default=WORKDIR),
        variables=fields.texts("env"),
    )


def _folder(folder: Path, fields: Fields, name: str) -> Path | None:
    said = fields.text(name, default="")
    if said and not (folder / said).is_dir():
        fields.refuse(name, said, f"{folder} has no such folder")
    return folder / said if said else None
