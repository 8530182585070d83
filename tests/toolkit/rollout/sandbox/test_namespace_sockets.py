"""Sockets of ours inside another network, here a namespace that a test's own process made."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_toolkit.rollout.sandbox import SandboxError
from polar_toolkit.rollout.sandbox.inside import PORTS, RESOLVER
from polar_toolkit.rollout.sandbox.namespace_sockets import listeners_within


@pytest.fixture
def elsewhere() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a network of its own, with its loopback device up."""
    script = "ip link set lo up; echo ready; exec cat"
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def its_name(process: subprocess.Popen[bytes]) -> str:
    """What stands in the list of its control groups, as a container's id does."""
    return Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()[0]


def test_they_listen_there_and_not_here(elsewhere: subprocess.Popen[bytes]):
    """At every address of that network; we ourselves stay where we are."""
    before = Path("/proc/self/ns/net").readlink()
    *listening, names = listeners_within(its_name(elsewhere), elsewhere.pid)
    asked = ["nsenter", f"--net=/proc/{elsewhere.pid}/ns/net", "bash", "-c"]
    subprocess.run([*asked, ": < /dev/tcp/192.0.2.1/443"], check=True, timeout=10)
    connection, _ = listening[0].accept()
    assert [each.getsockname()[1] for each in listening] == list(PORTS)
    assert names.getsockname() == (RESOLVER, 53)
    assert connection.getsockname() == ("192.0.2.1", 443)
    assert Path("/proc/self/ns/net").readlink() == before
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # still in our own network, in which its ports are not ours
    for each in (*listening, names, connection):
        each.close()


def test_another_process_is_not_entered(elsewhere: subprocess.Popen[bytes]):
    """One that is not the container's, as its control groups say it."""
    with pytest.raises(SandboxError, match="is not the one of container 0123456789ab"):
        listeners_within("0123456789ab" * 5, elsewhere.pid)


def test_one_that_has_ended_is_an_error():
    """With a sentence."""
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(SandboxError, match="ended as soon as it was started"):
        listeners_within("x", process.pid)
