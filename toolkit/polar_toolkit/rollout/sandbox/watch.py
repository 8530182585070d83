"""Limits that no kernel keeps for us: the disk that a sandbox's folders take, and where need be its memory.

Invariant: watching costs a bounded share of one core whatever the folders hold, and nothing of the event loop. It ends
nothing: who watches, kills. Not seen: files that were deleted and are still open, and folders that the watching user
may not read.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from polar_toolkit.rollout.task import Limits

_SHARE = 20  # one part of measuring on so many parts of waiting
_SHORTEST_S, _LONGEST_S = 0.25, 10.0
_BLOCK = 512  # the unit of st_blocks on every system


def disk_usage(folders: Sequence[Path]) -> int:
    """Bytes allocated below folders, a file with several links counted once. What vanishes meanwhile is not counted."""
    seen: set[tuple[int, int]] = set()
    pending: list[str | Path] = list(folders)
    total = 0
    while pending:
        try:
            entries = os.scandir(pending.pop())
        except OSError:  # vanished, or closed to us: what it holds cannot be told
            continue
        with entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                    is_folder = entry.is_dir(follow_symlinks=False)
                except OSError:  # vanished
                    continue
                if found.st_nlink > 1 and not is_folder:
                    if (found.st_dev, found.st_ino) in seen:
                        continue
                    seen.add((found.st_dev, found.st_ino))
                total += found.st_blocks * _BLOCK
                if is_folder:
                    pending.append(entry.path)
    return total


async def broken_limit(
    limits: Limits, folders: Sequence[Path], memory: Callable[[], int] | None
) -> Literal["disk", "memory"]:
    """Return when a limit is broken, else wait for ever. `memory` gives bytes; None where something else limits it."""
    while True:
        began = time.monotonic()
        broken = await asyncio.to_thread(_broken, limits, folders, memory)
        if broken:
            return broken
        cost = time.monotonic() - began
        await asyncio.sleep(min(max(_SHORTEST_S, _SHARE * cost), _LONGEST_S))


def _broken(
    limits: Limits, folders: Sequence[Path], memory: Callable[[], int] | None
) -> Literal["disk", "memory"] | None:
    if memory is not None and memory() > limits.memory_mb << 20:
        return "memory"
    if disk_usage(folders) > limits.disk_mb << 20:
        return "disk"
    return None
