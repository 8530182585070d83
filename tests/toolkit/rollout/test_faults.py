"""Whatever goes wrong with an attempt, it ends as the right row, within its budget, and leaves nothing behind.

One rollout runs all misbehaving harnesses at once: the instruction of a task is the script that its harness plays.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest

from polar_toolkit.rollout.harnesses.scripted_engine import Fault, ScriptedEngine
from polar_toolkit.rollout.interceptor import Interceptor
from polar_toolkit.rollout.options import Options, Pools
from polar_toolkit.rollout.outcome import Status
from polar_toolkit.rollout.task import Budget, Check, Environment, Limits, Task
from tests.bench.census import nothing_left
from tests.bench.provisions import qwen3_tokenizer
from tests.bench.rolling import Rolled, rolled

ASK = (
    "curl -sS -m 60 https://api.openai.com/v1/chat/completions -H 'content-type: application/json' "
    """-d '{"model": "gpt-5.2", "messages": [{"role": "user", "content": "hello"}]}' && echo"""
)
WORK = "echo done > work.txt"
DAEMONS = """python3 -c '
import os, subprocess, time
subprocess.Popen(["sleep", "1000"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
'"""
HOG = "python3 -c 'import time; hold = bytearray(200 << 20); time.sleep(1000)'"
FILL = "dd if=/dev/zero of=big bs=1M count=40 2> /dev/null"
RUN_S, INIT_S, POST_S = 6.0, 8.0, 4.0
OVERHEAD_S = 6.0
"""Of two busy cores; no stage may take longer than its budget and this."""
SOUND = Check("command", {"command": "test -f work.txt"})


def task(name: str, script: str, *, check: Check = SOUND, prepare: tuple[str, ...] = (), run_s: float = RUN_S) -> Task:
    environment = Environment(prepare=prepare, limits=Limits(memory_mb=128, disk_mb=32))
    return Task(name, script, check, environment, Budget(init_s=INIT_S, run_s=run_s, post_s=POST_S))


TASKS = [
    task("hangs", f"{ASK}; {WORK}; sleep 1000"),
    task("hangs-at-once", f"{WORK}; sleep 1000", run_s=2),
    task("daemons", f"{DAEMONS}; {ASK}; {WORK}"),
    task("ignores-sigterm", f"trap '' TERM INT HUP; {ASK}; {WORK}; while :; do sleep 1; done"),
    task("fills-its-disk", f"{ASK}; {FILL}; sleep 1000", run_s=60),
    task("takes-too-much-memory", f"{ASK}; {HOG}; sleep 1000", run_s=60),
    task("does-nothing", "exit 0"),
    task("fails-after-good-work", f"{ASK}; {WORK}; exit 1"),
    task("does-bad-work", f"{ASK}"),
    task("is-judged-for-ever", f"{ASK}; {WORK}", check=Check("command", {"command": "sleep 1000"})),
    task("is-judged-by-a-crash", f"{ASK}; {WORK}", check=Check("callable", {"callable": "json:loads"})),
    task("cannot-be-set-up", f"{ASK}; {WORK}", prepare=("echo oops >&2; exit 3",)),
    task("is-prepared-for-ever", f"{ASK}; {WORK}", prepare=("sleep 1000",)),
]


@contextmanager
def engine() -> Generator[ScriptedEngine]:
    with ScriptedEngine(qwen3_tokenizer(), lambda prompt: "Hello to you, too.").serving() as served:
        yield served


def options(folder: Path, served: ScriptedEngine, kind: str) -> Options:
    return Options(
        folder / "run", "shell", served.url, command='eval "$POLAR_TASK"', tokenizer=str(qwen3_tokenizer()),
        samples=1, sandbox=kind, tries=1, pools=Pools(init=4, ready=8, run=6, post=4),
    )  # fmt: skip


class Cord:
    """The way to the engine at an address of its own, which can be cut: then nothing listens there."""

    def __init__(self, url: str) -> None:
        self._target = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._address = self._listener.getsockname()
        self.url = f"http://127.0.0.1:{self._address[1]}"
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._serve()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """Refuse connections, and break those that there are."""
        for end in [self._listener, *self._ends]:
            with suppress(OSError):  # closed from the other side
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._ends.clear()

    def join(self) -> None:
        """Listen again, at the same address."""
        self._listener = socket.create_server(self._address)
        self._serve()

    def _serve(self) -> None:
        self._spawn(self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it was cut
            while True:
                near, far = listener.accept()[0], socket.create_connection(self._target)
                self._ends += [near, far]
                self._spawn(self._pass_on, near, far)
                self._spawn(self._pass_on, far, near)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # it was cut
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _spawn(self, work: Callable[..., None], *ends: socket.socket) -> None:
        self._threads.append(thread := threading.Thread(target=work, args=ends))
        thread.start()


@pytest.fixture(scope="module", params=["local", "process"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rolled:
    """All of them, in each kind of sandbox; what is left behind is looked for as soon as the rollout is over."""
    folder = tmp_path_factory.mktemp(f"faults-{request.param}")
    with engine() as served, nothing_left(folder):
        return asyncio.run(rolled(options(folder, served, request.param), TASKS))


@pytest.mark.parametrize(
    ("name", "status", "reward"),
    [
        ("hangs", Status.TIMEOUT, 1.0),
        ("hangs-at-once", Status.HARNESS_ERROR, None),
        ("daemons", Status.COMPLETED, 1.0),
        ("ignores-sigterm", Status.TIMEOUT, 1.0),
        ("fills-its-disk", Status.HARNESS_ERROR, None),
        ("takes-too-much-memory", Status.HARNESS_ERROR, None),
        ("does-nothing", Status.HARNESS_ERROR, None),
        ("fails-after-good-work", Status.COMPLETED, 1.0),
        ("does-bad-work", Status.COMPLETED, 0.0),
        ("is-judged-for-ever", Status.EVALUATOR_FAILED, None),
        ("is-judged-by-a-crash", Status.EVALUATOR_FAILED, None),
        ("cannot-be-set-up", Status.SETUP_FAILED, None),
        ("is-prepared-for-ever", Status.SETUP_FAILED, None),
    ],
)
def test_a_fault_ends_as_the_right_row(ran: Rolled, name: str, status: Status, reward: float | None):
    """Status and reward are those of what happened; only what was judged has a reward to train on."""
    row = ran.rows[f"{name}.1"]
    assert (row.status, row.reward) == (status, reward), row
    assert ran.rewards.get(row.session_id) == reward
    assert row.trained == (reward is not None)


def test_every_attempt_keeps_its_budget(ran: Rolled):
    """No stage takes longer than its seconds and what a busy machine adds."""
    for row in ran.rows.values():
        longest = RUN_S + OVERHEAD_S
        assert max(row.init_s - INIT_S, row.post_s - POST_S) <= OVERHEAD_S, row
        assert row.run_s <= longest, row


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hangs", "ended by its deadline of 6 s"),
        ("fills-its-disk", "32 MB of disk"),
        ("takes-too-much-memory", "128 MB of memory"),
        ("does-nothing", "without a completed model call (exit status 0)"),
        ("hangs-at-once", "without a completed model call"),
        ("is-judged-for-ever", " 4 s"),
        ("cannot-be-set-up", "exit 3"),
        ("is-prepared-for-ever", "not prepared within 8 s"),
    ],
)
def test_a_note_says_what_went_wrong(ran: Rolled, name: str, words: str):
    """The row's sentence names the limit, or the command, and its value."""
    assert words in ran.rows[f"{name}.1"].note


def test_a_timeout_keeps_its_partial_trace(ran: Rolled):
    """The calls that a harness completed before its deadline are counted, and its last words are kept."""
    row = ran.rows["hangs.1"]
    assert (row.calls, row.sampled_tokens > 0) == (1, True)
    assert "Hello to you" in (ran.run / row.artifacts["stdout"]).read_text()


def test_the_exit_status_is_told_and_judges_nothing(ran: Rolled):
    """Good work counts whatever the harness said when it ended; no work does not, although it said 0."""
    assert ran.rows["fails-after-good-work.1"].exit_code == 1
    assert ran.rows["does-nothing.1"].exit_code == 0


def test_an_engine_that_dies_and_comes_back_costs_no_attempt(tmp_path: Path):
    """A call during which the engine dies is gone on with when it is back; the harness sees one whole answer."""
    with engine() as served, nothing_left(tmp_path), Cord(served.url) as cord:
        served.faults = [Fault("hold", after=2)]

        async def die(_: Interceptor) -> None:
            await asyncio.to_thread(served.holding.wait, 60)
            cord.cut()
            await asyncio.to_thread(served.calls[0].ended.wait, 60)
            cord.join()

        asked = replace(options(tmp_path, served, "local"), engine=cord.url)
        rolled_out = asyncio.run(rolled(asked, [task("asks", f"{ASK}; {WORK}", run_s=60)], die))
    row = rolled_out.rows["asks.1"]
    assert (row.status, row.reward, row.calls) == (Status.COMPLETED, 1.0, 1), row
    assert "Hello to you, too." in (rolled_out.run / row.artifacts["stdout"]).read_text()
    assert len(served.calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "process"])
def test_a_killed_proxy_costs_a_try_and_no_attempt(tmp_path: Path, kind: str):
    """The harness whose call died with the proxy fails; the attempt is tried again, in a session of its own."""
    with engine() as served:
        served.faults = [Fault("hold", after=2)]

        async def kill_proxy(interceptor: Interceptor) -> None:
            await asyncio.to_thread(served.holding.wait, 60)
            os.kill(interceptor.proxy.pid, signal.SIGKILL)

        asked = replace(options(tmp_path, served, kind), tries=2)
        with nothing_left(tmp_path):
            ran = asyncio.run(rolled(asked, [task("asks", f"{ASK} || exit 1; {WORK}", run_s=60)], kill_proxy))
    row = ran.rows["asks.1"]
    assert (row.status, row.reward, row.tries) == (Status.COMPLETED, 1.0, 2), row
    assert row.session_id == "asks.1.try2"
