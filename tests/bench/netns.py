"""A network that goes nowhere: a namespace whose every packet lands on `lo`, and a record of who tried to leave.

Invariant: nothing in the namespace can reach a machine, and every TCP connection, UDP datagram and ping that was meant
for one is in `attempts()`. A look-up is recorded wherever the machine's resolver lives, loopback included. It answers
nobody: a connection that tries to leave is refused by the kernel at once. It does not hide files or processes.

Needs the right to make a network namespace: root, or `unshare -rn` around the whole test run.

    python -m tests.bench.netns COMMAND ...   # runs it inside; prints the attempts as JSON lines; status 1 if any
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from ipaddress import ip_address

_OUTGOING = 4  # PACKET_OUTGOING: each packet on lo is seen twice, once leaving and once arriving
_ALL_PROTOCOLS = 3  # ETH_P_ALL
_SO_ATTACH_FILTER = 26
_DROP_LOCAL_TCP = (  # a busy bench moves megabytes over 127/8; its TCP must not fill the recorder's buffer
    (0x30, 0, 0, 0), (0x74, 0, 0, 4), (0x15, 0, 4, 4),  # IP version; not 4: keep
    (0x30, 0, 0, 9), (0x15, 0, 2, 6),  # protocol; not TCP: keep
    (0x30, 0, 0, 16), (0x15, 1, 0, 127),  # first byte of the destination; 127: drop
    (0x06, 0, 0, 0xFFFF), (0x06, 0, 0, 0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to reach another machine."""

    protocol: str
    """tcp, udp or icmp."""
    address: str
    port: int
    """0 for icmp."""
    name: str
    """The name that was looked up; '' when it is no DNS query."""


class Namespace:
    """A network namespace of its own with only `lo`. Close it (or use `with`) to let the kernel forget it."""

    def __init__(self) -> None:
        """Raises PermissionError with the remedy when this process may not make a namespace."""
        self._net = -1
        maker = threading.Thread(target=self._make)  # unshare moves the calling thread, so it gets one of its own
        maker.start()
        maker.join()
        if self._net < 0:
            raise PermissionError(
                "cannot make a network namespace: run as root, or put `unshare -rn` before the command"
            )
        with self.entered():
            _run("ip link set lo up", "ip route add local 0.0.0.0/0 dev lo", "ip -6 route add local ::/0 dev lo")
            self._record = _recorder()

    @contextmanager
    def entered(self) -> Generator[None]:
        """Inside the block, sockets and child processes of the calling thread belong to the namespace."""
        before = _own_network()
        os.setns(self._net, os.CLONE_NEWNET)
        try:
            yield
        finally:
            os.setns(before, os.CLONE_NEWNET)
            os.close(before)

    def attempts(self) -> list[Attempt]:
        """The tries since the last call, oldest first."""
        found: list[Attempt] = []
        while True:
            try:
                packet, origin = self._record.recvfrom(65536)
            except BlockingIOError:  # the kernel's queue is empty: all that was sent until now has been read
                return found
            attempt = parse_attempt(packet) if origin[2] == _OUTGOING else None
            if attempt:
                found.append(attempt)

    def close(self) -> None:
        """Let go of the namespace; it ends with its last process."""
        self._record.close()
        os.close(self._net)

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        try:
            os.unshare(os.CLONE_NEWNET)
        except PermissionError:  # told by __init__, in the caller's thread
            return
        self._net = _own_network()


def parse_attempt(packet: bytes) -> Attempt | None:
    """What an IP packet tries to reach; None when it stays here or opens nothing (an answer, an error)."""
    if packet[0] >> 4 == 4:
        protocol, address, rest = packet[9], ip_address(packet[16:20]), packet[(packet[0] & 15) * 4 :]
    elif packet[0] >> 4 == 6:
        protocol, address, rest = packet[6], ip_address(packet[24:40]), packet[40:]
    else:
        return None
    if protocol in (1, 58):
        return Attempt("icmp", str(address), 0, "") if rest[0] in (8, 128) and not address.is_loopback else None
    port = int.from_bytes(rest[2:4])
    if protocol == 17 and (port == 53 or not address.is_loopback) and rest[:2] != b"\0\x35":  # from port 53: an answer
        return Attempt("udp", str(address), port, _queried(rest[8:]) if port == 53 else "")
    if protocol == 6 and rest[13] & 0x12 == 0x02 and not address.is_loopback:
        return Attempt("tcp", str(address), port, "")
    return None


def _queried(message: bytes) -> str:
    labels: list[str] = []
    rest = message[12:]
    while rest and 0 < rest[0] < 64:
        labels.append(rest[1 : 1 + rest[0]].decode("ascii", "replace"))
        rest = rest[1 + rest[0] :]
    return ".".join(labels)


def _own_network() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _run(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True)


def _recorder() -> socket.socket:
    record = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)  # 0: nothing arrives before the filter stands
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _DROP_LOCAL_TCP))
    program = struct.pack("HP", len(_DROP_LOCAL_TCP), ctypes.addressof(code))
    record.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    record.bind(("lo", _ALL_PROTOCOLS))
    record.setblocking(False)
    return record


def main(command: list[str]) -> int:
    """Run a command inside a namespace; its status, or 1 when it tried to leave."""
    with Namespace() as namespace:
        with namespace.entered():
            status = subprocess.run(command, check=False).returncode
        attempts = namespace.attempts()
    for attempt in attempts:
        print(json.dumps(asdict(attempt)), file=sys.stderr)
    return 1 if attempts else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
