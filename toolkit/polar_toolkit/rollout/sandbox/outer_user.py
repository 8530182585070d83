"""Who the processes of a local sandbox are on the machine, seen from outside.

Invariant: they are never anybody with rights: where root starts sandboxes, each has a user id that nobody else has, so
that neither root's files nor another sandbox's processes are its own; where a user does, they are that user, in a
namespace. A root that may not become others stays root in name, without any capability. It changes nobody's identity
itself (inside.py does).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_FIRST, _MANY = 2_000_000_000, 100_000_000
"""Ids that no system gives to anybody."""
_NOBODY = 65534
_RIGHTS = (1 << 6) | (1 << 7) | (1 << 12) | (1 << 21)
"""CAP_SETGID, CAP_SETUID, CAP_NET_ADMIN, CAP_SYS_ADMIN: what a root has that was not stripped of it."""


def outer_user(uid: int, status: str, uid_map: str) -> int | None:
    """The id for one more sandbox, chosen at random; None for whoever we are.

    `uid`: ours. `status` and `uid_map`: the contents of these two files in /proc/self.
    """
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    if uid or int(effective.split()[1], 16) & _RIGHTS != _RIGHTS:
        return None
    ranges = [list(map(int, line.split())) for line in uid_map.splitlines()]
    if any(first <= _FIRST and first + count >= _FIRST + _MANY for first, _, count in ranges):
        return _FIRST + secrets.randbelow(_MANY)
    return _NOBODY  # a container that does not know so many


def new_outer_user() -> int | None:
    """The same for this process."""
    here = Path("/proc/self")
    return outer_user(os.geteuid(), (here / "status").read_text(), (here / "uid_map").read_text())


def give(place: Path, uid: int) -> None:
    """Make a file, or a folder with all that is in it, the user's. No process of the sandbox may run meanwhile."""
    os.chown(place, uid, uid, follow_symlinks=False)
    for folder, folders, files in os.walk(place):
        for name in (*folders, *files):
            os.chown(Path(folder) / name, uid, uid, follow_symlinks=False)
