"""The profile of system calls, as a value; what it does is seen from inside in test_docker_isolation.py."""

from __future__ import annotations

import json

from polar_toolkit.rollout.sandbox.docker_seccomp import profile
from polar_toolkit.rollout.sandbox.seccomp import FAMILIES, REFUSED


def rules(call: str) -> list[dict[str, object]]:
    return [rule for rule in json.loads(profile())["syscalls"] if call in rule["names"]]


def test_what_is_not_named_is_refused():
    """With EPERM; what a local sandbox refuses is not named."""
    assert json.loads(profile())["defaultAction"] == "SCMP_ACT_ERRNO"
    assert [call for call in (*REFUSED, "mount", "unshare", "setns", "pivot_root") if rules(call)] == []


def test_sockets_are_of_the_families_of_local_sandboxes():
    """Each allowed by its number, and no rule without one."""
    allowed = [rule["args"] for rule in rules("socket")]
    assert allowed == [[{"index": 0, "value": int(family), "op": "SCMP_CMP_EQ"}] for family in FAMILIES]


def test_a_process_is_made_without_new_namespaces():
    """clone3, whose flags cannot be seen, is not there: libraries fall back to clone."""
    (clone,) = rules("clone")
    assert clone["args"] == [{"index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]
    (clone3,) = rules("clone3")
    assert clone3["errnoRet"] == 38
