"""One bubblewrap from its start to its end. How sandboxes use it: test_local.py."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Set
from pathlib import Path

import pytest

from polar_toolkit.rollout.sandbox import Mount, SandboxError, inside, seccomp
from polar_toolkit.rollout.sandbox.bubblewrap import INSIDE, OWN_ETC, Scene, python
from polar_toolkit.rollout.sandbox.capture import CappedFile
from polar_toolkit.rollout.sandbox.warm import Start, family, start

COMMAND = {"env": {"PATH": "/usr/bin"}, "cwd": "/tmp", "stdin": False, "pids": 50, "file_bytes": 1 << 20}


def descriptors() -> Set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def prepared(folder: Path, *, program: str = "bwrap") -> Start:
    (folder / "etc").mkdir()
    for name, text in OWN_ETC.items():
        (folder / "etc" / name).write_text(text)
    (folder / "tmp").mkdir()
    files = [Mount(Path(inside.__file__), INSIDE), *python()[1]]
    scene = Scene(folder / "etc", {"/tmp": folder / "tmp"}, files, as_root=False)
    return Start(program, scene, seccomp.program(), {"PATH": os.environ["PATH"]}, None, None)


def test_what_waits_is_one_family(tmp_path: Path):
    """The first process of its namespace and the one that waits; gone when it is killed, twice is once."""

    async def scene() -> tuple[list[int], list[int]]:
        warm = await start(prepared(tmp_path))
        before = family(warm.first)
        assert warm.memory() > 0
        await asyncio.gather(warm.kill(), warm.kill())
        return before, [pid for pid in before if Path(f"/proc/{pid}").exists()]

    before, after = asyncio.run(scene())
    assert len(before) == 2
    assert after == []


def test_a_command_is_begun_and_finished(tmp_path: Path):
    """Its streams are written, its status is returned."""

    async def scene() -> int:
        warm = await start(prepared(tmp_path))
        with CappedFile(tmp_path / "out") as out, CappedFile(tmp_path / "err") as err:
            await warm.begin({**COMMAND, "argv": ["sh", "-c", "echo hello; exit 7"]})
            status = await warm.finish(b"", out, err)
        await warm.kill()
        return status

    assert asyncio.run(scene()) == 7
    assert (tmp_path / "out").read_text() == "hello\n"


def test_a_command_for_a_dead_one_is_not_begun(tmp_path: Path):
    """Which is an error that allows to begin it elsewhere."""

    async def scene() -> None:
        warm = await start(prepared(tmp_path))
        warm.process.kill()
        await warm.process.wait()
        while Path(f"/proc/{warm.first}").exists():
            await asyncio.sleep(0.01)
        with pytest.raises(OSError, match=r"ended|reset|[Bb]roken"):
            await warm.begin({**COMMAND, "argv": ["true"]})
        await warm.kill()

    asyncio.run(scene())


def test_a_start_that_fails_says_why_and_leaves_no_descriptor(tmp_path: Path):
    """In bubblewrap's own words, or in the system's."""
    missing = prepared(tmp_path, program="/no/such/bwrap")
    (tmp_path / "tmp").rmdir()
    before = descriptors()
    with pytest.raises(SandboxError, match="/no/such/bwrap"):
        asyncio.run(start(missing))
    real = Start("/usr/bin/env", missing.scene, missing.filter, missing.mark, None, None)
    with pytest.raises(SandboxError, match=r"bubblewrap failed: .*env"):
        asyncio.run(start(real))
    assert descriptors() == before
