"""The mitmdump of a rollout: private, alone, kept alive, and gone with its runner."""

from __future__ import annotations

import asyncio
import signal
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from polar_mitm.identity import register, seal
from polar_mitm.journal import read_calls
from polar_toolkit import environment
from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.harnesses.scripted_engine import ScriptedEngine
from polar_toolkit.rollout.interceptor import Figures, Interceptor, SessionFigures
from tests.bench.provisions import ROOT, qwen3_tokenizer

PATIENCE = 60.0
_RUNNER = """
import asyncio, os, signal, sys
from pathlib import Path
from polar_toolkit.rollout.interceptor import Interceptor

async def die():
    await Interceptor(Path(sys.argv[1]), {"polar_engine": sys.argv[2]}).start()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(die())
"""


@pytest.fixture(scope="module")
def engine() -> Generator[str]:
    """The URL of an engine that says two tokens."""
    with ScriptedEngine(qwen3_tokenizer(), lambda _: "Hello.").serving() as engine:
        yield engine.url


@dataclass(frozen=True, slots=True)
class Lived:
    """What one interceptor did, from its start to its end."""

    run: Path
    first: environment.Proxy
    modes: dict[str, int]
    statuses: list[int]
    """Of the session's calls: one, one behind a restart, one above its two turns, a late one."""
    idle: Figures
    before: Figures
    """After the first call."""
    after: Figures
    """After the restart, before the second."""
    end: Figures
    second: environment.Proxy
    restarts: int
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def lived(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Lived:
    return asyncio.run(live(tmp_path_factory.mktemp("rollout") / "run", engine))


async def live(run: Path, engine: str) -> Lived:
    interceptor = Interceptor(run, {"polar_engine": engine})
    await interceptor.start()
    first, idle = interceptor.proxy, await interceptor.figures(["nobody"])
    modes = {
        name: stat.S_IMODE((run / name).stat().st_mode) for name in ("ca", "ca/mitmproxy-ca.pem", "rollout", "key")
    }
    secret = register(run, "a", "g", turns=2)
    statuses = [await call(interceptor, "a", secret, "one")]
    before = await interceptor.figures(["a"])
    psutil.Process(first.pid).kill()
    after = await interceptor.figures(["a"])
    statuses += [await call(interceptor, "a", secret, word) for word in ("two", "three")]
    seal(run, "a")
    statuses.append(await call(interceptor, "a", secret, "four"))
    end, second, restarts = await interceptor.figures(["a"]), interceptor.proxy, interceptor.restarts
    await interceptor.close()
    rows = read_calls(run).to_pylist()
    return Lived(run, first, modes, statuses, idle, before, after, end, second, restarts, rows)


async def call(interceptor: Interceptor, session: str, secret: str, word: str) -> int:
    """The status of a model call through the proxy, as the session."""
    proxy = interceptor.proxy
    trust = ssl.create_default_context(cafile=interceptor.bundle)
    url = f"http://{session}:{secret}@{proxy.host}:{proxy.port}"
    body = {"model": "m", "messages": [{"role": "user", "content": word}]}
    async with httpx.AsyncClient(proxy=url, verify=trust, trust_env=False, timeout=PATIENCE) as client:
        return (await client.post("https://api.openai.com/v1/chat/completions", json=body)).status_code


def test_the_key_of_the_certificate_is_the_runs_own_and_private(lived: Lived):
    """Folders 0700, keys 0600, whatever the umask."""
    assert lived.modes == {"ca": 0o700, "ca/mitmproxy-ca.pem": 0o600, "rollout": 0o700, "key": 0o600}


def test_it_listens_on_loopback(lived: Lived):
    """Other machines have no business with it."""
    assert lived.first.host == "127.0.0.1"
    assert lived.first.ca == lived.run / "ca" / "mitmproxy-ca-cert.pem"


def test_a_dead_mitmdump_is_started_again_on_its_port(lived: Lived):
    """Harnesses and switchboards know no other."""
    assert (lived.second.port, lived.restarts) == (lived.first.port, 1)
    assert lived.second.pid != lived.first.pid


def test_a_session_that_is_unknown_has_used_nothing(lived: Lived):
    """Its figures are zeros, as those of a run that has just begun."""
    assert lived.idle == Figures(sessions={"nobody": SessionFigures()})


def test_figures_go_on_over_a_restart(lived: Lived):
    """What was counted before `kill -9` is counted again from the run folder; whoever asks meanwhile waits."""
    assert lived.before == lived.after
    assert (lived.before.calls, lived.before.sessions["a"].calls) == (1, 1)
    assert lived.before.sampled == lived.before.sessions["a"].sampled > 0


def test_a_budget_holds_over_a_restart(lived: Lived):
    """One turn before, one after, and no third."""
    assert lived.statuses[:3] == [200, 200, 400]


def test_a_late_call_of_a_sealed_session_is_a_straggler(lived: Lived):
    """It is refused, and its row says why."""
    assert lived.statuses[3] == 403
    assert [(row["status"], row["error_kind"]) for row in lived.rows][2:] == [
        ("refused", "budget_used"), ("refused", "sealed"),
    ]  # fmt: skip
    assert lived.end.sessions["a"] == SessionFigures(calls=2, sampled=lived.end.sampled, refused=2, turns=2)


def test_nothing_is_left_when_it_is_closed(lived: Lived):
    """Neither of the two processes runs."""
    assert not psutil.pid_exists(lived.first.pid)
    assert not psutil.pid_exists(lived.second.pid)


def test_it_ends_with_a_runner_that_is_killed(engine: str, tmp_path: Path):
    """`kill -9` of the runner leaves no mitmdump behind."""
    done = subprocess.run([sys.executable, "-c", _RUNNER, str(tmp_path), engine], check=False)
    assert done.returncode == -signal.SIGKILL
    gone(environment.read_proxy(tmp_path).pid)


def test_one_that_was_left_over_is_ended_first(engine: str, tmp_path: Path):
    """Two would write into one run; a process of that number that is no mitmdump of this run is let be."""
    command = [Path(sys.executable).with_name("mitmdump"), "-s", ROOT / "addons" / "polar.py"]
    for setting in (f"polar_run={tmp_path}", f"polar_engine={engine}", "listen_port=0", f"confdir={tmp_path / 'ca'}"):
        command += ["--set", setting]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as left:
        eventually(lambda: (tmp_path / "proxy.json").exists())
        asyncio.run(started_and_closed(Interceptor(tmp_path, {"polar_engine": engine})))
        assert left.wait(PATIENCE) is not None


def test_one_that_cannot_be_started_is_refused_with_its_own_words(engine: str, tmp_path: Path):
    """The sentence names the log and holds its last lines."""
    bad = Interceptor(tmp_path, {"polar_engine": engine, "polar_sampling": '{"temp": 1}'})
    with pytest.raises(Refusal, match=r"rollout/mitmdump\.log.*unknown 'temp'"):
        asyncio.run(started_and_closed(bad))


async def started_and_closed(interceptor: Interceptor) -> None:
    try:
        await interceptor.start()
    finally:
        await interceptor.close()


def gone(pid: int) -> None:
    """Return when no process of this number runs."""
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def eventually(condition: Any) -> None:
    """Wait for what another process is about to do."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
