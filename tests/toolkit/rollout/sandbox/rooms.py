"""Local sandboxes for tests: made in one line, and spoken to in shell.

python -m tests.toolkit.rollout.sandbox.rooms FOLDER   # look around from inside one; prints what was found
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar_toolkit.rollout.sandbox import Command, EndedBy, Network, Plan, Sandbox, Sandboxes
from polar_toolkit.rollout.sandbox.local import Local
from polar_toolkit.rollout.task import Environment

PROBE = Path(__file__).with_name("probe.py")
SYSTEM_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
ALLOWED, FORBIDDEN = "api.openai.com", "elsewhere.example"
ADDRESSES = ("127.0.0.1", "192.0.2.7", "10.0.0.1", "198.18.0.1")
"""Where a listener of the host would answer, in a namespace in which every address is the host's."""
HOST_KEY = "sk-of-the-host"
PLAIN = Environment()


@dataclass(frozen=True, slots=True)
class Said:
    """What came of a shell command."""

    status: int
    by: EndedBy
    seconds: float
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Room:
    """A sandbox and the folder of its logs."""

    sandbox: Sandbox
    folder: Path

    async def sh(self, script: str, *, timeout_s: float = 20, stdin: bytes = b"") -> Said:
        log = self.folder / f"log-{secrets.token_hex(4)}"
        command = Command(("bash", "-c", script), stdin=stdin)
        ended = await self.sandbox.run(command, timeout_s=timeout_s, log=log)
        out, err = (log.with_name(f"{log.name}.{name}").read_text(errors="replace") for name in ("out", "err"))
        return Said(ended.status, ended.by, ended.seconds, out, err)


@asynccontextmanager
async def room(
    folder: Path,
    environment: Environment = PLAIN,
    *,
    name: str = "one",
    network: Network | None = None,
    kind: Sandboxes | None = None,
    **more: Any,  # Any: fields of Plan
) -> AsyncGenerator[Room]:
    """A sandbox while inside the block."""
    kind = kind or Local(folder, "tests")
    sandbox = await kind.create(Plan(name, folder / name, environment, network=network, **more))
    try:
        yield Room(sandbox, folder)
    finally:
        await sandbox.close()
        await kind.close()


def network(port: int, *names: str, secret: str = "hush") -> Network:
    """The way to an interceptor on this machine."""
    return Network(("127.0.0.1", port), "s1", secret, names or (ALLOWED,), SYSTEM_BUNDLE, SYSTEM_BUNDLE)


async def look_around(folder: Path, kind: Callable[[Path, str], Sandboxes] = Local) -> dict[str, Any]:  # Any: JSON
    """What `probe` sees of listeners that are made for it, of a neighbour, and of the machine; and what they saw."""
    os.environ["OPENAI_API_KEY"] = HOST_KEY
    (folder / "of-the-host").write_text("private")
    asked: list[bytes] = []

    async def interceptor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.read(4096))
        writer.close()

    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        datagrams.bind(("0.0.0.0", 0))
        abstract = stack.enter_context(_unix(f"\0polar-{secrets.token_hex(8)}"))
        named = stack.enter_context(_unix(f"{folder}/socket"))
        server = await asyncio.start_server(interceptor, "127.0.0.1", 0)
        way_out = network(server.sockets[0].getsockname()[1], secret="a-secret-of-the-session")
        async with (
            room(folder, network=way_out, kind=kind(folder, "tests")) as one,
            room(folder, name="other", network=way_out, kind=kind(folder, "tests")) as other,
        ):
            shutil.copy(PROBE, folder / "own-probe.py")
            await one.sandbox.put(folder / "own-probe.py", "/workspace/probe.py")
            serving = asyncio.create_task(other.sh("touch of-a-neighbour; exec python3 -m http.server 8123"))
            told = {
                "tcp": listener.getsockname()[1], "udp": datagrams.getsockname()[1], "addresses": ADDRESSES,
                "abstract": str(abstract.getsockname()[1:], "ascii"), "unix": named.getsockname(), "neighbour": 8123,
                "names": [ALLOWED, ALLOWED.upper(), FORBIDDEN, "localhost"],
                "write": ["/file", "/usr/file", "/etc/passwd", "/etc/file", "/dev/file", "/.inside.py", "/opt",
                          "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/etc/ssl/certs/ca-certificates.crt",
                          "/workspace/file", "/home/agent/file", "/tmp/file", "/dev/shm/file"],
                "files": [str(folder), str(PROBE), str(Path.home() / ".ssh"), "/sys", "/run", "/boot", "/etc/shadow",
                          "/etc/ssh", "/etc/hostname", "/workspace/of-a-neighbour", "/var/run"],
            }  # fmt: skip
            done = await one.sh("exec python3 probe.py", timeout_s=60, stdin=json.dumps(told).encode())
            await other.sandbox.kill()
            await serving
        server.close()
        assert done.status == 0, done
        listener.setblocking(False)
        datagrams.setblocking(False)
        reached = [_reached(listener.accept), _reached(lambda: datagrams.recv(100))]
    return {**json.loads(done.out), "reached": reached, "asked": [each.decode() for each in asked],
            "host_folder": str(folder), "refused": dict(getattr(one.sandbox, "refused", {}))}  # fmt: skip


def _unix(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    return listening


def _reached(take: Any) -> bool:  # Any: accept or recv
    try:
        take()
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    print(json.dumps(asyncio.run(look_around(Path(sys.argv[1])))))
