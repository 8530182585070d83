"""The one mitmdump of a rollout: started, kept alive on its port, asked for its figures, and ended with the runner.

Invariant: for a run there is one mitmdump at most, and none outlives its runner; it listens on loopback unless told
otherwise, and the key of its certificate is made for this run, lies in RUN/ca with mode 0600 and is in no sandbox. A
mitmdump that dies is started again on the same port, with the sessions that it knew. It registers nobody and judges
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from polar_mitm import identity
from polar_mitm.gateway import FIGURES
from polar_toolkit import environment
from polar_toolkit.calls import run_info
from polar_toolkit.errors import Refusal

_SCRIPT = '''"""The interceptor of a rollout, as its runner starts it; written anew at each start."""

from polar_mitm.addon import Polar
from polar_toolkit.rollout.tether import Tether

addons = [Polar(), Tether()]
'''
_START_SECONDS = 120.0
"""mitmproxy and the tokenizer take about five; a busy machine more."""
_END_SECONDS = 20.0
"""For what is in flight to be recorded, and the journal to be sealed."""
_PAUSES = (0.2, 1.0, 5.0, 15.0)
"""Seconds before a restart, one more each time that it fails; the last ones stay."""
_ASKED_AT_ONCE = 200
"""Sessions of one request for figures: the names stand in its URL."""


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """What one session has used."""

    calls: int = 0
    """Completed ones."""
    running: int = 0
    sampled: int = 0
    """Tokens."""
    refused: int = 0
    turns: int = 0
    """Completed calls that count against a budget of turns: not those for titles, routes and compaction."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What the run has used since it was made, restarts included, and what happens now."""

    calls: int = 0
    """Completed ones."""
    running: int = 0
    waiting: int = 0
    """Running ones that have waited for their first token for more than two seconds."""
    sampled: int = 0
    """Tokens."""
    sessions: Mapping[str, SessionFigures] = field(default_factory=dict[str, SessionFigures])
    """Those that were asked for."""


class Interceptor:
    """The mitmdump of one run."""

    def __init__(self, run: Path, settings: Mapping[str, str], *, listen_host: str = "127.0.0.1") -> None:
        """`settings`: what mitmdump is given by --set, such as polar_engine and polar_sampling."""
        self._run, self._settings, self._listen_host = run.resolve(), dict(settings), listen_host
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._client: httpx.AsyncClient | None = None
        self._proxy: environment.Proxy | None = None
        self._latest = Figures()
        self.bundle = self._run / "ca-bundle.pem"
        """PEM file: the system's certificates and the interceptor's."""
        self.restarts = 0
        """How often it was started again."""

    @property
    def proxy(self) -> environment.Proxy:
        """Where it listens, from the first start to the end."""
        assert self._proxy is not None, "start() first"
        return self._proxy

    async def start(self) -> None:
        """Start it, end a mitmdump that a dead runner left before, and return when it listens.

        Raises Refusal, with the last lines of its log, when it cannot be started.
        """
        self._prepare()
        await _end_left_over(self._run)
        self._client = httpx.AsyncClient(trust_env=False, timeout=5.0)
        try:
            await self._launch(port=0)
            self.bundle = environment.write_bundle(self._run, self.proxy.ca)
        except BaseException:  # nothing of it is left when it could not be started, or nobody waits any more
            await self.close()
            raise
        self._keeping = asyncio.create_task(self._keep())

    async def figures(self, sessions: Sequence[str] = ()) -> Figures:
        """The figures of now.

        While it is being restarted, those of the whole run are the last that were known. Those of sessions are waited
        for, because they are what is written of an attempt; raises Refusal when it does not come back.
        """
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                return await self._asked(sessions)
            except httpx.HTTPError as error:
                if not sessions:
                    return replace(self._latest, running=0, waiting=0)
                if time.monotonic() > deadline:
                    raise Refusal(f"the interceptor does not tell its figures ({error!r}); see {self._log}") from error
                await asyncio.sleep(0.2)

    async def close(self) -> None:
        """End it; what is in flight is recorded, the journal sealed. Bounded in time; may be called twice."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._process is not None:
            await _end(self._process)
        if self._client is not None:
            await self._client.aclose()

    # -- private

    def _prepare(self) -> None:
        """The folders, closed to others before a key is in one."""
        for folder in (self._run, self._run / "ca", self._run / "rollout", self._run / "rollout" / "addon"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        self._script.write_text(_SCRIPT)

    @property
    def _script(self) -> Path:
        return self._run / "rollout" / "addon" / "polar.py"

    @property
    def _log(self) -> Path:
        return self._run / "rollout" / "mitmdump.log"

    async def _keep(self) -> None:
        """Start it again whenever it ends."""
        pauses = iter(_PAUSES)
        while True:
            assert self._process is not None
            await self._process.wait()
            await asyncio.sleep(next(pauses, _PAUSES[-1]))
            try:
                await self._launch(port=self.proxy.port)
            except Refusal:  # its log says why; calls that come meanwhile find nobody
                continue
            pauses = iter(_PAUSES)
            self.restarts += 1

    async def _launch(self, port: int) -> None:
        command = [_mitmdump(), "-s", str(self._script)]
        for name, value in self._all_settings(port).items():
            command += ["--set", f"{name}={value}"]
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )  # in a session of its own: Ctrl-C at the terminal is the runner's, which ends it last
        await self._listening(self._process)

    def _all_settings(self, port: int) -> dict[str, str]:
        own = {
            "confdir": str(self._run / "ca"), "polar_run": str(self._run),
            "listen_host": self._listen_host, "listen_port": str(port),
        }  # fmt: skip
        known = run_info(self._run) if (self._run / "run.json").is_file() else {}
        return {"polar_tokenizer": known.get("tokenizer", ""), **self._settings, **own}

    async def _listening(self, process: asyncio.subprocess.Process) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and process.returncode is None:
            with contextlib.suppress(Refusal):  # it has not written proxy.json yet
                found = environment.read_proxy(self._run)
                if found.pid == process.pid:
                    self._proxy = found
                    return
            await asyncio.sleep(0.05)
        await _end(process)
        lines = self._log.read_text(errors="replace").splitlines()[-5:]
        raise Refusal(f"mitmdump could not be started ({self._log}): {' | '.join(lines) or 'it said nothing'}")

    async def _asked(self, sessions: Sequence[str]) -> Figures:
        merged: dict[str, SessionFigures] = {}
        for some in itertools.batched(sessions, _ASKED_AT_ONCE) if sessions else [()]:
            answer = await self._ask(some)
            merged |= {name: SessionFigures(**values) for name, values in answer.pop("sessions").items()}
            self._latest = Figures(**answer)
        return replace(self._latest, sessions=merged)

    async def _ask(self, sessions: Sequence[str]) -> dict[str, Any]:  # Any: JSON
        assert self._client is not None, "start() first"
        answer = await self._client.get(
            f"{self.proxy.gateway}{FIGURES}",
            params={"sessions": ",".join(sessions)},
            headers={"Authorization": f"Bearer {identity.figures_token(identity.load_key(self._run))}"},
        )
        return answer.raise_for_status().json()


def _mitmdump() -> str:
    """The one that is installed beside this Python."""
    beside = Path(sys.executable).with_name("mitmdump")
    found = str(beside) if beside.exists() else shutil.which("mitmdump")
    if found is None:
        raise Refusal(f"mitmdump is neither beside {sys.executable} nor on PATH: pip install 'polar-mitm[rollout]'")
    return found


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, SIGKILL when that is not heeded; a process that has ended is let be."""
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
    if process.stdin is not None:
        process.stdin.close()


async def _end_left_over(run: Path) -> None:
    """End the mitmdump of this run that a dead runner left, told by its command line: its number may be another's."""
    try:
        left = psutil.Process(environment.read_proxy(run).pid)
        if f"polar_run={run}" not in left.cmdline():
            return
        left.send_signal(signal.SIGTERM)
        await asyncio.to_thread(_wait_or_kill, left)
    except (Refusal, psutil.NoSuchProcess, ValueError):  # none was started, or it is gone
        return


def _wait_or_kill(process: psutil.Process) -> None:
    try:
        process.wait(_END_SECONDS)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(_END_SECONDS)
