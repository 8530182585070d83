"""Disk and memory of a sandbox are measured as they are allocated, and a broken limit is told."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from polar_toolkit.rollout.sandbox.watch import broken_limit, disk_usage
from polar_toolkit.rollout.task import Limits

MB = 1 << 20


def test_disk_usage_is_what_is_allocated(tmp_path: Path):
    """A megabyte in a folder of a folder counts; a sparse file, whose bytes are nowhere, does not."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "full").write_bytes(os.urandom(MB))
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(100 * MB)
    assert MB <= disk_usage([tmp_path]) < 2 * MB


def test_links_do_not_count_twice(tmp_path: Path):
    """A hard link is no second file, and a symbolic link is not followed."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "full").write_bytes(os.urandom(MB))
    (tmp_path / "b" / "link").hardlink_to(tmp_path / "a" / "full")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    assert disk_usage([tmp_path / "a", tmp_path / "b"]) < 2 * MB


def test_a_missing_folder_takes_nothing(tmp_path: Path):
    """A folder that is gone is no error."""
    assert disk_usage([tmp_path / "gone"]) == 0


def test_a_broken_disk_limit_is_told(tmp_path: Path):
    """The watch ends once the folders hold more than the limit."""
    (tmp_path / "full").write_bytes(os.urandom(2 * MB))
    assert asyncio.run(broken_limit(Limits(disk_mb=1), [tmp_path], None)) == "disk"


def test_a_broken_memory_limit_is_told(tmp_path: Path):
    """The watch ends once the processes hold more than the limit."""
    assert asyncio.run(broken_limit(Limits(memory_mb=1), [tmp_path], lambda: 2 * MB)) == "memory"


def test_a_kept_limit_is_watched_for_ever(tmp_path: Path):
    """Nothing is told while the limits hold, and a later measurement is made."""

    async def scenario() -> None:
        measured = iter([0, 0, 2 * MB])
        assert await broken_limit(Limits(memory_mb=1), [tmp_path], lambda: next(measured)) == "memory"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(broken_limit(Limits(), [tmp_path], None), 0.6)

    asyncio.run(scenario())
