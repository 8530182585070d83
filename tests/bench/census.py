"""What of a rollout is on the machine: processes, namespaces, mounts, containers, listeners, folders, open files.

Invariant: it looks and ends nothing, and counts only what belongs to one folder or to this process's own children, so
that other work on the machine does not matter. `assert census(...) == before` says what was left behind, by name.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import psutil

from polar_toolkit.rollout.sandbox.marked import VARIABLE

SETTLING_S = 3.0
"""For a test's own engine to close connections whose other end is gone."""


@dataclass(frozen=True, slots=True)
class Census:
    """Each field holds what was found, as text; two censuses are compared."""

    processes: frozenset[str]
    """Children of this process, and all whose mark, command, folder or mounts lead into the folder."""
    mounts: frozenset[str]
    listeners: frozenset[str]
    """Listening TCP sockets and bound UDP sockets of this process and its children."""
    folders: frozenset[str]
    """Whose names stand in the folder for temporary files, and sandboxes' in the run's."""
    containers: frozenset[str]
    descriptors: int
    """Of this process."""


def census(folder: Path, *, label: str = "") -> Census:
    """What there is of a run below `folder`; with a `label` (NAME=VALUE) of containers, those too."""
    processes = [process for process in psutil.process_iter() if _belongs(process, folder)]
    return Census(
        processes=frozenset(map(_described, processes)),
        mounts=frozenset(line for line in _text(Path("/proc/self/mountinfo")).splitlines() if str(folder) in line),
        listeners=frozenset(_listeners([psutil.Process(), *processes])),
        folders=frozenset(str(path) for path in _temporary(folder)),
        containers=frozenset(_containers(label)) if label else frozenset(),
        descriptors=len([*Path("/proc/self/fd").iterdir()]),
    )


@contextmanager
def nothing_left(folder: Path, *, label: str = "") -> Generator[None]:
    """The block leaves nothing behind: the census after it is the one before it, or is so within SETTLING_S."""
    before = census(folder, label=label)
    yield
    deadline = time.monotonic() + SETTLING_S
    while (after := census(folder, label=label)) != before and time.monotonic() < deadline:
        time.sleep(0.05)  # nobody tells when the last socket of another thread is closed
    assert after == before


def _belongs(process: psutil.Process, folder: Path) -> bool:
    if process.pid == os.getpid():
        return False
    with suppress(psutil.Error, OSError):  # it has ended meanwhile
        if process.status() == psutil.STATUS_ZOMBIE:
            return process.ppid() == os.getpid()  # ours to reap
        ours = os.getpid() in [parent.pid for parent in process.parents()]
        mark = process.environ().get(VARIABLE, "")
        places = [mark, process.cwd(), *process.cmdline(), _text(Path(f"/proc/{process.pid}/mountinfo"))]
        return ours or any(str(folder) in place for place in places)
    return False


def _described(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline()) or process.name()}"
    return f"{process.pid} (ended)"


def _listeners(processes: list[psutil.Process]) -> Iterator[str]:
    for process in processes:
        with suppress(psutil.Error):
            for found in process.net_connections("inet"):
                if found.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                    yield f"{found.type.name} {found.laddr}"


def _temporary(folder: Path) -> Iterator[Path]:
    yield from folder.glob("tmp/*")
    yield from folder.glob("run/rollout/*sandbox*/*")


def _containers(label: str) -> list[str]:
    docker = which("docker")
    assert docker, "docker is missing: apt-get install docker.io"
    done = subprocess.run(
        [docker, "ps", "--all", "--quiet", "--filter", f"label={label}"], capture_output=True, text=True, check=False
    )
    return done.stdout.split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # its process has ended
        return ""
