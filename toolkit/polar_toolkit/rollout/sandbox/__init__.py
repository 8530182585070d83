"""What a sandbox is: a place with files, in which commands run, and from which nothing but the interceptor is reached.

Invariant: a sandbox forges nothing: who it is, is known outside of it (the switchboard's credentials). Nothing of it
is left once it is closed: no process, container, namespace, mount or folder. One module for each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.task import Environment

HOME = "/home/agent"
"""The harness's home folder inside docker and local sandboxes."""
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
"""Inside: the system's certificates and the interceptor's."""
CA = "/etc/polar/ca.pem"
"""Inside: the interceptor's certificate alone."""
OUR_IMAGES = "polar-mitm"
"""What the names of the harnesses' own images begin with; no registry is asked for one."""
USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LOG_BYTES = 16 << 20
"""Of one stream of one command, the first half and the last half are kept."""

EndedBy = Literal["itself", "deadline", "memory", "disk", "killed"]


class SandboxError(Exception):
    """A sandbox that could not be made or used: the fault of the machine, not of the harness. Tried again."""


@dataclass(frozen=True, slots=True)
class Command:
    """What is run."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """On top of the sandbox's own variables."""
    cwd: str = ""
    """Inside; "" for the workspace."""
    stdin: bytes = b""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    status: int
    """Exit status; 128 + n for signal n, as a shell says it."""
    by: EndedBy
    seconds: float


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of the host that is readable inside."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class Network:
    """The way out: one session at one interceptor."""

    proxy: tuple[str, int]
    """Address of the interceptor, as the host reaches it."""
    session: str
    secret: str
    names: tuple[str, ...]
    """Names that resolve inside, `*.NAME` for all below one; for every other the answer is that it does not exist."""
    bundle: Path
    """PEM file of the host: the system's certificates and the interceptor's."""
    ca: Path
    """PEM file of the host: the interceptor's certificate alone."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sandbox is to be."""

    name: str
    """Unique in the run: the session's, or the session's with `.eval`."""
    folder: Path
    """A folder of the host, made for this sandbox alone; it is removed when the sandbox is closed."""
    environment: Environment
    mounts: tuple[Mount, ...] = ()
    """Read-only; the harness's programs."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of every command. A PATH here holds USUAL_PATH; an image's own is put in before that."""
    network: Network | None = None
    """None: no network at all."""


class Sandbox(Protocol):
    """One sandbox. Commands run one at a time; what one leaves running is ended before the next begins."""

    image: str
    """What it was made of: an image with its id, or a word for the host's own files."""

    async def run(self, command: Command, *, timeout_s: float, log: Path) -> Ended:
        """Run a command to its end and write LOG.out and LOG.err (host paths without suffix), each cut to LOG_BYTES.

        At its deadline, or when a limit of the environment is broken, everything in the sandbox is killed. Raises
        SandboxError when it could not be started. A cancelled `run` kills, too.
        """
        ...

    async def put(self, source: Path, target: str) -> None:
        """Copy a file, or the contents of a folder, of the host to a path inside; symbolic links stay links."""
        ...

    async def take(self, source: str, target: Path) -> None:
        """Copy a file, or the contents of a folder, from inside to a path of the host; links stay links, and what is
        neither file, folder nor link is left out. Runs nothing of the sandbox's on the host."""
        ...

    async def kill(self) -> None:
        """End every process in it; files stay."""
        ...

    async def close(self) -> None:
        """Kill, and remove everything of it. Bounded in time, never raises, may be called twice."""
        ...


class Sandboxes(Protocol):
    """One kind of sandboxes for one run. Made as `Kind(run, run_id)`."""

    name: str

    async def check(self) -> str:
        """Whether this machine can make them, tried out: a sentence on what they hold. Raises Refusal with a remedy."""
        ...

    async def create(self, plan: Plan) -> Sandbox:
        """A sandbox that is ready to run a command at once: whatever takes time is done here. Raises SandboxError."""
        ...

    async def sweep(self) -> int:
        """Remove what a dead runner of this run left behind, in bounded time; how many sandboxes that were."""
        ...

    async def close(self) -> None:
        """Let go of what the sandboxes shared."""
        ...


KINDS = ("local", "docker", "process")


def sandboxes(kind: str, run: Path, run_id: str) -> Sandboxes:
    """The sandboxes of a kind. Raises Refusal for an unknown one."""
    match kind:
        case "local":
            from polar_toolkit.rollout.sandbox.local import Local

            return Local(run, run_id)
        case "docker":
            from polar_toolkit.rollout.sandbox.docker import Docker  # the docker SDK takes half a second to import

            return Docker(run, run_id)
        case "process":
            from polar_toolkit.rollout.sandbox.process import Process

            return Process(run, run_id)
        case _:
            raise Refusal(f"no sandbox is called {kind!r}; there are {', '.join(KINDS)}")
