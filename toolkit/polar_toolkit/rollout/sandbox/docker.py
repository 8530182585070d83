"""Sandboxes of the kind `docker`: a container each, without a network, in which commands run by exec.

Invariant: the container has no way out but the sockets that its switchboard holds, outside of it; it has no capability
and gains none. What it is made of, and every volume of it, bears the run's label, so that whatever happens to the
runner or to the engine, the next `sweep` finds it. It runs nothing of a container's on the host.

Killing is killing the container: it is started again, with its files, when there is a next command. A runner that is
not root, or an engine on another machine, has no part in a container's network: a relay is the switchboard then.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from docker import APIClient
from docker.errors import NotFound

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.sandbox import (
    BUNDLE,
    CA,
    Command,
    Ended,
    EndedBy,
    Mount,
    Network,
    Plan,
    Sandbox,
    SandboxError,
    container_life,
)
from polar_toolkit.rollout.sandbox.archives import pack, unpack
from polar_toolkit.rollout.sandbox.bubblewrap import OWN_ETC
from polar_toolkit.rollout.sandbox.capture import CappedFile
from polar_toolkit.rollout.sandbox.container import (
    FOLDER_LABEL,
    NAME_LABEL,
    RUN_LABEL,
    USER,
    arguments,
    is_below,
    places,
    wrapped,
)
from polar_toolkit.rollout.sandbox.container_images import Image, Images
from polar_toolkit.rollout.sandbox.docker_engine import Engine, sort_frames
from polar_toolkit.rollout.sandbox.folders import remove
from polar_toolkit.rollout.sandbox.namespace_sockets import listeners_within
from polar_toolkit.rollout.sandbox.out_of_memory import OutOfMemory
from polar_toolkit.rollout.sandbox.relayed_network import RelayedNetwork, relays
from polar_toolkit.rollout.sandbox.switchboard import Switchboard
from polar_toolkit.rollout.sandbox.watch import broken_limit, disk_usage
from polar_toolkit.rollout.task import Environment

_RESOLVER = "/etc/resolv.conf"
_LAST_OUTPUT_S = 10.0
_REMOVAL_S = 90.0
_SIGNALLED = 128
_KILLED = 137


class Docker:
    """The kind."""

    name = "docker"

    def __init__(self, run: Path, run_id: str) -> None:
        """Raises Refusal when DOCKER_HOST cannot be used."""
        self._run = run.resolve()
        self._run_id = run_id
        self._engine = Engine()
        self._images = Images(self._engine)
        self._memory = OutOfMemory(self._engine, f"{RUN_LABEL}={run_id}")
        self._relays = relays(self._engine)

    async def check(self) -> str:
        """Make one and run `true` in it. Raises Refusal with the engine's own words and the remedy."""
        folder = Path(tempfile.mkdtemp(prefix="polar-trial-"))
        sandbox = None
        try:
            version = await self._engine.do(lambda api: api.version()["Version"])
            sandbox = await self.create(
                Plan(folder.name, folder / "sandbox", Environment(), network=self._trial(folder))
            )
            ended = await sandbox.run(Command(("true",)), timeout_s=60, log=folder / "log")
        except SandboxError as error:
            raise Refusal(
                f"docker sandboxes cannot be made here: {error} (by hand: scripts/dockerd.sh start), or --sandbox local"
            ) from error
        finally:
            if sandbox:
                await sandbox.close()
            shutil.rmtree(folder)
        if ended.status:
            raise Refusal(f"docker sandboxes do not work here: `true` ended with status {ended.status}")
        seen = self._engine.is_socket and os.geteuid() == 0  # as in `_make`
        disk = "disk watched" if seen else "of the disk only the size of one file is limited"
        way = f"through a relay that finds it at {self._relays.interceptor!r}" if self._relays else "from outside"
        return (
            f"docker: engine {version}, no network but the interceptor ({way}), user {USER}, no capability, system "
            f"calls filtered; memory, CPUs and processes limited by the engine; {disk}"
        )

    async def create(self, plan: Plan) -> Sandbox:
        """See Sandboxes.create."""
        await self._memory.watch()
        image = await self._images.find(plan.environment)
        sandbox = _DockerSandbox(plan, self._run_id, self._engine, self._memory)
        if plan.network and self._relays:
            inside = await self._images.find(Environment(image=self._relays.image))
            sandbox.relayed = RelayedNetwork(plan.network, sandbox.labels, self._relays, inside)
        making = asyncio.ensure_future(sandbox.make(image))
        try:
            await asyncio.shield(making)
        except BaseException:  # cancelled, too: what a thread makes meanwhile must be known before it can be removed
            await asyncio.wait({making})
            with suppress(SandboxError, asyncio.CancelledError):  # it is raised already, or we are cancelled
                making.result()
            await sandbox.close()
            raise
        return sandbox

    async def sweep(self) -> int:
        """See Sandboxes.sweep. Raises SandboxError when the engine does not answer."""
        async with asyncio.timeout(_REMOVAL_S):
            return await self._engine.do(partial(container_life.sweep, run=self._run, run_id=self._run_id))

    def _trial(self, folder: Path) -> Network | None:
        """A way out for a trial of the relay; nobody is there yet."""
        if self._relays is None:
            return None
        (folder / "none.pem").touch()
        return Network(("", 0), "trial", "", ("trial.invalid",), folder / "none.pem", folder / "none.pem")

    async def close(self) -> None:
        """Let go of the engine."""
        await self._memory.close()
        self._engine.close()


class _DockerSandbox:
    """One of them."""

    def __init__(self, plan: Plan, run_id: str, engine: Engine, memory: OutOfMemory) -> None:
        self.image = ""
        self.relayed: RelayedNetwork | None = None
        """In place of a switchboard, which a sandbox with a network has otherwise."""
        self._plan = replace(plan, folder=plan.folder.resolve())
        self.labels = {RUN_LABEL: run_id, NAME_LABEL: plan.name, FOLDER_LABEL: str(self._plan.folder)}
        self._engine = engine
        self._memory = memory
        self._container = ""
        self._volumes: dict[str, str] = {}
        self._watched: list[Path] = []
        self._switchboard: Switchboard | None = None
        self._refused: Counter[str] = Counter()
        self._runs = self._killed = False

    @property
    def refused(self) -> Counter[str]:
        """Names and destinations that its commands asked for in vain."""
        return self._refused + (self._switchboard.refused if self._switchboard else Counter())

    async def make(self, image: Image) -> None:
        """Make the container and start it. Raises SandboxError."""
        self.image = image.origin
        try:
            files = await asyncio.to_thread(self._files)
        except OSError as error:
            raise SandboxError(f"sandbox {self._plan.name!r} cannot be made in {self._plan.folder}: {error}") from error
        await self._engine.do(partial(self._make, image=image, files=files))
        await self._start()

    async def run(self, command: Command, *, timeout_s: float, log: Path) -> Ended:
        """See Sandbox.run."""
        await self._start()
        self._killed = False
        self._memory.forget(self._container)
        execution = await self._engine.do(partial(self._prepare, command=command))
        reader, writer = await self._engine.start(execution)
        began = asyncio.get_running_loop().time()
        with CappedFile(log.with_name(f"{log.name}.out")) as out, CappedFile(log.with_name(f"{log.name}.err")) as err:
            performing = asyncio.create_task(_performed(reader, writer, command.stdin, out, err))
            by: EndedBy = "killed"
            try:
                by = await self._until(performing, timeout_s)
                seconds = asyncio.get_running_loop().time() - began
            finally:
                if by != "itself":
                    await self._stop()
                await asyncio.wait({performing}, timeout=_LAST_OUTPUT_S)
                performing.cancel()
                writer.close()
        if self.relayed:
            self._refused = await self._engine.do(self.relayed.refused)
        return await self._ended(execution, by, seconds)

    async def put(self, source: Path, target: str) -> None:
        """See Sandbox.put."""
        await self._engine.do(partial(self._put, source=source, target=os.path.normpath(target)))

    async def take(self, source: str, target: Path) -> None:
        """See Sandbox.take."""
        await self._engine.do(partial(self._take, source=os.path.normpath(source), target=target))

    async def kill(self) -> None:
        """See Sandbox.kill."""
        self._killed = True
        await self._stop()

    async def close(self) -> None:
        """See Sandbox.close."""
        self._killed = True
        await self._hang_up()
        with suppress(SandboxError, TimeoutError):  # nothing can be done about what is left: `sweep` finds it
            async with asyncio.timeout(_REMOVAL_S):
                await self._engine.do(
                    partial(container_life.remove, container=self._container, volumes=list(self._volumes.values()))
                )
                if self.relayed:
                    await self._engine.do(self.relayed.remove)
        self._memory.forget(self._container)
        with suppress(OSError):
            await asyncio.to_thread(remove, self._plan.folder)

    def _files(self) -> tuple[Mount, ...]:
        """What is mounted read-only: besides the plan's, copies that whoever runs inside can read."""
        self._plan.folder.mkdir(parents=True, exist_ok=True)
        contents: dict[str, bytes] = {}
        if not self.relayed:  # the engine's cannot name 127.0.0.53
            contents[_RESOLVER] = OWN_ETC[_RESOLVER.removeprefix("/etc/")].encode()
        if network := self._plan.network:
            contents |= {BUNDLE: network.bundle.read_bytes(), CA: network.ca.read_bytes()}
        copies = {target: self._plan.folder / Path(target).name for target in contents}
        for target, copy in copies.items():
            copy.write_bytes(contents[target])
            copy.chmod(0o644)
        return tuple(Mount(copy, target) for target, copy in copies.items())

    def _make(self, api: APIClient, image: Image, files: tuple[Mount, ...]) -> None:
        for place in places(self._plan, image):
            self._volumes[place] = api.create_volume(labels=self.labels)["Name"]
        is_far = self.relayed and not image.is_base  # such an engine may see no file of ours
        mounts = (*self._plan.mounts, *(() if is_far else files))
        settings = arguments(api, self._plan, image, self._volumes, mounts)
        if self.relayed:
            self.relayed.make(api)
            self.relayed.join(settings)
        self._container = api.create_container(labels=self.labels, **settings)["Id"]
        for file in files if is_far else ():
            self._put(api, file.source, file.target)
        grown = container_life.folders(api, self._container, self._volumes)
        self._watched = [folder for folder in grown if os.access(folder, os.R_OK)]  # root's, and the engine's machine's

    async def _start(self) -> None:
        if self._runs:
            return
        pid = await self._engine.do(partial(container_life.start, container=self._container))
        if self._plan.network and not self.relayed:
            *listening, names = await asyncio.to_thread(listeners_within, self._container, pid)
            self._switchboard = Switchboard(self._plan.network, listening, names)
            await self._switchboard.start()
        self._runs = True

    async def _stop(self) -> None:
        self._runs = False
        await self._hang_up()
        await self._engine.do(partial(container_life.kill, container=self._container))
        if self.relayed:
            self._refused = await self._engine.do(self.relayed.refused)

    async def _hang_up(self) -> None:
        switchboard, self._switchboard = self._switchboard, None
        if switchboard:
            await switchboard.close()
            self._refused.update(switchboard.refused)

    def _prepare(self, api: APIClient, command: Command) -> str:
        return api.exec_create(
            self._container,
            wrapped(command.argv, command.stdin),
            stdin=bool(command.stdin),
            user=USER,
            workdir=command.cwd or self._plan.environment.workdir,
            environment=dict(command.env),  # the container has the others
        )["Id"]

    async def _until(self, performing: asyncio.Task[None], timeout_s: float) -> EndedBy:
        limits = self._plan.environment.limits
        disk = asyncio.create_task(broken_limit(limits, self._watched, None))
        memory = asyncio.create_task(self._memory.exhausted(self._container))
        try:
            await asyncio.wait({performing, disk, memory}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._killed:
                return "killed"
            if disk.done():
                return disk.result()
            if memory.done():
                return "memory"
            if not performing.done():
                return "deadline"
            used = await asyncio.to_thread(disk_usage, self._watched)  # what was written since the last look
            return "disk" if used > limits.disk_mb << 20 else "itself"
        finally:
            disk.cancel()
            memory.cancel()

    async def _ended(self, execution: str, by: EndedBy, seconds: float) -> Ended:
        found = await self._engine.do(lambda api: api.exec_inspect(execution))
        status = found["ExitCode"]
        if by == "itself" and (status is None or status > _SIGNALLED):  # what kills the rest may be dead itself
            await self._stop()
            state = (await self._engine.do(lambda api: api.inspect_container(self._container)))["State"]
            by = "memory" if state["OOMKilled"] else by
        return Ended(_KILLED if status is None else status, by, seconds)

    def _put(self, api: APIClient, source: Path, target: str) -> None:
        place, name = self._place(target)
        with tempfile.TemporaryFile(dir=self._plan.folder) as file:
            pack(source, name, file, self._most_bytes)
            if not api.put_archive(self._container, place, file):
                raise SandboxError(f"{source} could not be copied to {target!r}")

    def _take(self, api: APIClient, source: str, target: Path) -> None:
        try:
            pieces, _ = api.get_archive(self._container, source)
        except NotFound as error:
            raise SandboxError(f"there is no {source!r} in the sandbox {self._plan.name!r}") from error
        unpack(pieces, target, self._most_bytes)

    @property
    def _most_bytes(self) -> int:
        return 2 * self._plan.environment.limits.disk_mb << 20

    def _place(self, target: str) -> tuple[str, str]:
        """A folder that can be written to, and the rest of the path."""
        if not self._volumes:
            return "/", target.lstrip("/")
        for place in self._volumes:
            if is_below(target, place):
                return place, "" if target == place else os.path.relpath(target, place)
        raise SandboxError(
            f"{target!r} is in none of {', '.join(self._volumes)}: all else is read-only, for the task names no image"
        )


async def _performed(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stdin: bytes, out: CappedFile, err: CappedFile
) -> None:
    """To the end of its output."""
    telling = asyncio.create_task(_tell(writer, stdin))
    try:
        await sort_frames(reader, out, err)
    finally:
        telling.cancel()


async def _tell(writer: asyncio.StreamWriter, stdin: bytes) -> None:
    with suppress(ConnectionError):  # it ended without reading all
        writer.write(stdin)
        await writer.drain()
