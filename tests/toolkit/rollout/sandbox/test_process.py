"""A process sandbox ends what it started, carries files, keeps limits by watching, and leaves nothing."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from polar_toolkit.rollout.sandbox import BUNDLE, CA, Command, Ended, Mount, Network, Plan, Sandbox, SandboxError
from polar_toolkit.rollout.sandbox.marked import VARIABLE, Marked
from polar_toolkit.rollout.sandbox.process import Process
from polar_toolkit.rollout.task import WORKDIR, Environment, Limits

DAEMONS = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "1000"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
print("started", flush=True)
time.sleep(float(sys.argv[1]))
"""


def scenario[T](folder: Path, act: Callable[[Sandbox], Awaitable[T]], **fields: object) -> T:
    """What an act in a fresh sandbox returns."""

    async def whole() -> T:
        kind = Process(folder, "run1")
        plan = Plan(**({"name": "a", "folder": folder / "box", "environment": Environment()} | fields))  # pyright: ignore[reportArgumentType]
        sandbox = await kind.create(plan)
        try:
            return await act(sandbox)
        finally:
            await sandbox.close()
            await kind.close()

    return asyncio.run(whole())


def shell(text: str, folder: Path, **fields: object) -> tuple[Ended, str]:
    """How a shell line ended, and what it printed."""
    log = folder / "log"
    ended = scenario(folder, lambda box: box.run(Command(("sh", "-c", text)), timeout_s=20, log=log), **fields)
    return ended, (folder / "log.out").read_text()


def test_a_command_runs_in_the_workspace_with_its_own_home(tmp_path: Path):
    """Output, errors and status come back; it starts in the workspace, and HOME is the sandbox's."""
    ended, printed = shell("pwd; echo $HOME; echo oops >&2; exit 3", tmp_path)
    assert (ended.status, ended.by) == (3, "itself")
    assert printed.splitlines() == [str(tmp_path / "box/workspace"), str(tmp_path / "box/home")]
    assert (tmp_path / "log.err").read_text() == "oops\n"


def test_the_environment_holds_nothing_of_the_host_but_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No key of the user's reaches a harness through its environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "the user's")
    _, printed = shell("env", tmp_path)
    names = {line.split("=")[0] for line in printed.splitlines()}
    assert "OPENAI_API_KEY" not in names
    assert {name for name in names if not name.upper().endswith("_PROXY")} == {
        "HOME", "LANG", "PATH", "PWD", "TMPDIR", VARIABLE,
    }  # fmt: skip


def test_paths_of_the_sandbox_stand_for_folders_of_the_host(tmp_path: Path):
    """What a task calls its working folder, /tests, /home/agent and /tmp is found where the host keeps it."""

    async def act(sandbox: Sandbox) -> str:
        (tmp_path / "check").mkdir()
        (tmp_path / "check" / "test.sh").write_text("echo judged > /dev/stdout")
        await sandbox.put(tmp_path / "check", "/tests")
        words = ("sh", "-c", f"echo hello > {WORKDIR}/a; cat {WORKDIR}/a; sh /tests/test.sh; echo $OUT; cat")
        command = Command(
            words, env={"OUT": f"/tmp/out:/home/agent/x:/elsewhere{WORKDIR}"}, stdin=f"look at {WORKDIR}".encode()
        )
        await sandbox.run(command, timeout_s=20, log=tmp_path / "log")
        return (tmp_path / "log.out").read_text()

    box = tmp_path / "box"
    printed = scenario(tmp_path, act).splitlines()
    assert printed == ["hello", "judged", f"{box}/tmp/out:{box}/home/x:/elsewhere{WORKDIR}", f"look at {box}/workspace"]


def test_a_path_of_the_host_that_begins_alike_is_left_alone(tmp_path: Path):
    """A program mounted from a folder of the working folder's name is not looked for in the workspace."""
    tools = f"{WORKDIR}/tools"
    _, printed = shell(f"echo {tools}/bin {WORKDIR}/mine", tmp_path, mounts=(Mount(Path(tools), tools),))
    assert printed == f"{tools}/bin {tmp_path}/box/workspace/mine\n"


def test_proxy_variables_name_the_session_and_its_certificates(tmp_path: Path):
    """The way out is the interceptor, with this session's credentials."""
    for name in ("bundle.pem", "ca.pem"):
        (tmp_path / name).write_text("")
    network = Network(("127.0.0.1", 4242), "s1", "secret", (), tmp_path / "bundle.pem", tmp_path / "ca.pem")
    variables = {"SSL_CERT_FILE": BUNDLE, "NODE_EXTRA_CA_CERTS": CA}
    _, printed = shell(
        "echo $https_proxy $SSL_CERT_FILE $NODE_EXTRA_CA_CERTS", tmp_path, network=network, variables=variables
    )
    assert printed.split() == ["http://s1:secret@127.0.0.1:4242", f"{tmp_path}/bundle.pem", f"{tmp_path}/ca.pem"]


def test_without_a_network_the_proxy_leads_nowhere(tmp_path: Path):
    """An evaluation's commands that heed the proxy reach nothing."""
    _, printed = shell("echo $HTTPS_PROXY", tmp_path)
    assert printed == "http://127.0.0.1:9\n"


@pytest.mark.parametrize(("seconds", "by"), [("0", "itself"), ("1000", "deadline")])
def test_daemons_are_ended_with_the_command(tmp_path: Path, seconds: str, by: str):
    """What a command leaves running, in sessions of its own and twice forked, does not outlive it."""
    words = ("python3", "-c", DAEMONS, seconds)
    ended = scenario(tmp_path, lambda box: box.run(Command(words), timeout_s=2, log=tmp_path / "log"))
    assert ended.by == by
    assert ended.seconds < 5
    assert (tmp_path / "log.out").read_text() == "started\n"
    assert Marked("run1").found() == {}


def test_a_child_without_environment_is_ended_with_its_parent(tmp_path: Path):
    """A process that dropped its mark is found as the descendant of one that has it."""
    name = f"1000.{tmp_path.stat().st_ino}"  # seconds that nobody else sleeps
    scenario(
        tmp_path,
        lambda box: box.run(
            Command(("sh", "-c", f"env -i setsid sleep {name} & sleep 1000")), timeout_s=1, log=tmp_path / "log"
        ),
    )
    assert not [p for p in psutil.process_iter(["cmdline"]) if name in (p.info["cmdline"] or [])]


def test_a_harness_that_ignores_sigterm_is_ended(tmp_path: Path):
    """Its deadline is kept, and its status says by which signal it ended."""
    ended = scenario(
        tmp_path,
        lambda box: box.run(
            Command(("sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done")),
            timeout_s=1,
            log=tmp_path / "log",
        ),
    )
    assert (ended.status, ended.by) == (137, "deadline")
    assert ended.seconds < 3


def test_a_full_disk_ends_it(tmp_path: Path):
    """A harness that writes more than its quota is ended, and the reason is told."""
    limits = Environment(limits=Limits(disk_mb=8))
    ended, _ = shell("dd if=/dev/zero of=big bs=1M count=9 2>/dev/null; sleep 1000", tmp_path, environment=limits)
    assert ended.by == "disk"
    quick, _ = shell("dd if=/dev/zero of=big bs=1M count=9 2>/dev/null", tmp_path, environment=limits)
    assert quick.by == "disk"  # it had ended before anybody looked


def test_too_much_memory_ends_it(tmp_path: Path):
    """A harness whose processes hold more than their limit together is ended, and the reason is told."""
    limits = Environment(limits=Limits(memory_mb=64))
    words = "import time; hold = bytearray(100 << 20); time.sleep(1000)"
    ended, _ = shell(f"python3 -c '{words}'", tmp_path, environment=limits)
    assert ended.by == "memory"


def test_a_kill_from_outside_is_told(tmp_path: Path):
    """`kill` ends a running command; its files stay."""

    async def act(sandbox: Sandbox) -> tuple[Ended, bool]:
        running = asyncio.create_task(
            sandbox.run(Command(("sh", "-c", "touch here; sleep 1000")), timeout_s=20, log=tmp_path / "log")
        )
        while not (tmp_path / "box" / "workspace" / "here").exists():
            await asyncio.sleep(0.01)
        await sandbox.kill()
        return await running, (tmp_path / "box" / "workspace" / "here").exists()

    ended, kept = scenario(tmp_path, act)
    assert (ended.by, kept) == ("killed", True)


def test_a_cancelled_run_leaves_nothing_running(tmp_path: Path):
    """Cancelling the wait ends the processes before it returns."""

    async def act(sandbox: Sandbox) -> None:
        run = sandbox.run(Command(("sh", "-c", "touch here; sleep 1000")), timeout_s=20, log=tmp_path / "log")
        running = asyncio.create_task(run)
        while not (tmp_path / "box" / "workspace" / "here").exists():
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert Marked("run1").found() == {}

    scenario(tmp_path, act)


def test_files_go_in_and_out(tmp_path: Path):
    """A folder's contents are put in, and what became of them is taken out; links stay links."""

    async def act(sandbox: Sandbox) -> None:
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "a").write_text("1")
        await sandbox.put(tmp_path / "in", WORKDIR)
        await sandbox.run(
            Command(("sh", "-c", "ln -s /etc/passwd link; echo 2 >> a")), timeout_s=20, log=tmp_path / "l"
        )
        await sandbox.take(WORKDIR, tmp_path / "out")

    scenario(tmp_path, act)
    assert (tmp_path / "out" / "a").read_text() == "12\n"
    assert (tmp_path / "out" / "link").is_symlink()


def test_a_link_does_not_lead_a_copy_out(tmp_path: Path):
    """What a harness links to is neither taken from the host through the link nor written to."""

    async def act(sandbox: Sandbox) -> None:
        await sandbox.run(Command(("sh", "-c", "ln -s /etc away")), timeout_s=20, log=tmp_path / "log")
        with pytest.raises(SandboxError, match="leads out of"):
            await sandbox.take(f"{WORKDIR}/away/passwd", tmp_path / "passwd")
        with pytest.raises(SandboxError, match="is a link"):
            await sandbox.put(tmp_path, f"{WORKDIR}/away")

    scenario(tmp_path, act)


@pytest.mark.parametrize(
    ("plan", "remedy"),
    [
        ({"environment": Environment(image="debian:12")}, "--sandbox docker"),
        ({"mounts": (Mount(Path("/usr"), "/opt"),)}, "--sandbox local"),
    ],
)
def test_what_needs_a_file_system_of_its_own_is_refused(tmp_path: Path, plan: dict[str, object], remedy: str):
    """An image, or a file in another place, cannot be given to a plain process."""
    with pytest.raises(SandboxError, match=remedy):
        shell("true", tmp_path, **plan)


def test_a_place_that_it_does_not_have_is_refused(tmp_path: Path):
    """Nothing is ever put among the host's own files."""
    with pytest.raises(SandboxError, match="--sandbox local"):
        scenario(tmp_path, lambda box: box.put(tmp_path, "/etc/thing"))


def test_a_missing_program_is_said(tmp_path: Path):
    """A command that cannot be started names the program and the PATH."""
    with pytest.raises(SandboxError, match="no program 'nothing-like-it' on PATH"):
        scenario(tmp_path, lambda box: box.run(Command(("nothing-like-it",)), timeout_s=1, log=tmp_path / "log"))


def test_sweep_ends_what_a_dead_runner_left(tmp_path: Path):
    """Processes that bear the run's mark are ended; those of another run are not."""
    marks = (Marked("run1").value("a"), Marked("run1").value("b"), Marked("other").value("a"))
    left = [subprocess.Popen(["sleep", "1000"], env={VARIABLE: mark}, start_new_session=True) for mark in marks]
    try:
        assert asyncio.run(Process(tmp_path, "run1").sweep()) == 2
        assert [process.wait(5) for process in left[:2]] == [-9, -9]
        assert left[2].poll() is None
    finally:
        for process in left:
            process.kill()
            process.wait()


def test_closing_removes_the_folder_whatever_was_made_of_it(tmp_path: Path):
    """A second close is no error."""

    async def act(sandbox: Sandbox) -> None:
        await sandbox.run(Command(("sh", "-c", "mkdir -p a/b; chmod 0 a/b a")), timeout_s=20, log=tmp_path / "log")
        await sandbox.close()
        assert not (tmp_path / "box").exists()

    scenario(tmp_path, act)


def test_the_price_is_said(tmp_path: Path):
    """The sentence of the kind begins with what it is."""
    assert asyncio.run(Process(tmp_path, "run1").check()).startswith("process: UNSAFE")


def test_sweep_removes_the_folders_that_a_dead_runner_left(tmp_path: Path):
    """What a killed runner had made is known to the next one of the run."""

    async def scenario() -> int:
        await Process(tmp_path, "run1").create(Plan("a", tmp_path / "box", Environment()))
        assert (tmp_path / "box").is_dir()
        return await Process(tmp_path, "run1").sweep()

    assert asyncio.run(scenario()) == 1
    assert not (tmp_path / "box").exists()
    assert asyncio.run(Process(tmp_path, "run1").sweep()) == 0
