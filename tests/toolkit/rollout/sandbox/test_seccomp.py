"""The filter of system calls, run as the kernel would run it. What it does to real calls: test_local_isolation.py."""

from __future__ import annotations

import errno
import platform
import socket
import struct

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.sandbox.seccomp import FAMILIES, REFUSED, program

ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
X86, ARM = 0xC000003E, 0xC00000B7
SOCKET = {"x86_64": (X86, 41, 53), "aarch64": (ARM, 198, 199)}


def decide(machine: str, number: int, argument: int = 0, *, audit: int = 0) -> int:
    """What the filter returns for a call."""
    call = struct.pack("<IIQQ", number, audit or SOCKET[machine][0], 0, argument)
    lines = list(struct.iter_unpack("HBBI", program(machine)))
    register, at = 0, 0
    while True:
        operation, if_true, if_false, operand = lines[at]
        at += 1
        match operation:
            case 0x20:
                (register,) = struct.unpack_from("<I", call, operand)
            case 0x15:
                at += if_true if register == operand else if_false
            case 0x35:
                at += if_true if register >= operand else if_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(operation)


@pytest.mark.parametrize("machine", SOCKET)
def test_the_families_of_a_network_namespace_are_allowed_and_no_other(machine: str):
    """For socket and for socketpair, whatever stands in the upper half of the argument."""
    for call in SOCKET[machine][1:]:
        for family in range(60):
            expected = ALLOW if family in FAMILIES else ERROR | errno.EAFNOSUPPORT
            assert decide(machine, call, family) == expected
            assert decide(machine, call, family | 1 << 40) == expected
    assert socket.AF_UNIX in FAMILIES
    assert 40 not in FAMILIES  # vsock


@pytest.mark.parametrize("machine", SOCKET)
def test_calls_that_reach_past_namespaces_are_refused(machine: str):
    """io_uring makes sockets of its own; keyrings and the rest are the machine's."""
    refused = {number for number in range(600) if decide(machine, number) == ERROR | errno.EPERM}
    assert {425, 426, 427} <= refused
    assert len(refused) == len(REFUSED)


@pytest.mark.parametrize("machine", SOCKET)
def test_another_machines_calls_end_the_process(machine: str):
    """A 32-bit program could make its sockets through other calls."""
    assert decide(machine, 102, audit=0x40000003) == KILL  # i386's socketcall
    assert decide(machine, 1) == ALLOW


def test_the_other_way_of_calling_is_unknown():
    """x32 numbers on x86_64: as if the kernel did not have them."""
    assert decide("x86_64", 0x40000000 + 41, socket.AF_INET) == ERROR | errno.ENOSYS


def test_an_unknown_machine_is_refused():
    """With the machine's name and another way."""
    with pytest.raises(Refusal, match=r"'riscv64'.*--sandbox docker"):
        program("riscv64")


def test_this_machine_is_the_default():
    """As uname says it."""
    assert program() == program(platform.machine())
