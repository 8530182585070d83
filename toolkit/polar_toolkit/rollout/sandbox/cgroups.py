"""Control groups for local sandboxes, where this process may make them: memory, CPU and processes, kept by the kernel.

Invariant: groups are made below the group that this process is in, or not at all, so that what limits us limits our
sandboxes; a group that was made is removed with its sandbox. Version 1 and version 2 of the kernel's interface; of
version 2 only a subtree that was delegated to us, which is what its rules ask for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from polar_toolkit.rollout.task import Limits

_CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_OWN_PIDS = 4
"""What a sandbox consists of besides the command's processes."""
_REMOVAL_S = 2.0
_PAUSE_S = 0.02
_LEAF = "polar-runner"


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The group of one sandbox."""

    folders: tuple[Path, ...]
    """One of version 2, or one for each controller of version 1."""

    def add(self, pid: int) -> None:
        """Move a process into it. Raises OSError."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def out_of_memory(self) -> bool:
        """Whether the kernel ended a process of it for its memory."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with suppress(OSError):  # of the other version, or the group is gone
                    if any(line.startswith("oom_kill ") and line[9:] != "0" for line in _lines(folder / name)):
                        return True
        return False

    def remove(self) -> None:
        """Remove it once its processes have ended; bounded in time. Raises OSError when one is left."""
        deadline = time.monotonic() + _REMOVAL_S
        for folder in self.folders:
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:  # busy: the kernel lets go of the dead a moment later
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_PAUSE_S)


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where groups can be made."""

    parents: tuple[Path, ...]
    prefix: str
    """Of the names of a run's groups."""

    def make(self, name: str, limits: Limits) -> Cgroup:
        """A group with these limits. Raises OSError."""
        group = Cgroup(tuple(parent / f"{self.prefix}{name}" for parent in self.parents))
        for folder in group.folders:
            folder.mkdir(exist_ok=True)
            for file, value in _settings(limits):
                if (folder / file).exists():  # each controller and each version has its own
                    (folder / file).write_text(value)
        return group

    def left(self) -> list[Cgroup]:
        """The groups of this run that exist."""
        return [Cgroup((folder,)) for parent in self.parents for folder in parent.glob(f"{self.prefix}*")]


def find(run_id: str, *, own: str | None = None, mounts: str | None = None) -> Cgroups | None:
    """Where this process may make groups, tried out; None where it may not.

    `own` and `mounts`: the contents of /proc/self/cgroup and /proc/self/mountinfo, unless they are this process's.
    """
    paths = _own_folders(
        Path("/proc/self/cgroup").read_text() if own is None else own,
        Path("/proc/self/mountinfo").read_text() if mounts is None else mounts,
    )
    prefix = f"polar-{run_id}-"
    for parents in (_version_2(paths), _version_1(paths)):
        found = Cgroups(parents, prefix)
        try:
            found.make("trial", Limits()).remove()
        except OSError:  # read-only or not ours: the usual case for a user
            continue
        if parents:
            return found
    return None


def _settings(limits: Limits) -> list[tuple[str, str]]:
    memory, pids = str(limits.memory_mb << 20), str(limits.pids + _OWN_PIDS)
    quota = int(limits.cpus * _PERIOD_US)
    return [
        ("memory.limit_in_bytes", memory),
        ("memory.memsw.limit_in_bytes", memory),
        ("memory.max", memory),
        ("memory.swap.max", "0"),
        ("pids.max", pids),
        ("cpu.cfs_period_us", str(_PERIOD_US)),
        ("cpu.cfs_quota_us", str(quota)),
        ("cpu.max", f"{quota} {_PERIOD_US}"),
    ]


def _own_folders(own: str, mounts: str) -> dict[str, Path]:
    """The folder of this process's group for each controller; "" for version 2."""
    paths = {
        name: path for _, names, path in (line.split(":", 2) for line in own.splitlines()) for name in names.split(",")
    }
    found: dict[str, Path] = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        for name in [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []:
            with suppress(KeyError, ValueError):  # no controller but an option; or not below what is mounted there
                found.setdefault(name, Path(point) / Path(paths[name]).relative_to(root))
    return found


def _version_1(paths: dict[str, Path]) -> tuple[Path, ...]:
    return tuple(paths[name] for name in _CONTROLLERS if name in paths)


def _version_2(paths: dict[str, Path]) -> tuple[Path, ...]:
    """The group that was delegated to us, made ready: only a group without processes of its own has groups below it."""
    folder = paths.get("")
    if folder is None or "memory" in paths or not _delegated(folder):
        return ()
    own = folder.parent if folder.name == _LEAF else folder
    try:
        _move_aside(own)
        (own / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in _CONTROLLERS))
    except OSError:  # read-only, or a controller is missing: no groups then
        return ()
    return (own,)


def _move_aside(own: Path) -> None:
    leaf = own / _LEAF
    leaf.mkdir(exist_ok=True)
    for pid in _lines(own / "cgroup.procs"):
        with suppress(ProcessLookupError):  # it has ended
            (leaf / "cgroup.procs").write_text(pid)


def _delegated(folder: Path, attribute: Callable[[Path, str], bytes] = os.getxattr) -> bool:
    """Whether the one who made this group has left it to us: systemd says so, and of a container it is the root."""
    if not os.access(folder / "cgroup.procs", os.W_OK):
        return False
    with suppress(OSError):  # no such attribute
        return attribute(folder, "user.delegate") == b"1"
    return folder.name == _LEAF or not (folder.parent / "cgroup.procs").exists()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
