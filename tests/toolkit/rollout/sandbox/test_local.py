"""What a local sandbox does: files stay, processes do not, limits hold, nothing is left.

test_unprivileged.py runs all of this file once more, as a user without rights.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.sandbox import Command, Mount, Plan, SandboxError
from polar_toolkit.rollout.sandbox.local import Local
from polar_toolkit.rollout.sandbox.marked import VARIABLE
from polar_toolkit.rollout.task import Environment, Limits
from tests.toolkit.rollout.sandbox.rooms import ALLOWED, PLAIN, Room, Said, network, room

DAEMON = "(setsid bash -c 'trap \"\" TERM HUP; sleep 987654 & exec -a daemon sleep 987654' >/dev/null 2>&1 &);"
NESTED = "(setsid unshare --user --pid --fork --map-root-user sleep 987654 >/dev/null 2>&1 &);"


def sleepers() -> list[psutil.Process]:
    """What is left of the daemons that the tests start."""
    found = psutil.process_iter(["cmdline", "status"])
    return [each for each in found if "987654" in (each.info["cmdline"] or []) and each.info["status"] != "zombie"]


def bubblewraps() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if each.name() == "bwrap"]


def said(folder: Path, *scripts: str, environment: Environment = PLAIN, **more) -> list[Said]:
    """What came of these commands, one after another in one sandbox."""

    async def scene() -> list[Said]:
        async with room(folder, environment, **more) as made:
            return [await made.sh(script) for script in scripts]

    return asyncio.run(scene())


def test_a_command_runs_in_the_workspace_as_agent(tmp_path: Path):
    """It has a home, a name, a path, the variables of the environment and the plan, and nothing else."""
    environment = Environment(variables={"COLOUR": "blue", "SHAPE": "round"})
    (done,) = said(tmp_path, "pwd; whoami; env | sort", environment=environment, variables={"SHAPE": "flat"})
    where, who, *variables = done.out.splitlines()
    assert (where, who) == ("/workspace", "agent")
    assert {line.split("=")[0] for line in variables} == {
        "COLOUR", "HOME", "LANG", "LOGNAME", "PATH", "PWD", "SHAPE", "SHLVL", "USER", "_",
    }  # fmt: skip
    assert {"COLOUR=blue", "SHAPE=flat", "HOME=/home/agent"} <= set(variables)


def test_streams_and_status_are_the_commands_own(tmp_path: Path):
    """Output and errors are apart, input is read to its end, and an end by a signal is 128 + n."""

    async def scene() -> list[Said]:
        async with room(tmp_path) as made:
            return [
                await made.sh("cat; echo oops >&2; exit 3", stdin=b"x" * 300_000),
                await made.sh("kill -KILL $$"),
                await made.sh("exec cat"),
                await made.sh("head -c 1", stdin=b"y" * 300_000),
            ]

    first, killed, no_input, cut = asyncio.run(scene())
    assert (first.status, first.by, len(first.out), first.err) == (3, "itself", 300_000, "oops\n")
    assert (killed.status, killed.by) == (137, "itself")
    assert (no_input.status, no_input.out) == (0, "")
    assert (cut.status, cut.out) == (0, "y")


def test_a_program_that_is_not_there_is_a_status(tmp_path: Path):
    """As a shell says it: 127, with a sentence."""

    async def scene() -> tuple[int, str]:
        async with room(tmp_path) as made:
            ended = await made.sandbox.run(Command(("no-such",)), timeout_s=5, log=tmp_path / "log")
            return ended.status, (tmp_path / "log.err").read_text()

    assert asyncio.run(scene()) == (127, "no-such: No such file or directory\n")


def test_files_stay_and_processes_do_not(tmp_path: Path):
    """What a command wrote in its workspace, its home and /tmp is there for the next; what it left running is not."""
    write = f"echo 1 > w; echo 2 > ~/h; echo 3 > /tmp/t; {DAEMON} {NESTED} sleep 0.2"
    _, after = said(tmp_path, write, "cat w ~/h /tmp/t; ps -e -o comm= | grep -c sleep")
    assert after.out == "1\n2\n3\n0\n"
    assert sleepers() == []


def test_a_prewarmed_sandbox_starts_a_command_at_once(tmp_path: Path):
    """From the word to the end of `true`: less than 100 ms, the first time and the next."""

    async def scene() -> list[float]:
        async with room(tmp_path, network=network(1)) as made:
            taken: list[float] = []
            for _ in range(5):
                began = time.monotonic()
                await made.sh("true")
                taken.append(time.monotonic() - began)
                await asyncio.sleep(0.3)  # the next one is being warmed meanwhile
            return taken

    taken = asyncio.run(scene())
    print(f"\nms: {[round(each * 1000, 1) for each in taken]}")
    assert sorted(taken)[2] < 0.1


def test_without_a_network_there_is_no_way_out(tmp_path: Path):
    """No name resolves, no port of the web is open; the loopback device is there."""
    script = f"getent hosts {ALLOWED}; echo $?;"
    script += "(: < /dev/tcp/127.0.0.1/443); (: < /dev/tcp/192.0.2.1/443); cat /proc/net/dev"
    (done,) = said(tmp_path, script)
    assert done.out.startswith("2\n")
    assert "refused" in done.err
    assert "unreachable" in done.err
    assert [line.split(":")[0].strip() for line in done.out.splitlines()[3:]] == ["lo"]


def test_a_deadline_kills_everything(tmp_path: Path):
    """A command that ignores signals, daemons and nested namespaces end at the deadline; what was printed is kept."""

    async def scene() -> Said:
        async with room(tmp_path) as made:
            return await made.sh(f"trap '' TERM INT HUP; {DAEMON} {NESTED} echo begun; sleep 987654", timeout_s=0.7)

    done = asyncio.run(scene())
    assert (done.status, done.by, done.out) == (137, "deadline", "begun\n")
    assert 0.6 < done.seconds < 2
    assert sleepers() == []


def test_a_cancelled_run_kills_everything(tmp_path: Path):
    """Whoever stops waiting leaves nothing behind."""

    async def scene() -> None:
        async with room(tmp_path) as made:
            running = asyncio.create_task(made.sh(f"{DAEMON} touch begun; sleep 987654"))
            while not (tmp_path / "one" / "workspace" / "begun").exists():
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert sleepers() == []
            assert (await made.sh("echo still usable")).out == "still usable\n"

    asyncio.run(scene())


def test_kill_ends_the_command_and_leaves_the_files(tmp_path: Path):
    """The run says that it was killed; no process of the sandbox is left, not even one that waits."""

    async def scene() -> tuple[Said, list[psutil.Process], str]:
        async with room(tmp_path) as made:
            running = asyncio.create_task(made.sh(f"{DAEMON} echo 1 > begun; sleep 987654"))
            while not (tmp_path / "one" / "workspace" / "begun").exists():
                await asyncio.sleep(0.01)
            await made.sandbox.kill()
            killed = await running
            left = bubblewraps()
            return killed, left, (await made.sh("cat begun")).out

    killed, left, kept = asyncio.run(scene())
    assert (killed.by, killed.status, left, kept) == ("killed", 137, [], "1\n")
    assert sleepers() == []


@pytest.mark.parametrize("where", [".", "~", "/tmp"])
def test_a_full_disk_is_the_end(where: str, tmp_path: Path):
    """What the workspace, the home folder and /tmp take together is watched."""
    script = f"cd {where}; for n in $(seq 40); do head -c 4194304 /dev/zero > f$n; sleep 0.02; done; sleep 60"
    (done,) = said(tmp_path, script, environment=Environment(limits=Limits(disk_mb=20)))
    assert (done.by, done.status) == ("disk", 137)
    assert done.seconds < 15


def test_a_single_file_is_stopped_by_the_kernel(tmp_path: Path):
    """However quickly it grows."""
    (done,) = said(
        tmp_path, "head -c 1G /dev/zero > f; stat -c %s f", environment=Environment(limits=Limits(disk_mb=20))
    )
    assert done.by == "disk"
    assert int(done.out) <= 25 << 20


def test_too_much_memory_is_the_end(tmp_path: Path):
    """By the kernel where a control group can be made, else by watching."""
    hog = "a = []\nwhile True: a.append(bytearray(b'x' * (4 << 20))); time.sleep(0.01)"
    limits = Limits(memory_mb=120)
    (done,) = said(tmp_path, f'python3 -c "import time\n{hog}"; sleep 60', environment=Environment(limits=limits))
    assert done.by == "memory"
    assert done.seconds < 15


def test_a_fork_bomb_stays_in_its_sandbox(tmp_path: Path):
    """No more processes than the task allows; in another sandbox, meanwhile, commands start."""
    small = Environment(limits=Limits(pids=40))

    async def scene() -> tuple[Said, Said, int]:
        async with room(tmp_path, small) as one, room(tmp_path, small, name="two") as two:
            bomb = asyncio.create_task(one.sh("b() { b | b & b; }; b 2>/dev/null; sleep 1", timeout_s=2))
            await asyncio.sleep(1)
            processes = len(psutil.Process().children(recursive=True))
            calm = await two.sh("for n in $(seq 20); do sleep 0.5 & done; wait; echo calm")
            return await bomb, calm, processes

    bomb, calm, processes = asyncio.run(scene())
    assert calm.out == "calm\n", calm
    assert processes < 60
    assert bomb.by in ("deadline", "itself")


def test_what_is_put_belongs_to_the_agent(tmp_path: Path):
    """Files and folders land in any of the sandbox's folders, or in a new one, and can be written to."""
    given = tmp_path / "given"
    (given / "deep").mkdir(parents=True)
    (given / "deep" / "file").write_text("text\n")
    (given / "link").symlink_to("/etc/shadow")
    (given / "run.sh").write_text("echo ran")
    (given / "run.sh").chmod(0o755)

    async def scene() -> Said:
        async with room(tmp_path) as made:
            await made.sandbox.put(given, "/workspace")
            await made.sandbox.put(given / "run.sh", "/home/agent/.config/run.sh")
            await made.sandbox.put(given, "/tests")
            await made.sandbox.put(given / "run.sh", "/opt/own/tool.sh")
            await made.sandbox.put(given / "run.sh", "/tests/more/other.sh")
            return await made.sh(
                "set -e; cat deep/file; echo more >> deep/file; readlink link; ./run.sh; bash ~/.config/run.sh;"
                "cat /tests/deep/file; touch /tests/new; /opt/own/tool.sh; bash /tests/more/other.sh; stat -c %U deep ."
            )

    done = asyncio.run(scene())
    assert done.out.split() == ["text", "/etc/shadow", *["ran"] * 2, "text", *["ran"] * 2, "agent", "agent"], done
    assert done.status == 0, done
    assert (given / "deep" / "file").read_text() == "text\n"


def test_what_the_harness_made_of_links_leads_nowhere(tmp_path: Path):
    """Neither taking nor putting follows a link of the sandbox on the host."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (tmp_path / "file").write_text("overwritten")

    async def scene(made: Room) -> None:
        await made.sh(f"ln -s {outside} folder; ln -s {outside}/secret file; mkfifo pipe; mkdir d; chmod 000 d")
        await made.sandbox.take("/workspace", tmp_path / "taken")
        for source in ("/workspace/folder/secret", "/workspace/../../secret", "/etc/passwd"):
            with pytest.raises(SandboxError):
                await made.sandbox.take(source, tmp_path / "stolen")
        for target in ("/workspace/folder/secret", "/workspace/folder", "/workspace/file"):
            with pytest.raises(SandboxError):
                await made.sandbox.put(tmp_path / "file", target)

    async def whole() -> None:
        async with room(tmp_path) as made:
            await scene(made)

    asyncio.run(whole())
    assert not (tmp_path / "stolen").exists()
    assert (outside / "secret").read_text() == "secret"
    assert (tmp_path / "taken" / "folder").readlink() == outside
    assert sorted(each.name for each in (tmp_path / "taken").iterdir()) == ["d", "file", "folder"]


@pytest.mark.parametrize("target", ["/usr/bin/tool", "/proc/x", "/dev/x", "/lib/x", "/"])
def test_nothing_is_put_among_the_hosts_own(target: str, tmp_path: Path):
    """The sentence says what to use instead."""
    (tmp_path / "file").write_text("")

    async def scene() -> None:
        async with room(tmp_path) as made:
            with pytest.raises(SandboxError, match="--sandbox docker"):
                await made.sandbox.put(tmp_path / "file", target)

    asyncio.run(scene())


def test_a_start_that_is_not_waited_for_leaves_nothing(tmp_path: Path):
    """However early the one who wanted a sandbox gives up."""

    async def scene() -> None:
        kind = Local(tmp_path / "run", "tests")
        for number in range(25):
            plan = Plan(f"s{number}", tmp_path / f"s{number}", Environment(), network=network(1))
            creating = asyncio.create_task(kind.create(plan))
            with suppress(TimeoutError):
                await asyncio.wait_for(creating, number * 0.003)
            if creating.done() and not creating.cancelled():
                await creating.result().close()
        await kind.close()

    asyncio.run(scene())
    assert bubblewraps() == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_closing_removes_everything(tmp_path: Path):
    """Whatever modes, depths and daemons the harness left; twice is once."""
    kind = Local(tmp_path / "run", "tests")
    before = {path.name for path in Path("/proc/self/fd").iterdir()}

    async def scene() -> None:
        async with room(tmp_path, kind=kind, network=network(1)) as made:
            await made.sh(f"mkdir -p a/b; touch a/b/c; chmod 000 a/b a; chmod 000 . ~; {DAEMON} {NESTED} sleep 0.1")
            await made.sandbox.close()

    asyncio.run(scene())
    assert not (tmp_path / "one").exists()
    assert not (tmp_path / "run" / "rollout" / "local").exists()
    assert (sleepers(), bubblewraps()) == ([], [])
    assert {path.name for path in Path("/proc/self/fd").iterdir()} == before


def test_one_that_dies_while_it_waits_is_replaced(tmp_path: Path):
    """The command runs all the same."""

    async def scene() -> Said:
        async with room(tmp_path) as made:
            waiting = psutil.Process().children(recursive=True)
            for each in waiting:
                with suppress(psutil.NoSuchProcess):  # it ended with the one before
                    each.kill()
            while any(each.is_running() and each.status() != "zombie" for each in waiting):
                await asyncio.sleep(0.01)
            return await made.sh("echo well")

    assert asyncio.run(scene()).out == "well\n"


@pytest.mark.parametrize(
    ("environment", "more", "words"),
    [
        (Environment(image="python:3.13"), {}, "python:3.13"),
        (Environment(), {"mounts": (Mount(Path("/usr/bin"), "/workspace/bin"),)}, "within the sandbox's own folder"),
        (Environment(), {"mounts": (Mount(Path("/no/such"), "/no/such"),)}, "bubblewrap failed: .*no/such"),
    ],
    ids=["image", "mount in the workspace", "missing mount"],
)
def test_what_cannot_be_made_is_said(environment: Environment, more, words: str, tmp_path: Path):
    """And nothing of it is left."""

    async def scene() -> None:
        kind = Local(tmp_path / "run", "tests")
        with pytest.raises(SandboxError, match=words):
            await kind.create(Plan("one", tmp_path / "one", environment, **more))
        await kind.close()

    asyncio.run(scene())
    assert not (tmp_path / "one").exists()
    assert not list((tmp_path / "run").rglob("*.json"))


def test_the_check_says_what_holds(tmp_path: Path):
    """A sentence, after a sandbox was made, used and removed."""

    async def scene() -> str:
        kind = Local(tmp_path, "tests")
        sentence = await kind.check()
        await kind.close()
        return sentence

    sentence = asyncio.run(scene())
    assert sentence.startswith("local: bubblewrap")
    assert "control group" in sentence
    assert not list((tmp_path / "rollout").iterdir())


def test_a_machine_without_bubblewrap_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The check names the package."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refusal, match="install bubblewrap"):
        asyncio.run(Local(tmp_path, "tests").check())


RUNNER = """
import asyncio, sys
from pathlib import Path
from tests.toolkit.rollout.sandbox.rooms import Room, network, room
from polar_toolkit.rollout.sandbox.local import Local
async def main(folder):
    kind = Local(folder / "run", "dead")
    async with room(folder, kind=kind) as made, room(folder, name="idle", kind=kind):
        await made.sh(sys.argv[2] + " chmod 000 ~; touch begun; sleep 987654", timeout_s=100)
asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_dead_runner_leaves_no_process_and_its_folders_are_swept(tmp_path: Path):
    """kill -9 of the runner ends its sandboxes; the next runner removes what lies about, once."""
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, str(tmp_path), DAEMON + NESTED], env={**os.environ})
    try:
        while not (tmp_path / "one" / "workspace" / "begun").exists():
            assert runner.poll() is None
            time.sleep(0.02)
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    deadline = time.monotonic() + 5
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sleepers() == []
    assert not [each for each in psutil.process_iter() if marked(each)]

    async def sweep() -> list[int]:
        kind = Local(tmp_path / "run", "dead")
        swept = [await kind.sweep(), await kind.sweep()]
        await kind.close()
        return swept

    assert asyncio.run(sweep()) == [2, 0]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run"]
    assert not list((tmp_path / "run" / "rollout").iterdir())


def marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get(VARIABLE, "").startswith("dead/")
    except psutil.Error:
        return False
