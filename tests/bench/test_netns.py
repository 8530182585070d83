"""The namespace lets nothing out, and its recorder sees every try."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.bench.netns import Attempt, Namespace, main


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with Namespace() as made:
        yield made


def test_a_tcp_connection_is_refused_and_recorded(namespace: Namespace):
    """A child process that connects to an outside address is refused at once, and the address is on record."""
    with namespace.entered():
        done = subprocess.run(["curl", "-s", "-m", "5", "https://1.2.3.4/"], check=False)
    assert done.returncode == 7  # curl: failed to connect
    assert namespace.attempts() == [Attempt("tcp", "1.2.3.4", 443, "")]


def test_a_connection_over_ipv6_is_recorded(namespace: Namespace):
    """IPv6 is no way out."""
    with namespace.entered(), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as tried:
        refused = tried.connect_ex(("2001:db8::1", 443))
    assert refused
    assert namespace.attempts() == [Attempt("tcp", "2001:db8::1", 443, "")]


def test_a_datagram_is_recorded(namespace: Namespace):
    """UDP needs no answer to have been tried (QUIC to a provider)."""
    with namespace.entered(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tried:
        tried.sendto(b"hello", ("8.8.8.8", 443))
    assert namespace.attempts() == [Attempt("udp", "8.8.8.8", 443, "")]


@pytest.mark.parametrize("resolver", ["8.8.8.8", "127.0.0.53"])
def test_a_look_up_is_recorded_with_its_name(namespace: Namespace, resolver: str):
    """A DNS query names what was looked up, also when the machine's resolver is a local one."""
    query = b"\0\1\1\0\0\1\0\0\0\0\0\0\3api\6openai\3com\0\0\1\0\1"
    with namespace.entered(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tried:
        tried.sendto(query, (resolver, 53))
    assert namespace.attempts() == [Attempt("udp", resolver, 53, "api.openai.com")]


def test_loopback_works_and_is_no_attempt(namespace: Namespace):
    """Servers and clients inside the namespace talk over 127.0.0.1, unrecorded; the machine's own are not there."""
    with namespace.entered(), socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as accepted:
            client.sendall(b"x" * 100_000)
            assert accepted.recv(1) == b"x"
    with socket.socket() as outside:
        assert outside.connect_ex(("127.0.0.1", port))
    assert namespace.attempts() == []


def test_a_busy_loopback_does_not_crowd_out_an_attempt(namespace: Namespace):
    """An attempt after megabytes of local traffic is still seen: the recorder's buffer holds no local TCP."""
    with namespace.entered(), socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client, server.accept()[0] as accepted:
            for _ in range(300):
                client.sendall(b"x" * 50_000)
                assert accepted.recv(50_000, socket.MSG_WAITALL)
        with socket.socket() as tried:
            tried.connect_ex(("1.2.3.4", 80))
    assert namespace.attempts() == [Attempt("tcp", "1.2.3.4", 80, "")]


def test_the_command_prints_attempts_and_fails(capfd: pytest.CaptureFixture[str]):
    """`python -m tests.bench.netns COMMAND` turns a success that tried to leave into a failure."""
    leave = "import socket; socket.socket().connect_ex(('5.6.7.8', 9))"
    assert main([sys.executable, "-c", leave]) == 1
    assert '"address": "5.6.7.8"' in capfd.readouterr().err
    assert main([sys.executable, "-c", "pass"]) == 0
