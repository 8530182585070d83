"""Sockets of this process that listen inside a container's network.

Invariant: the network is that of the very container that is meant, also when process ids are used again meanwhile, and
no thread but one that ends here ever enters it. The container needs no right and no program for it; we have to be the
root of the machine on which the engine runs.
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from polar_toolkit.rollout.sandbox import SandboxError
from polar_toolkit.rollout.sandbox.inside import listeners, make_everything_local


def listeners_within(container: str, pid: int) -> list[socket.socket]:
    """Sockets that listen at every address, as `inside.listeners` orders them. Blocking.

    `container` is its whole id, `pid` that of its first process. Raises SandboxError.
    """
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        raise SandboxError(
            f"container {container[:12]} ended as soon as it was started (process {pid}: {error})"
        ) from None
    try:
        if container not in Path(f"/proc/{pid}/cgroup").read_text():
            raise SandboxError(
                f"process {pid} is not the one of container {container[:12]}: the Docker engine is not on this machine"
            )
        with ThreadPoolExecutor(1) as one:  # it enters, so it must end: its network is another from then on
            return one.submit(_entered, process).result()
    except OSError as error:
        raise SandboxError(f"the network of container {container[:12]} cannot be entered: {error}") from error
    finally:
        os.close(process)


def _entered(process: int) -> list[socket.socket]:
    os.setns(process, os.CLONE_NEWNET)
    make_everything_local()
    return listeners()
