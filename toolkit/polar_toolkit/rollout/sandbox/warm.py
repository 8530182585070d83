"""One bubblewrap: started before it is needed, it waits for its command, and with it ends all that it started.

Invariant: when `kill` has returned, no process of the sandbox's process namespace exists any more, for the kernel tells
the end of its first process only after all others; and if this process dies, so do they. It knows nothing of folders.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from polar_toolkit.rollout.sandbox import Network, SandboxError
from polar_toolkit.rollout.sandbox.bubblewrap import INSIDE, Scene, arguments, python
from polar_toolkit.rollout.sandbox.capture import CappedFile, pump
from polar_toolkit.rollout.sandbox.cgroups import Cgroup
from polar_toolkit.rollout.sandbox.inside import PORTS
from polar_toolkit.rollout.sandbox.switchboard import Switchboard

_START_S = 20.0
_END_S = 10.0
_LEAVE_S = 1.0


@dataclass(frozen=True, slots=True)
class Start:
    """What a bubblewrap is started with."""

    program: str
    scene: Scene
    filter: bytes
    """Of system calls."""
    mark: Mapping[str, str]
    """The environment of bubblewrap itself, by which it is found; nothing inside has it."""
    uid: int | None
    """Whom to be outside where root starts it."""
    network: Network | None


@dataclass(slots=True)
class Warm:
    """One that waits, or runs its command."""

    process: asyncio.subprocess.Process
    host: socket.socket
    first: int
    """The process id, on the host, of the first process of its namespace."""
    handle: int
    """Of that process, so that no other can be meant."""
    switchboard: Switchboard | None = None
    _ending: asyncio.Task[None] | None = None

    @property
    def refused(self) -> Counter[str]:
        """What was asked for and not answered."""
        return self.switchboard.refused if self.switchboard else Counter()

    def join(self, group: Cgroup) -> None:
        """Put all of it into a control group. Raises OSError."""
        for pid in (self.process.pid, *family(self.first)):
            group.add(pid)

    def memory(self) -> int:
        """Bytes of its processes that are not files: each one's own, and what they share once for each."""
        return sum(map(_resident, family(self.first)))

    async def begin(self, command: Mapping[str, object]) -> None:
        """Tell it its command. Raises OSError when it has ended meanwhile; the command was not begun then."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.host, json.dumps(command).encode())
        self.host.shutdown(socket.SHUT_WR)
        if not await loop.sock_recv(self.host, 1):
            raise ConnectionResetError("bubblewrap ended while it waited for its command")

    async def finish(self, stdin: bytes, out: CappedFile, err: CappedFile) -> int:
        """Feed the command and write its streams; its exit status. Ends when all of it has."""
        assert self.process.stdout
        assert self.process.stderr
        feeding = asyncio.create_task(self._feed(stdin))
        try:
            await asyncio.gather(pump(self.process.stdout, out), pump(self.process.stderr, err))
            return await self.process.wait()
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def kill(self) -> None:
        """Kill all of it, and wait for the last one's end. Raises SandboxError when the kernel does not let go.

        It may be called by several at once; one that is cancelled does not keep it from being carried out.
        """
        if self._ending is None:
            with suppress(ProcessLookupError):  # it has ended by itself
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(_END_S):
                await _readable(self.handle)
                with suppress(TimeoutError):  # bubblewrap itself sees that, lets nothing lie about, and ends
                    await asyncio.wait_for(asyncio.shield(self.process.wait()), _LEAVE_S)
                with suppress(ProcessLookupError):  # it has
                    self.process.kill()
                await self.process.wait()
        except TimeoutError:
            raise SandboxError(f"process {self.first} does not end on SIGKILL: the kernel holds it") from None
        finally:
            os.close(self.handle)
            self.host.close()
            if self.switchboard:
                await self.switchboard.close()

    async def _feed(self, stdin: bytes) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError, ConnectionResetError):  # the command reads no further
            self.process.stdin.write(stdin)
            await self.process.stdin.drain()
        self.process.stdin.close()


async def start(what: Start) -> Warm:
    """A bubblewrap that waits for its command. Raises SandboxError with bubblewrap's own words.

    Cancelled, it ends only when bubblewrap is ready and has been killed: one that is killed while it starts leaves its
    child behind, which is not tied to it yet.
    """
    starting = asyncio.create_task(_started(what))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        (warm,) = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(warm, Warm):
            await warm.kill()
        raise


async def _started(what: Start) -> Warm:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    report, reported = os.pipe()
    opened = [_file(what.filter), _file("\0".join(arguments(what.scene)).encode() + b"\0")]
    passed = [*opened, theirs.fileno(), reported]
    words = ["--seccomp", f"{passed[0]}", "--args", f"{passed[1]}", "--info-fd", f"{reported}", "--"]
    words += [python()[0], "-I", "-S", "-B", INSIDE, f"{theirs.fileno()}"]
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            what.program, *words, env=what.mark, pass_fds=passed, stdin=pipe, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        ours.close()
        os.close(report)
        raise SandboxError(f"{what.program} cannot be started: {error}") from error
    finally:
        theirs.close()
        for each in (*opened, reported):
            os.close(each)
    return await _ready(what, process, ours, report)


def family(first: int) -> list[int]:
    """A process and its descendants. In a process namespace orphans are children of its first: that is all of it."""
    found = [first]
    for pid in found:
        with suppress(OSError):  # it has ended
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
    return found


async def _ready(what: Start, process: asyncio.subprocess.Process, ours: socket.socket, report: int) -> Warm:
    sockets: list[socket.socket] = []
    try:
        async with asyncio.timeout(_START_S):
            setting = {"network": what.network is not None, "uid": what.uid}
            await asyncio.get_running_loop().sock_sendall(ours, json.dumps(setting).encode() + b"\n")
            sockets = await _received(ours)
        first = int(json.loads(os.read(report, 4096))["child-pid"])
        warm = Warm(process, ours, first, os.pidfd_open(first))
    except (OSError, ValueError) as error:  # TimeoutError is one; ValueError: it ended before it reported
        ours.close()
        raise SandboxError(f"bubblewrap failed: {await _last_words(process, report) or error}") from error
    finally:
        os.close(report)
    if what.network:
        warm.switchboard = Switchboard(what.network, sockets[:-1], sockets[-1])
        await warm.switchboard.start()
    return warm


async def _received(ours: socket.socket) -> list[socket.socket]:
    await _readable(ours.fileno())
    message, descriptors, _, _ = socket.recv_fds(ours, 64, len(PORTS) + 1)
    if not message:
        raise ConnectionResetError("it ended before it was ready")
    return [socket.socket(fileno=each) for each in descriptors]


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


async def _last_words(process: asyncio.subprocess.Process, report: int) -> str:
    os.set_blocking(report, False)
    with suppress(OSError, ValueError):  # it has not reported, or has ended
        child = int(json.loads(os.read(report, 4096))["child-pid"])
        if process.returncode is None:  # nobody but bubblewrap lets go of its child's number
            os.kill(child, signal.SIGKILL)
    with suppress(ProcessLookupError):  # it has ended
        process.kill()
    _, said = await process.communicate()
    return " ".join(said.decode(errors="replace").split())[-500:]


def _file(data: bytes) -> int:
    """An anonymous file in memory, at its beginning."""
    descriptor = os.memfd_create("polar")
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _resident(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
