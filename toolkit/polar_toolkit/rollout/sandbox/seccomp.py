"""The system calls that a local sandbox refuses: what reaches past namespaces, as a classic BPF program.

Invariant: only the families of sockets that a network namespace holds can be made (unix, IPv4, IPv6, netlink), by
whatever way; a program for another machine's calls (32 bit, x32) is not run. It leaves user namespaces alone: harnesses
build sandboxes of their own with them.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from dataclasses import dataclass

from polar_toolkit.errors import Refusal

FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""All others (vsock, packet, alg, bluetooth, tipc ...) are refused: several are of the whole machine, not of a
network namespace."""
REFUSED = (
    "io_uring_setup",  # makes sockets of any family without the call `socket`
    "io_uring_enter",
    "io_uring_register",
    "add_key",  # keyrings are the machine's
    "request_key",
    "keyctl",
    "bpf",  # ways into the kernel that no harness needs
    "perf_event_open",
    "userfaultfd",
)


@dataclass(frozen=True, slots=True)
class _Machine:
    audit: int
    """The kernel's AUDIT_ARCH constant."""
    calls: dict[str, int]
    foreign: int | None = None
    """Call numbers from here on belong to another way of calling."""


_LATE = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}  # the same on every machine
_MACHINES = {
    "x86_64": _Machine(
        0xC000003E,
        {"socket": 41, "socketpair": 53, "add_key": 248, "request_key": 249, "keyctl": 250, "perf_event_open": 298,
         "bpf": 321, "userfaultfd": 323, **_LATE},
        0x40000000,
    ),
    "aarch64": _Machine(
        0xC00000B7,
        {"socket": 198, "socketpair": 199, "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241,
         "bpf": 280, "userfaultfd": 282, **_LATE},
    ),
}  # fmt: skip
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data; both machines are little-endian
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_Line = tuple[int, int, int, int]
"""Operation, lines to skip when true, when false, operand."""


def program(machine: str = "") -> bytes:
    """The filter as the kernel takes it, for `bwrap --seccomp`. Raises Refusal for an unknown machine.

    `machine` as in uname -m; "" for this one.
    """
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise Refusal(
            f"no filter of system calls is known for the machine {name!r} (known: {', '.join(_MACHINES)}); "
            "use --sandbox docker"
        )
    known = _MACHINES[name]
    lines: list[_Line] = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_EQUAL, 1, 0, known.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if known.foreign is not None:
        lines += [(_AT_LEAST, 0, 1, known.foreign), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    for call in REFUSED:
        lines += [(_EQUAL, 0, 1, known.calls[call]), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    lines += [(_EQUAL, 2, 0, known.calls["socket"]), (_EQUAL, 1, 0, known.calls["socketpair"]), (_RETURN, 0, 0, _ALLOW)]
    lines += [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT)]
    for left, family in zip(range(len(FAMILIES), 0, -1), FAMILIES, strict=True):
        lines += [(_EQUAL, left, 0, int(family))]
    lines += [(_RETURN, 0, 0, _ERROR | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
