"""A task as a folder: task.toml, instruction.md, and files. Whether it is our own format or Harbor's, the folder says.

Invariant: a folder whose task.toml has a table [check] is ours, any other is Harbor's; there is no third.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.task import Task
from polar_toolkit.rollout.tasks import harbor, own
from polar_toolkit.rollout.tasks.fields import Fields

FILE = "task.toml"
INSTRUCTION = "instruction.md"


def is_task(folder: Path) -> bool:
    """Whether a path is a folder with a task.toml."""
    return (folder / FILE).is_file()


def read(folder: Path) -> Task:
    """The task of a folder. Raises Refusal."""
    path = folder / FILE
    try:
        values = tomllib.loads(path.read_text())
        instruction = (folder / INSTRUCTION).read_text().strip()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no TOML
        raise Refusal(f"{path} and {INSTRUCTION} beside it cannot be read ({error}): see docs/tasks.md") from error
    if not instruction:
        raise Refusal(f"{folder / INSTRUCTION} is empty: write what the harness is to do")
    fields = Fields(str(path), values)
    return (own if fields.has("check") else harbor).task(folder, instruction, fields)
