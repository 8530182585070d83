"""What a command and the processes that it starts take: seconds, and the peak of their resident memory together.

Invariant: memory is the sum of proportional set sizes (a page shared by two processes counts once), looked at every
100 ms, so a shorter peak is not seen. Linux only, as all of the stage.
"""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Used:
    """What a command took."""

    seconds: float
    cpu: float
    """CPU seconds of all its processes, which depend less than `seconds` on what else the machine does."""
    peak: float
    """MB, of all its processes together."""
    printed: str


def watched(command: Sequence[str]) -> Used:
    """Run a command to its end. Raises RuntimeError with what it printed when it fails."""
    peak, before = 0, resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    with TemporaryFile("w+") as written:
        with subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                peak = max(peak, sum(map(_proportional, _family(process.pid))))
                time.sleep(_SECONDS)
        seconds = time.perf_counter() - began
        written.seek(0)
        printed = written.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode}:\n{printed[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Used(seconds, cpu, peak / 1024, printed)


def _family(pid: int) -> list[int]:
    """A process and all below it."""
    family = [pid]
    for member in family:  # grows while it is read
        with suppress(OSError):  # it has ended
            for task in Path(f"/proc/{member}/task").iterdir():
                family += map(int, (task / "children").read_text().split())
    return family


def _proportional(pid: int) -> int:
    """Proportional set size in kB; 0 for a process that has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return 0
