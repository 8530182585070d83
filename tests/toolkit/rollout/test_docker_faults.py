"""What goes wrong in containers, and with the Docker engine itself, ends as the right row and leaves nothing behind.

Each test starts an engine of its own, for one of them kills it.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from polar_toolkit.rollout.interceptor import Interceptor
from polar_toolkit.rollout.outcome import Status
from polar_toolkit.rollout.sandbox import sandboxes
from polar_toolkit.rollout.sandbox.docker import RUN_LABEL
from tests.bench.census import census, nothing_left
from tests.bench.provisions import ROOT
from tests.bench.rolling import rolled, run_id_of
from tests.toolkit.rollout.test_faults import ASK, DAEMONS, WORK, engine, options, task

pytestmark = pytest.mark.slow


@pytest.fixture
def docker_engine() -> Generator[Path]:
    """The folder of an engine that this process's DOCKER_HOST names meanwhile."""
    folder = Path(tempfile.mkdtemp(prefix="dockerd-"))  # short: its socket's path may have 107 characters
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DOCKER_HOST", f"unix://{folder}/engine/docker.sock")
        _dockerd("start", folder)
        try:
            yield folder
        finally:
            _dockerd("stop", folder)
            shutil.rmtree(folder)


@pytest.fixture
def harness(tmp_path: Path) -> str:
    """`shell` without a Dockerfile: in an image that is made of the host's own programs."""
    folder = tmp_path / "harness"
    folder.mkdir()
    shutil.copy(ROOT / "harness_images" / "shell" / "harness.toml", folder)
    return str(folder)


def test_misbehaving_harnesses_end_with_their_containers(docker_engine: Path, harness: str, tmp_path: Path):
    """One that hangs, daemons and all, is judged by what it had done; no process, container or mount stays."""
    tasks = [
        task("hangs", f"{DAEMONS}; {ASK}; {WORK}; sleep 1000"),
        task("ignores-sigterm", f"trap '' TERM INT HUP; {ASK}; {WORK}; while :; do sleep 1; done"),
        task("daemons", f"{DAEMONS}; {ASK}; {WORK}"),
        task("does-nothing", "exit 0"),
    ]
    with engine() as served:
        asked = replace(options(tmp_path, served, "docker"), harness=harness)
        with nothing_left(tmp_path, label=f"{RUN_LABEL}={run_id_of(asked)}"):
            rows = asyncio.run(rolled(asked, tasks)).rows
    assert {name: (row.status, row.reward) for name, row in rows.items()} == {
        "hangs.1": (Status.TIMEOUT, 1.0),
        "ignores-sigterm.1": (Status.TIMEOUT, 1.0),
        "daemons.1": (Status.COMPLETED, 1.0),
        "does-nothing.1": (Status.HARNESS_ERROR, None),
    }, rows


def test_a_killed_docker_engine_costs_the_attempt_and_leaves_nothing(docker_engine: Path, harness: str, tmp_path: Path):
    """The row says that the sandbox was lost, soon; what stayed in the containers goes when the engine is back."""
    with engine() as served:
        asked = replace(options(tmp_path, served, "docker"), harness=harness)
        begun = tmp_path / "run" / "rollout" / "attempts" / "hangs.1" / "harness.out"
        label = f"{RUN_LABEL}={run_id_of(asked)}"

        async def kill_engine(_: Interceptor) -> None:
            async with asyncio.timeout(60):
                while not begun.exists() or "Hello" not in begun.read_text():
                    await asyncio.sleep(0.05)
            dockerd.kill()

        dockerd = psutil.Process(int((docker_engine / "engine" / "dockerd.pid").read_text()))
        before = census(tmp_path, label=label)
        rows = asyncio.run(rolled(asked, [task("hangs", f"{ASK}; {WORK}; sleep 1000", run_s=60)], kill_engine)).rows
        dockerd.wait(30)  # until it is reaped, by whoever that is: it counts as alive before
        _dockerd("start", docker_engine)
        asyncio.run(_swept(asked.run, run_id_of(asked)))
        after = census(tmp_path, label=label)
    row = rows["hangs.1"]
    assert (row.status, row.reward) == (Status.HARNESS_ERROR, None), row
    assert row.run_s < 30
    assert after == before


async def _swept(run: Path, run_id: str) -> None:
    kind = sandboxes("docker", run, run_id)
    await kind.check()
    await kind.sweep()
    await kind.close()


def _dockerd(what: str, folder: Path) -> None:
    subprocess.run([ROOT / "scripts" / "dockerd.sh", what, folder / "engine"], check=True, stdout=subprocess.DEVNULL)
