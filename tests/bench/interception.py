"""A whole interception on a machine of its own: scripted engine, mitmdump with the addon, real harness, no way out.

Invariant: everything that is started runs inside one `Namespace` with an environment that holds only what is named
here, what the harness's recipe names, and what `polar-toolkit env` prints, so the harness sees what a user's harness
would see, and a try to reach another machine is on record. It judges nothing: tests do.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from polar_toolkit.environment import variables
from polar_toolkit.rollout import recipe
from polar_toolkit.rollout.harnesses.scripted_engine import Script, ScriptedEngine
from tests.bench.netns import Namespace
from tests.bench.provisions import HARNESS_BIN, ROOT, harness_binary, qwen3_tokenizer
from tests.bench.transparent import redirected

HARNESS_SECONDS = 120
_START_SECONDS = 60
_PROGRAMS = Path(sys.executable).parent
_TAP = Path(__file__).with_name("tap.py")
_PROXY_VARIABLES = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "NODE_USE_ENV_PROXY")
Json = dict[str, Any]  # Any: run files


@dataclass(frozen=True, slots=True)
class Done:
    """What a harness left behind."""

    status: int
    """Exit status; 124 when it had to be ended after HARNESS_SECONDS."""
    output: str
    """stdout and stderr, interleaved."""
    workspace: Path


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running mitmdump."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def kill(self) -> None:
        """`kill -9`, and wait until it is dead."""
        self.process.kill()
        self.process.wait()


class Interception:
    """A namespace, a scripted engine in it, and a run folder; see `interception`."""

    def __init__(self, folder: Path, namespace: Namespace, engine: ScriptedEngine) -> None:
        """`folder` is a scratch folder; the run folder is made inside it."""
        self.folder = folder
        self.run = folder / "run"
        self.namespace = namespace
        self.engine = engine
        self._environments: dict[str, dict[str, str]] = {}
        self._unproxied = False

    @contextmanager
    def proxy(self, **options: str) -> Generator[Proxy]:
        """`mitmdump -s addons/polar.py` on this run folder while inside the block; `options` go to `--set`.

        With the option `tap`, a file, every request is also written down as it came (tests/bench/tap.py).
        """
        settings = {
            "polar_engine": self.engine.url,
            "polar_run": str(self.run),
            "polar_tokenizer": str(qwen3_tokenizer()),
            "confdir": str(self.folder / "confdir"),
            "listen_port": "0",
        } | options
        self._environments.clear()  # they name the port
        scripts = [*([_TAP] if "tap" in options else []), ROOT / "addons" / "polar.py"]
        command = [str(_PROGRAMS / "mitmdump"), *(word for script in scripts for word in ("-s", str(script)))]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        log = self.folder / "mitmdump.log"
        with log.open("ab") as written, self.namespace.entered():
            process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, env=self._bare_environment())
        try:
            yield self._listening(process, log)
        finally:
            process.terminate()
            if not _ended(process, _START_SECONDS):
                process.kill()
                raise AssertionError(f"mitmdump did not end on SIGTERM:\n{log.read_text()}")

    @contextmanager
    def transparent_proxy(self) -> Generator[Proxy]:
        """The same in mitmproxy's transparent mode, with every web port of the namespace redirected to it.

        Nobody is registered then: without a proxy URL there is nothing to tell sessions by, and all calls are of the
        run's default one.
        """
        with self.proxy(mode="transparent", listen_host="127.0.0.1") as proxy, redirected(self.namespace, proxy.port):
            self._unproxied = True
            yield proxy
        self._unproxied = False

    def environment(self, session: str) -> dict[str, str]:
        """What a user gets from `polar-toolkit env`; asked once for each session of a proxy."""
        if session not in self._environments:
            named = (None, None) if self._unproxied else (session, "group")
            with self.namespace.entered():  # it looks whether the proxy listens
                printed = variables(self.run, *named)
            dropped = _PROXY_VARIABLES if self._unproxied else ()
            self._environments[session] = {k: v for k, v in printed.items() if k.upper() not in dropped}
        return self._environments[session]

    def perform(self, name: str, way: str, task: str, *, session: str) -> Done:
        """Run a harness's own command, one of the ways in harness_images/NAME, in the session's HOME and workspace."""
        chosen = recipe.find(name).way(way)
        for path, content in chosen.files.items():
            file = self._fresh("home", session) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        command = recipe.command_of(chosen, task)
        return self.execute(list(command.argv), session=session, env=command.env)

    def execute(self, words: list[str], *, session: str, env: Mapping[str, str] = {}) -> Done:
        """Run a command (the name of a harness's binary, then its arguments) as `perform` does."""
        environment = self._bare_environment() | self.environment(session) | env
        environment["HOME"] = str(self._fresh("home", session))
        workspace = self._fresh("workspace", session)
        output = self.folder / f"{session}.log"
        with output.open("wb") as written, self.namespace.entered():
            process = subprocess.Popen(
                [harness_binary(words[0]), *words[1:]], cwd=workspace, env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            status = process.returncode if _ended(process, HARNESS_SECONDS) else 124  # as timeout(1) says it
        finally:
            _end_group(process)
        return Done(status, output.read_text(), workspace)

    def ask(self, url: str, *, session: str, body: Json | None = None, **more: Any) -> httpx.Response:
        """The whole answer to a request sent through the proxy; see `asking`."""
        with self.asking(url, session=session, body=body, **more) as answer:
            answer.read()
        return answer

    @contextmanager
    def asking(
        self, url: str, *, session: str, body: Json | None = None, headers: Mapping[str, str] = {}, secret: str = ""
    ) -> Generator[httpx.Response]:
        """A request through the proxy, with the session's credentials (or another secret); POST when it has a body."""
        environment = self.environment(session)
        proxy = httpx.URL(environment["HTTPS_PROXY"])
        proxy = proxy.copy_with(password=secret) if secret else proxy
        trust = ssl.create_default_context(cafile=environment["SSL_CERT_FILE"])
        with (
            self.namespace.entered(),
            httpx.Client(proxy=proxy, verify=trust, trust_env=False, timeout=60) as client,
            client.stream("POST" if body else "GET", url, json=body, headers=headers) as answer,
        ):
            yield answer

    def toolkit(self, *arguments: str) -> str:
        """The standard output of a `polar-toolkit` command that must succeed."""
        command = [str(_PROGRAMS / "polar-toolkit"), *arguments]
        with self.namespace.entered():
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=self._bare_environment())
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def _listening(self, process: subprocess.Popen[bytes], log: Path) -> Proxy:
        facts: Json = {}
        for _ in range(_START_SECONDS * 20):
            if (self.run / "proxy.json").exists():
                facts = json.loads((self.run / "proxy.json").read_text())
            if facts.get("pid") == process.pid:
                return Proxy(process, int(facts["port"]), log)
            if _ended(process, 0.05):
                break
        raise AssertionError(f"mitmdump did not come up:\n{log.read_text()}")

    def _bare_environment(self) -> dict[str, str]:
        return {
            "PATH": f"{HARNESS_BIN}:{_PROGRAMS}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self._fresh("home", "bench")),
            "LANG": "C.UTF-8",
        }

    def _fresh(self, kind: str, session: str) -> Path:
        folder = self.folder / kind / session
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@contextmanager
def interception(folder: Path, script: Script) -> Generator[Interception]:
    """An `Interception` whose scripted engine serves while inside the block."""
    engine = ScriptedEngine(qwen3_tokenizer(), script)
    with Namespace() as namespace, ExitStack() as stack:
        with namespace.entered():
            stack.enter_context(engine.serving())
        yield Interception(folder, namespace, engine)


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:  # still running: the answer
        return False
    return True


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of it has ended
        return
    process.wait()
