"""Processes that belong to a sandbox, known by a variable in their environment and by their parents.

Invariant: what is ended here carries the mark of this run, or descends from what does, or is in the process group that
its caller names. A process that loses all three at once (an empty environment, a session of its own, a parent that
ended) is not found: sandboxes that must hold it use namespaces.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

VARIABLE = "POLAR_SANDBOX"
"""Its value is RUN_ID/NAME of the sandbox."""
_FRESH_S = 0.5
_PAUSE_S = 0.02


class Marked:
    """The processes of all sandboxes of a run. Blocking: call it from a thread."""

    def __init__(self, run_id: str) -> None:
        self._prefix = f"{run_id}/"
        self._lock = threading.Lock()
        self._memory: dict[str, int] = {}
        self._measured = float("-inf")

    def value(self, name: str) -> str:
        """The mark of a sandbox."""
        return self._prefix + name

    def found(self) -> dict[str, list[psutil.Process]]:
        """The living processes of each sandbox, by its name."""
        found: dict[str, list[psutil.Process]] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or is another user's: not one of ours
                mark = process.environ().get(VARIABLE, "")
                if mark.startswith(self._prefix):
                    found.setdefault(mark.removeprefix(self._prefix), []).append(process)
        return {name: _with_descendants(processes) for name, processes in found.items()}

    def memory(self, name: str) -> int:
        """Resident bytes of a sandbox's processes; pages that they share count for each.

        One look at the machine serves all sandboxes that ask within half a second.
        """
        with self._lock:
            if time.monotonic() > self._measured + _FRESH_S:
                self._memory = {name: sum(map(_resident, processes)) for name, processes in self.found().items()}
                self._measured = time.monotonic()
            return self._memory.get(name, 0)

    def end(self, names: Iterable[str] | None, *, group: int | None = None, within_s: float = 5.0) -> int:
        """Kill the processes of these sandboxes (of all of the run: None), and a process group, until none is left.

        Returns how many are left after `within_s`: 0 unless the kernel holds them.
        """
        wanted = None if names is None else set(names)
        deadline = time.monotonic() + within_s
        while True:
            left = {p for name, some in self.found().items() if wanted is None or name in wanted for p in some}
            left |= _members(group) if group is not None else set()
            for process in left:
                with suppress(psutil.NoSuchProcess):  # it has ended by itself
                    process.kill()
            if not left or time.monotonic() > deadline:
                return len(left)
            time.sleep(_PAUSE_S)


def _members(group: int) -> set[psutil.Process]:
    """Of a process group. One that holds only zombies has ended, whoever is slow to reap them."""
    members: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):  # it has ended
            if os.getpgid(process.pid) == group and _alive(process):
                members.add(process)
    return members


def _with_descendants(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Children may have dropped their environment. Zombies have ended: their parent is to be waited for, not they."""
    family = set(processes)
    for process in processes:
        with suppress(psutil.Error):
            family.update(process.children(recursive=True))
    return [process for process in family if _alive(process)]


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it has ended
        return False


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has ended
        return 0
