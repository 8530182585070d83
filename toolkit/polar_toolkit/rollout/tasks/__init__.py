"""Where tasks come from: our own folders, Harbor's, rows of SWE-bench and SWE-Gym. One module for each format.

Invariant: what is read is complete and has names that are unique, or nothing is read. A field of our own format that we
do not know is refused, for it is a slip; of a foreign format it is listed in the task's metadata under "ignored".
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.task import Task
from polar_toolkit.rollout.tasks import folders, rows


def read(source: Path) -> list[Task]:
    """The tasks of a task's folder, of a folder of such folders (by name), or of a .jsonl or .parquet file of rows.

    Raises Refusal that names file, field, value and remedy.
    """
    source = source.resolve()
    if source.is_file():
        tasks = rows.read(source)
    elif folders.is_task(source):
        tasks = [folders.read(source)]
    elif source.is_dir():
        tasks = [folders.read(folder) for folder in sorted(source.iterdir()) if folders.is_task(folder)]
    else:
        raise Refusal(f"{source} does not exist: give a task's folder, a folder of them, or a .jsonl or .parquet file")
    if not tasks:
        raise Refusal(f"{source} holds no task: a task is a folder with {folders.FILE} and {folders.INSTRUCTION}")
    twice = [name for name, count in Counter(task.task_id for task in tasks).items() if count > 1]
    if twice:
        raise Refusal(f"{source}: two tasks are called {twice[0]!r}: give each an id of its own")
    return tasks
