"""Connections that know of no proxy land at the interceptor, and what is not redirected is still on record."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Generator

import pytest

from tests.bench.netns import Attempt, Namespace
from tests.bench.transparent import ADDRESS, redirected

SO_ORIGINAL_DST = 80


@pytest.fixture
def namespace() -> Generator[Namespace]:
    with Namespace() as made:
        yield made


def test_a_connection_by_name_arrives_with_the_address_that_was_meant(namespace: Namespace):
    """A program that looks a name up and connects to port 443 reaches our listener; the kernel knows what it wanted."""
    with namespace.entered(), socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        with redirected(namespace, port) as asked:
            connect = "import socket; socket.create_connection(('api.example.com', 443)).sendall(b'hello')"
            subprocess.run([sys.executable, "-c", connect], check=True)
            with server.accept()[0] as accepted:
                meant = accepted.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
                assert accepted.recv(5) == b"hello"
    assert struct.unpack("!2xH4s", meant[:8]) == (443, socket.inet_aton(ADDRESS))
    assert set(asked) == {"api.example.com"}
    assert namespace.attempts() == []


def test_other_ports_are_refused_and_recorded(namespace: Namespace):
    """Only web ports are intercepted: a try to leave by another one is an attempt like any other."""
    with redirected(namespace, 9), namespace.entered(), socket.socket() as tried:
        assert tried.connect_ex(("1.2.3.4", 22))
    assert namespace.attempts() == [Attempt("tcp", "1.2.3.4", 22, "")]


def test_after_the_block_nothing_is_redirected(namespace: Namespace):
    """The rules go with the block."""
    with redirected(namespace, 9):
        pass
    with namespace.entered(), socket.socket() as tried:
        tried.connect_ex(("1.2.3.4", 443))
    assert namespace.attempts() == [Attempt("tcp", "1.2.3.4", 443, "")]
