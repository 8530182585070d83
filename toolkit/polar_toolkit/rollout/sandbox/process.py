"""Sandboxes of the kind `process`: plain child processes with proxy variables. They hold nothing back.

Invariant: what it starts is ended with all that it started, as far as marks and parents tell, and its folder is
removed. It is no protection: the harness has the user's files, network, processes, and the session's secret. It is for
machines without user namespaces and without containers, and for harnesses that one trusts.

A sandbox's paths do not exist on the host. The working folder, the home folder, TESTS, LOGS, /tmp and the certificates
stand for folders of the host, in the paths of `put` and `take` and wherever they are named in a command's words,
variables and input; not inside files.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import which
from typing import cast

from polar_toolkit.environment import proxied
from polar_toolkit.rollout.sandbox import (
    BUNDLE,
    CA,
    HOME,
    Command,
    Ended,
    EndedBy,
    Network,
    Plan,
    Sandbox,
    SandboxError,
)
from polar_toolkit.rollout.sandbox.capture import CappedFile
from polar_toolkit.rollout.sandbox.folders import copy, inside, remove
from polar_toolkit.rollout.sandbox.marked import VARIABLE, Marked
from polar_toolkit.rollout.sandbox.watch import broken_limit, disk_usage
from polar_toolkit.rollout.task import LOGS, TESTS

_NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens
_LAST_OUTPUT_S = 2.0
_IMAGE = "host"


class Process:
    """The kind."""

    name = "process"

    def __init__(self, run: Path, run_id: str) -> None:
        """`run`: the run folder, where what exists is written down for `sweep`."""
        self._register = run / "rollout" / "process"
        self._marked = Marked(run_id)

    async def check(self) -> str:
        """It is always possible; the sentence says at what price."""
        return (
            "process: UNSAFE, nothing is held back: the harness runs as this user, with its files, its network, its "
            "other processes and the session's secret; memory and disk are watched, CPUs and process counts are not"
        )

    async def create(self, plan: Plan) -> Sandbox:
        """Make the folders. Raises SandboxError for what needs a file system of its own."""
        environment = plan.environment
        if environment.image or environment.dockerfile:
            wanted = environment.image or environment.dockerfile
            raise SandboxError(
                f"the task wants the image {str(wanted)!r}, which a process cannot have: --sandbox docker"
            )
        for mount in plan.mounts:
            if str(mount.source) != mount.target:
                raise SandboxError(f"{mount.source} cannot appear as {mount.target!r} to a process: --sandbox local")
        try:
            return await asyncio.to_thread(_ProcessSandbox, plan, self._marked, self._register)
        except OSError as error:
            raise SandboxError(f"sandbox {plan.name!r} cannot be made in {plan.folder}: {error}") from error

    async def sweep(self) -> int:
        """End what a dead runner left running, and remove its folders."""
        return await asyncio.to_thread(self._sweep)

    async def close(self) -> None:
        """Nothing is shared but the register, which goes when it is empty."""
        with suppress(OSError):  # something is in it, or it is not there
            self._register.rmdir()

    def _sweep(self) -> int:
        names = set(self._marked.found())
        self._marked.end(None)
        for entry in list(self._register.glob("*")):
            if folder := entry.read_text():
                remove(Path(folder))
            entry.unlink()
            names.add(entry.name)
        return len(names)


class _ProcessSandbox:
    """One of them."""

    def __init__(self, plan: Plan, marked: Marked, register: Path) -> None:
        self.image = _IMAGE
        self._plan = plan
        self._marked = marked
        self._places = _places(plan)
        self._named = _pattern(plan, self._places)
        self._group: int | None = None
        self._killed = False
        self._entry = register / plan.name
        register.mkdir(parents=True, exist_ok=True)
        self._entry.write_text(str(plan.folder.resolve()))  # whole or empty: an empty one names no folder yet
        for name in ("workspace", "home", "tmp", "tests"):
            (plan.folder / name).mkdir(parents=True, exist_ok=True)

    async def run(self, command: Command, *, timeout_s: float, log: Path) -> Ended:
        """See Sandbox.run."""
        await self.kill()
        self._killed = False
        loop = asyncio.get_running_loop()
        began = loop.time()
        with CappedFile(log.with_name(f"{log.name}.out")) as out, CappedFile(log.with_name(f"{log.name}.err")) as err:
            capture = _Capture({1: out, 2: err})
            transport = await self._start(command, capture)
            try:
                by = await self._until(capture, timeout_s)
                seconds = loop.time() - began
            finally:
                await self._finish(transport, capture)
        return Ended(_status(transport), by, seconds)

    async def put(self, source: Path, target: str) -> None:
        """See Sandbox.put."""
        place = self._place(target)
        if place.is_symlink():
            raise SandboxError(f"{target!r} is a link that was made in the sandbox; nothing is written through it")
        await self._copy(source, place)

    async def take(self, source: str, target: Path) -> None:
        """See Sandbox.take."""
        await self._copy(self._place(source), target)

    async def kill(self) -> None:
        """See Sandbox.kill."""
        self._killed = True
        await self._end_all()

    async def close(self) -> None:
        """See Sandbox.close."""
        with suppress(SandboxError, OSError):  # nothing can be done about what is left
            await self.kill()
            await asyncio.to_thread(remove, self._plan.folder)
            self._entry.unlink(missing_ok=True)

    async def _start(self, command: Command, capture: _Capture) -> asyncio.SubprocessTransport:
        loop = asyncio.get_running_loop()
        variables = self._variables(command.env)
        argv = [self._translated(word) for word in command.argv]
        program = which(argv[0], path=variables["PATH"])  # not the PATH of this process
        cwd = self._place(command.cwd) if command.cwd else self._plan.folder / "workspace"
        if program is None:
            raise SandboxError(f"no program {argv[0]!r} on PATH {variables['PATH']!r}")
        stdin = self._translated(command.stdin.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        try:
            transport, _ = await loop.subprocess_exec(
                lambda: capture, program, *argv[1:], env=variables, cwd=cwd, start_new_session=True,
                stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise SandboxError(f"{argv[0]!r} could not be started in {cwd}: {error}") from error
        self._group = transport.get_pid()
        _limit(self._group, self._plan.environment.limits.disk_mb << 20)
        if stdin:
            pipe = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
            pipe.write(stdin)
            pipe.write_eof()
        return transport

    async def _until(self, capture: _Capture, timeout_s: float) -> EndedBy:
        limits = self._plan.environment.limits
        memory = partial(self._marked.memory, self._plan.name)
        watching = asyncio.create_task(broken_limit(limits, [self._plan.folder], memory))
        exited = asyncio.create_task(capture.exited.wait())
        try:
            await asyncio.wait({watching, exited}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._killed:
                return "killed"
            if watching.done():
                return watching.result()
            if not exited.done():
                return "deadline"
            used = await asyncio.to_thread(disk_usage, [self._plan.folder])  # what was written since the last look
            return "disk" if used > limits.disk_mb << 20 else "itself"
        finally:
            watching.cancel()
            exited.cancel()

    async def _finish(self, transport: asyncio.SubprocessTransport, capture: _Capture) -> None:
        try:
            await self._end_all()
            with suppress(TimeoutError):  # a process that got away holds the pipe open
                await asyncio.wait_for(capture.closed.wait(), _LAST_OUTPUT_S)
        finally:
            transport.close()

    async def _end_all(self) -> None:
        """Raises SandboxError when something survives SIGKILL."""
        left = await asyncio.to_thread(self._marked.end, [self._plan.name], group=self._group)
        if left:
            raise SandboxError(f"{left} processes of sandbox {self._plan.name!r} do not end on SIGKILL")
        self._group = None

    def _variables(self, own: Mapping[str, str]) -> dict[str, str]:
        plan = self._plan
        given = {"HOME": HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8", **plan.environment.variables, **plan.variables}
        translated = {name: self._translated(value) for name, value in {**given, **own}.items() if name != "PATH"}
        path = own.get("PATH") or given.get("PATH") or os.environ.get("PATH", os.defpath)
        url = _url(plan.network) if plan.network else _NOWHERE
        return {**proxied(url), **translated, "PATH": path, VARIABLE: self._marked.value(plan.name)}

    def _place(self, path: str) -> Path:
        """Where a path of the sandbox lies on the host."""
        for name, place in self._places.items():
            if path == name or path.startswith(f"{name}/"):
                below = Path(os.path.normpath(f"{place}/{path.removeprefix(name)}"))
                try:
                    return inside(place, below)
                except ValueError as error:
                    raise SandboxError(str(error)) from error
        raise SandboxError(f"{path!r} is none of {', '.join(self._places)}: a process has no more; --sandbox local")

    def _translated(self, text: str) -> str:
        return self._named.sub(lambda match: str(self._places.get(match[0], match[0])), text)

    async def _copy(self, source: Path, target: Path) -> None:
        try:
            await asyncio.to_thread(copy, source, target)
        except OSError as error:
            raise SandboxError(f"{source} could not be copied to {target}: {error}") from error


class _Capture(asyncio.SubprocessProtocol):
    """Writes the streams down, and tells of the process's end even while something still holds its streams."""

    def __init__(self, files: Mapping[int, CappedFile]) -> None:
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()
        self._files = files

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Append to the stream's file."""
        self._files[fd].write(data)

    def process_exited(self) -> None:
        """It has ended."""
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended and all of its streams are closed."""
        self.closed.set()


def _places(plan: Plan) -> dict[str, Path]:
    """Paths inside -> paths of the host, the longest first."""
    folder = plan.folder.resolve()
    workdir = plan.environment.workdir.rstrip("/")
    names = {workdir: "workspace", HOME: "home", TESTS: "tests", LOGS: "logs", "/tmp": "tmp"}
    places = {path: folder / name for path, name in names.items()}
    if plan.network:
        places |= {BUNDLE: plan.network.bundle.resolve(), CA: plan.network.ca.resolve()}
    return dict(sorted(places.items(), key=lambda item: -len(item[0])))


def _pattern(plan: Plan, places: Mapping[str, Path]) -> re.Pattern[str]:
    """Where one of the places is named, and not a path of the host that begins alike."""
    host = [str(plan.folder.resolve()), *(mount.target for mount in plan.mounts)]
    names = sorted([*places, *host], key=len, reverse=True)
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, names))})(?![\w.-])")


def _url(network: Network) -> str:
    host, port = network.proxy
    return f"http://{network.session}:{network.secret}@{host}:{port}"  # both are made of characters that a URL may have


def _status(transport: asyncio.SubprocessTransport) -> int:
    """As a shell says it."""
    status = transport.get_returncode()
    if status is None:
        raise SandboxError(f"process {transport.get_pid()} does not end on SIGKILL")
    return 128 - status if status < 0 else status


def _limit(pid: int, disk: int) -> None:
    """Against a single file that grows between two looks at the disk; the looks come first."""
    largest_file = disk + disk // 4
    with suppress(ProcessLookupError):  # it has ended already
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest_file, largest_file))
