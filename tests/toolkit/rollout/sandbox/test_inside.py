"""The first program of a sandbox, in a network namespace of the test's.

That it gives up all its rights: test_local_isolation.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from polar_toolkit.rollout.sandbox import inside


def in_a_new_network(act) -> object:
    """What a function returns that runs in a network namespace of its own, with lo up."""
    result: list[object] = []

    def run() -> None:
        os.unshare(os.CLONE_NEWNET)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        result.append(act())

    thread = threading.Thread(target=run)  # unshare moves the calling thread
    thread.start()
    thread.join()
    return result[0]


def test_every_address_leads_to_the_listeners():
    """After the route is made, and not before; a connection tells where it was meant to go."""

    def act() -> tuple[int, object, object]:
        with socket.socket() as trying:
            before = trying.connect_ex(("198.18.0.1", 443))
        inside.make_everything_local()
        opened = inside.listeners()
        with socket.create_connection(("198.18.0.1", 443)), opened[0].accept()[0] as accepted:
            meant = accepted.getsockname()
        places = [each.getsockname() for each in opened]
        for each in opened:
            each.close()
        return before, meant, places

    before, meant, places = in_a_new_network(act)  # pyright: ignore[reportGeneralTypeIssues]  # what `act` returns
    assert before != 0
    assert meant == ("198.18.0.1", 443)
    assert places == [("0.0.0.0", 443), ("0.0.0.0", 80), ("127.0.0.53", 53)]


def test_a_route_that_cannot_be_made_is_an_error():
    """Made twice, it exists."""

    def act() -> None:
        inside.make_everything_local()
        with pytest.raises(FileExistsError, match="route"):
            inside.make_everything_local()

    in_a_new_network(act)


def test_it_ends_with_its_runner():
    """When the runner goes before it has said anything, there is nothing to do."""
    ours, theirs = socket.socketpair()
    with theirs:
        words = [sys.executable, "-I", str(Path(inside.__file__)), str(theirs.fileno())]
        with subprocess.Popen(words, pass_fds=[theirs.fileno()]) as process:
            theirs.close()
            ours.close()
            assert process.wait(20) == 0
