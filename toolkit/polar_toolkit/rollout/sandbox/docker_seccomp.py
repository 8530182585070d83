"""The system calls that a docker sandbox allows: a profile for `--security-opt seccomp=`.

Invariant: a call that is not listed in docker_seccomp.json fails with EPERM: what needs a capability (there is none),
makes namespaces, or reaches past them (keys, io_uring, bpf, handles, other processes' memory). Sockets are of the
families that local sandboxes allow, too; those of the whole machine (vsock, packet, alg) are refused. A program that
makes calls of another machine (32 bit, x32) is killed.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from polar_toolkit.rollout.sandbox.seccomp import FAMILIES

_LIST = Path(__file__).with_name("docker_seccomp.json")
_NAMESPACES = 0x7E020000  # all CLONE_NEW* flags of clone(2)
_PERSONALITIES = (0, 0xFFFFFFFF)  # Linux's own, and the question which it is
_Rule = dict[str, Any]  # Any: JSON


def profile() -> str:
    """The profile, as JSON."""
    names: list[str] = json.loads(_LIST.read_text())["allowed"]
    rules: list[_Rule] = [{"names": names, "action": "SCMP_ACT_ALLOW"}]
    rules += [_allowed("socket", int(family)) for family in FAMILIES]
    rules += [_allowed("socketpair", int(family)) for family in FAMILIES]
    rules += [_allowed("personality", which) for which in _PERSONALITIES]
    rules += [
        {
            "names": ["clone"],
            "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": _NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}],
        },
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},  # its flags lie in memory: unseen
    ]
    return json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": errno.EPERM, "syscalls": rules})


def _allowed(call: str, argument: int) -> _Rule:
    """With this first argument."""
    return {
        "names": [call],
        "action": "SCMP_ACT_ALLOW",
        "args": [{"index": 0, "value": argument, "op": "SCMP_CMP_EQ"}],
    }
