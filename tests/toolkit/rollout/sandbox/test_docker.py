"""What a docker sandbox does: files stay, processes do not, limits hold, nothing is left, whatever dies."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import docker
import psutil
import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.sandbox import Command, Mount, Plan, Sandbox, SandboxError
from polar_toolkit.rollout.sandbox.docker import Docker
from polar_toolkit.rollout.task import Environment, Limits
from tests.bench.provisions import ROOT
from tests.toolkit.rollout.sandbox.rooms import Room, Said, network, room

RUN_ID = "docker-tests"
PLAIN = Environment()
DAEMON = "(setsid bash -c 'trap \"\" TERM HUP; sleep 987653 & exec -a daemon sleep 987653' >/dev/null 2>&1 &);"


@asynccontextmanager
async def made(folder: Path, environment: Environment = PLAIN, **more) -> AsyncGenerator[Room]:
    """A docker sandbox while inside the block."""
    async with room(folder, environment, kind=Docker(folder, RUN_ID), **more) as one:
        yield one


def said(folder: Path, *scripts: str, environment: Environment = PLAIN, **more) -> list[Said]:
    """What came of these commands, one after another in one sandbox."""

    async def scene() -> list[Said]:
        async with made(folder, environment, **more) as one:
            return [await one.sh(script) for script in scripts]

    return asyncio.run(scene())


def sleepers() -> list[psutil.Process]:
    """What is left of the daemons that the tests start, anywhere on this machine."""
    found = psutil.process_iter(["cmdline", "status"])
    return [each for each in found if "987653" in (each.info["cmdline"] or []) and each.info["status"] != "zombie"]


def left() -> list[str]:
    """What the engine still holds of the tests' run."""
    with_label = {"label": f"polar.run={RUN_ID}"}
    client = docker.DockerClient(base_url=os.environ.get("DOCKER_HOST"))
    try:
        found = [each.id or "" for each in client.containers.list(all=True, filters=with_label)]
        return [*found, *(each.id or "" for each in client.volumes.list(filters=with_label))]
    finally:
        client.close()


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Generator[None]:
    yield
    assert left() == []
    assert sleepers() == []
    assert not (tmp_path / "one").exists()


def test_a_command_runs_in_the_workspace_as_agent(tmp_path: Path):
    """It has a home, a name, a path, and the variables of the environment and the plan, those of the plan first."""
    environment = Environment(variables={"COLOUR": "blue", "SHAPE": "round"})
    (done,) = said(tmp_path, "pwd; whoami; env", environment=environment, variables={"SHAPE": "flat"})
    assert done.out.splitlines()[:2] == ["/workspace", "agent"]
    assert {"COLOUR=blue", "SHAPE=flat", "HOME=/home/agent"} <= set(done.out.splitlines())


def test_streams_and_status_are_the_commands_own(tmp_path: Path):
    """Output and errors are apart, input is read to its end, and an end by a signal is 128 + n."""

    async def scene() -> list[Said]:
        async with made(tmp_path) as one:
            return [
                await one.sh("cat; echo oops >&2; exit 3", stdin=b"x" * 300_000),
                await one.sh("kill -KILL $$"),
                await one.sh("exec cat"),
                await one.sh("head -c 1", stdin=b"y" * 300_000),
                await one.sh("no-such"),
            ]

    first, killed, no_input, cut, missing = asyncio.run(scene())
    assert (first.status, first.by, len(first.out), first.err) == (3, "itself", 300_000, "oops\n")
    assert (killed.status, killed.by) == (137, "itself")
    assert (no_input.status, no_input.out) == (0, "")
    assert (cut.status, cut.out) == (0, "y")
    assert missing.status == 127


def test_files_stay_and_processes_do_not(tmp_path: Path):
    """What a command wrote in its workspace, its home and /tmp is there for the next; what it left running is not."""
    write = f"echo 1 > w; echo 2 > ~/h; echo 3 > /tmp/t; {DAEMON} sleep 0.2"
    _, after = said(tmp_path, write, "cat w ~/h /tmp/t; ps -e -o args= | grep -c [9]87653")
    assert after.out == "1\n2\n3\n0\n"


def test_a_command_that_kills_its_own_guard_leaves_nothing_for_the_next(tmp_path: Path):
    """Everything but the daemon is killed: the container is started anew."""
    script = f"touch w; {DAEMON} sleep 0.2; kill -9 $PPID; sleep 5"
    first, after = said(tmp_path, script, "ls; ps -e -o args= | grep -c [9]87653")
    assert first.status == 137
    assert after.out == "w\n0\n"


def test_orphans_are_reaped(tmp_path: Path):
    """No zombie is left of processes whose parents ended before them."""
    (done,) = said(tmp_path, "for i in 1 2 3; do (setsid true &) ; done; sleep 0.5; ps -e -o stat= | grep -c Z")
    assert done.out == "0\n"


def test_a_deadline_kills_everything(tmp_path: Path):
    """A command that ignores signals and its daemons end at the deadline; what was printed is kept."""

    async def scene() -> tuple[Said, Said]:
        async with made(tmp_path) as one:
            done = await one.sh(f"trap '' TERM INT HUP; {DAEMON} echo begun; touch w; sleep 987653", timeout_s=1.5)
            assert sleepers() == []
            return done, await one.sh("ls")

    done, after = asyncio.run(scene())
    assert (done.status, done.by, done.out) == (137, "deadline", "begun\n")
    assert 1.4 < done.seconds < 4
    assert after.out == "w\n"


def test_killing_ends_the_command_that_runs(tmp_path: Path):
    """Its end says so; files can still be taken."""

    async def scene() -> Said:
        async with made(tmp_path) as one:
            running = asyncio.create_task(one.sh(f"echo kept > file; {DAEMON} sleep 987653"))
            while not sleepers():
                await asyncio.sleep(0.02)
            await one.sandbox.kill()
            done = await running
            await one.sandbox.take("/workspace/file", tmp_path / "file")
            return done

    done = asyncio.run(scene())
    assert (done.status, done.by) == (137, "killed")
    assert (tmp_path / "file").read_text() == "kept\n"


def test_a_cancelled_run_kills_everything(tmp_path: Path):
    """Whoever stops waiting leaves nothing behind."""

    async def scene() -> None:
        async with made(tmp_path) as one:
            running = asyncio.create_task(one.sh(f"{DAEMON} sleep 987653"))
            while not sleepers():
                await asyncio.sleep(0.02)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert sleepers() == []

    asyncio.run(scene())


def test_memory_is_limited(tmp_path: Path):
    """What takes more is killed with all that runs beside it, also when its own parent would go on."""
    environment = Environment(limits=Limits(memory_mb=64))
    hog = "python3 -c 'bytearray(200 << 20)'"
    last, first, fine = said(tmp_path, hog, f"{hog}; echo survived; sleep 15", "echo fine", environment=environment)
    assert (last.by, first.by) == ("memory", "memory")
    assert first.seconds < 10
    assert (fine.out, fine.by) == ("fine\n", "itself")


def test_processes_are_limited(tmp_path: Path):
    """The one too many cannot be made."""
    few = Environment(limits=Limits(pids=30))
    (done,) = said(tmp_path, "for i in $(seq 60); do sleep 5 & done; wait", environment=few)
    assert "esource temporarily unavailable" in done.err


def test_the_disk_is_limited(tmp_path: Path):
    """A workspace that grows past the limit ends the command, and no file is larger than a quarter more."""
    small = Environment(limits=Limits(disk_mb=20))
    done, one_file = said(
        tmp_path, "while :; do head -c 1000000 /dev/zero >> $RANDOM; done", "rm *; head -c 90000000 /dev/zero > one",
        environment=small,
    )  # fmt: skip
    assert done.by == "disk"
    assert one_file.by == "disk" or "File size limit" in one_file.err
    assert done.seconds < 15


def test_the_root_is_read_only(tmp_path: Path):
    """Without an image of the task's own."""
    (done,) = said(tmp_path, "touch /x /etc/x /usr/x")
    assert done.err.count("Read-only file system") == 3


def test_put_and_take_keep_links_and_give_files_to_the_agent(tmp_path: Path):
    """A folder's contents, hidden files too; a link stays one, wherever it leads; pipes are left out."""
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / ".hidden").write_text("text")
    (source / "link").symlink_to("/etc/passwd")
    (source / "run").write_text("#!/bin/sh\necho ran")
    (source / "run").chmod(0o755)

    async def scene() -> Said:
        async with made(tmp_path) as one:
            await one.sandbox.put(source, "/workspace/some/where")
            await one.sandbox.put(source / "run", "/home/agent/.config/run")
            script = "cd some/where; ./run; ~/.config/run; echo more >> deep/er/.hidden; mkfifo pipe; stat -c %U ."
            done = await one.sh(script)
            await one.sandbox.take("/workspace/some", tmp_path / "taken")
            return done

    assert asyncio.run(scene()).out == "ran\nran\nagent\n"
    taken = tmp_path / "taken" / "where"
    assert (taken / "deep" / "er" / ".hidden").read_text() == "textmore\n"
    assert str((taken / "link").readlink()) == "/etc/passwd"
    assert os.access(taken / "run", os.X_OK)
    assert not (taken / "pipe").exists()


def test_taking_what_is_not_there_is_an_error(tmp_path: Path):
    """With the path in its sentence."""

    async def scene() -> None:
        async with made(tmp_path) as one:
            await one.sandbox.take("/workspace/no-such", tmp_path / "taken")

    with pytest.raises(SandboxError, match="no '/workspace/no-such'"):
        asyncio.run(scene())


def test_mounts_are_read_only(tmp_path: Path):
    """At the path that they are given."""
    (tmp_path / "program").write_text("of the host")
    mount = Mount(tmp_path / "program", "/opt/program")
    (done,) = said(tmp_path, "cat /opt/program; echo >> /opt/program", mounts=(mount,))
    assert done.out == "of the host"
    assert "Read-only" in done.err or "denied" in done.err


def test_the_image_of_a_dockerfile_is_built_once_and_written_to(tmp_path: Path):
    """Its variables hold, and its working folder, which was root's, is the agent's; the rest of it stays root's."""
    environment = Environment(dockerfile=image_of_its_own(tmp_path / "image"), workdir="/testbed")

    async def scene() -> list[str]:
        async with made(tmp_path, environment, network=network(1)) as one:
            assert one.sandbox.image.startswith("polar-task:")
            assert "@sha256:" in one.sandbox.image
            await one.sandbox.put(tmp_path / "image" / "Dockerfile", "/tests/put")
            first = await one.sh("pwd; cat file; echo $COLOUR; touch mine ~/mine /tmp/mine && ls /tests; touch /etc/x")
            await one.sandbox.kill()
            second = await one.sh("ls; ls ~ /tmp; cat /etc/resolv.conf")
            await one.sandbox.take("/testbed", tmp_path / "taken")
            return [first.out, first.err, second.out]

    first, refused, second = asyncio.run(scene())
    assert first == "/testbed\nof the image\nblue\nput\n"
    assert "Permission denied" in refused
    assert second.startswith("file\nmine\n/home/agent:\nmine\n\n/tmp:\nmine\nnameserver 127.0.0.53\n")
    assert sorted(path.name for path in (tmp_path / "taken").iterdir()) == ["file", "mine"]


def test_an_image_without_a_shell_is_an_error(tmp_path: Path):
    """With a sentence that says what it needs."""
    folder = tmp_path / "image"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /testbed/\n")
    with pytest.raises(SandboxError, match=r"cannot be given to the agent .it needs sh, mkdir and chown"):
        said(tmp_path, "true", environment=Environment(dockerfile=folder, workdir="/testbed"))


def image_of_its_own(folder: Path) -> Path:
    """A Dockerfile and what it needs for an image that holds a shell and a few programs of this machine."""
    root = folder / "root"
    for program in ("sh", "bash", "cat", "ls", "touch", "mkdir", "chown", "sleep", "head"):
        path = Path(shutil.which(program) or "").resolve()
        copy(path, root / "usr" / "bin" / program)
        for library in re.findall(r"(/\S+)", subprocess.check_output(["ldd", path], text=True)):
            copy(Path(library).resolve(), root / library.lstrip("/"))
    (root / "bin").symlink_to("usr/bin")
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    (root / "testbed").mkdir()
    (root / "testbed" / "file").write_text("of the image\n")
    (folder / "Dockerfile").write_text("FROM scratch\nADD root /\nENV COLOUR=blue\n")
    return folder


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def test_an_image_that_nobody_has_is_an_error(tmp_path: Path):
    """With its name in the sentence."""
    with pytest.raises(SandboxError, match=r"localhost:9/no-such"):
        said(tmp_path, "true", environment=Environment(image="localhost:9/no-such:1"))


def test_a_sweep_removes_what_a_dead_runner_left(tmp_path: Path):
    """By label: containers, volumes and folders of this run, and of no other."""

    async def scene() -> None:
        dead, alive = Docker(tmp_path, RUN_ID), Docker(tmp_path, f"{RUN_ID}-other")
        await dead.create(Plan("one", tmp_path / "one", Environment()))
        other = await alive.create(Plan("other", tmp_path / "other", Environment()))
        await dead.close()
        swept = Docker(tmp_path, RUN_ID)
        assert await swept.sweep() == 1
        assert await swept.sweep() == 0
        await swept.close()
        assert (await other.run(Command(("true",)), timeout_s=20, log=tmp_path / "log")).status == 0
        await other.close()
        await alive.close()

    asyncio.run(scene())


def test_the_check_says_what_holds(tmp_path: Path):
    """It tried one out."""

    async def scene() -> str:
        kind = Docker(tmp_path, RUN_ID)
        try:
            return await kind.check()
        finally:
            await kind.close()

    assert "no network but the interceptor" in asyncio.run(scene())


def test_an_engine_that_is_not_there_is_a_sentence_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A refusal of the check that says how to start one; closing does nothing then."""
    socket_of = os.environ.get("DOCKER_HOST")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")

    async def scene() -> None:
        kind = Docker(tmp_path, RUN_ID)
        try:
            await kind.check()
        finally:
            await kind.close()

    began = time.monotonic()
    with pytest.raises(Refusal, match=r"does not answer.*scripts/dockerd.sh start"):
        asyncio.run(scene())
    assert time.monotonic() - began < 5
    if socket_of:
        monkeypatch.setenv("DOCKER_HOST", socket_of)
    else:
        monkeypatch.delenv("DOCKER_HOST")


@dataclass(frozen=True, slots=True)
class SecondEngine:
    """An engine that a test may kill."""

    folder: Path

    def start(self) -> str:
        """Its DOCKER_HOST."""
        script = ROOT / "scripts" / "dockerd.sh"
        printed = subprocess.check_output([script, "start", self.folder], text=True, timeout=60)
        return printed.strip().partition("=")[2]

    def kill(self) -> None:
        pid = int((self.folder / "dockerd.pid").read_text())
        os.kill(pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
        (self.folder / "dockerd.pid").unlink()

    def stop(self) -> None:
        subprocess.run([ROOT / "scripts" / "dockerd.sh", "stop", self.folder], check=True, timeout=90)


@pytest.fixture
def second_engine(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecondEngine]:
    engine = SecondEngine(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.stop()


def test_a_killed_engine_ends_the_command_with_a_sentence_and_leaves_nothing_once_it_is_back(
    tmp_path: Path, second_engine: SecondEngine
):
    """The run raises at once, closing does not hang, and after a restart of the engine a sweep finds what was left."""
    host = second_engine.start()

    async def scene() -> None:
        kind = Docker(tmp_path, RUN_ID)
        sandbox = await kind.create(Plan("one", tmp_path / "one", Environment(), network=network(1)))
        running = asyncio.create_task(sandbox.run(Command(("sleep", "987653")), timeout_s=60, log=tmp_path / "log"))
        while not sleepers():
            await asyncio.sleep(0.02)
        second_engine.kill()
        began = time.monotonic()
        with pytest.raises(SandboxError, match="does not answer"):
            await running
        await close(sandbox)
        await kind.close()
        assert time.monotonic() - began < 10
        assert second_engine.start() == host
        again = Docker(tmp_path, RUN_ID)
        assert await again.sweep() == 1
        assert await again.sweep() == 0
        await again.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", host)
        asyncio.run(scene())
        assert left() == []


async def close(sandbox: Sandbox) -> None:
    """Twice, as anybody may."""
    await sandbox.close()
    await sandbox.close()
