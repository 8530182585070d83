"""A command run by a user with no rights at all, who nevertheless finds what this checkout needs, and has no way out.

Invariant: the command runs as nobody, without capabilities and without a way to gain any, in a network of its own with
only `lo`; nothing of the machine is changed, for what lies in folders that are closed to others is shown to it in a
mount namespace that ends with it. It needs root for that; anybody else is an unprivileged user already, who keeps the
machine's network.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar_train.small_models import cache_folder
from tests.bench.provisions import HARNESS_BIN, ROOT

USER = 65534
SECONDS = 280
_PROGRAMS = Path(sys.executable).parent


def run_as_nobody(
    command: Sequence[str | Path], folder: Path, *, env: Mapping[str, str] = {}, seconds: float = SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder that is given to it; standard output and error come back together.

    It has the environment of a user with the project's programs on PATH, and `env` on top.
    """
    own = environment(folder) | env
    folder.mkdir(parents=True, exist_ok=True)
    words: list[str | Path] = [*command]
    if os.geteuid() == 0:
        shutil.chown(folder, USER, USER)
        words = ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-ec", _script(folder, command)]
    return subprocess.run(
        words, cwd="/", env=own, timeout=seconds, check=False, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    """What the command sees."""
    return {
        "PATH": f"{HARNESS_BIN}:{_PROGRAMS}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "XDG_CACHE_HOME": str(cache_folder().parent),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


def needed() -> tuple[Path, ...]:
    """What of the machine the project's programs and tests read."""
    return ROOT, Path(sys.prefix), Path(sys.base_prefix), cache_folder()


def _script(folder: Path, command: Sequence[str | Path]) -> str:
    """Show what is needed under folders that are closed, then become nobody and the command."""
    shown = {path: closed for path in (*needed(), folder) if (closed := _closed(path))}
    stage = f"{_STAGE}"
    lines = ["ip link set lo up", f"mount -t tmpfs -o mode=0755 tmpfs {stage}"]
    for number, path in enumerate(shown):
        lines += [f"mkdir {stage}/{number}", f"mount --rbind {shlex.quote(f'{path}')} {stage}/{number}"]
    for closed in sorted(set(shown.values())):
        lines += [f"mount -t tmpfs -o mode=0755 tmpfs {shlex.quote(f'{closed}')}"]
    for number, path in enumerate(shown):
        place = shlex.quote(f"{path}")
        lines += [f"mkdir -p {place}", f"mount --rbind {stage}/{number} {place}"]
    become = f"setpriv --reuid {USER} --regid {USER} --clear-groups --bounding-set=-all --no-new-privs"
    return "\n".join([*lines, f"cd {shlex.quote(f'{folder}')}", f"exec {become} {shlex.join(map(str, command))}"])


_STAGE = Path("/mnt")
"""An empty folder of every machine, covered for the command alone."""


def _closed(path: Path) -> Path | None:
    """The outermost folder around a path through which only its owner gets."""
    return next((folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None)
