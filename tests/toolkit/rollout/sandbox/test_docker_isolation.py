"""What can be reached from inside a docker sandbox, seen from inside."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from polar_toolkit.rollout.sandbox.docker import Docker
from tests.bench.netns import Namespace
from tests.toolkit.rollout.sandbox.rooms import ADDRESSES, ALLOWED, FORBIDDEN, HOST_KEY, look_around

Found = dict[str, Any]  # Any: JSON


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What a sandbox saw, beside a neighbour and listeners of the host."""
    with Namespace() as namespace, namespace.entered(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", HOST_KEY)
        return asyncio.run(look_around(tmp_path_factory.mktemp("docker"), Docker))


def test_no_service_of_the_host_is_reached(found: Found):
    """A listener on all addresses of the host: every address is refused inside, and the listeners heard nothing."""
    assert found["tcp"] == dict.fromkeys(ADDRESSES, "ECONNREFUSED")
    assert found["reached"] == [False, False]


def test_no_unix_socket_of_the_host_is_reached(found: Found):
    """Neither by its path nor by an abstract name."""
    assert found["abstract"] == "ECONNREFUSED"
    assert found["unix"] == "ENOENT"


def test_no_other_sandbox_is_reached(found: Found):
    """A server in a second container is at none of the addresses, and its files are not there."""
    assert found["neighbour"] == dict.fromkeys(ADDRESSES, "ECONNREFUSED")
    assert "/workspace/of-a-neighbour" not in found["seen"]


def test_a_connection_to_a_bare_address_leads_nowhere(found: Found):
    """The ports of the web take a connection and end it; the interceptor hears of none that has no name."""
    bare = [address for address in ADDRESSES if address != "198.18.0.1"]
    assert [found["web"][address] for address in bare] == [""] * len(bare)
    assert {f"{address}:443" for address in bare} <= found["refused"].keys()
    assert all(asked.startswith(f"CONNECT {ALLOWED}:443 ") for asked in found["asked"])


def test_only_allowed_names_resolve(found: Found):
    """In any case; each other name does not exist, and was counted."""
    assert found["names"][ALLOWED] == found["names"][ALLOWED.upper()] == "198.18.0.1"
    assert found["names"][FORBIDDEN] == str(socket.EAI_NONAME)
    assert found["refused"][FORBIDDEN] > 0


def test_there_is_no_capability(found: Found):
    """Not one in any set, nor a way to get one; nor another user or group."""
    assert set(found["capabilities"]) == {"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"}
    assert {int(value, 16) for value in found["capabilities"].values()} == {0}
    assert found["no_new_privs"] == "1"
    assert found["uid"] == [1000, 1000, 1000, [1000]]
    assert found["mount"] == "EPERM"


def test_no_key_of_the_host_is_inside(found: Found):
    """Neither in the environment nor in what can be read of any process; nor the session's secret, nor a host path."""
    words = [*found["words"], *found["environment"], *found["environment"].values()]
    for hidden in (HOST_KEY, "a-secret-of-the-session", found["host_folder"]):
        assert not [word for word in words if hidden in word], hidden


def test_only_families_of_sockets_that_namespaces_hold_can_be_made(found: Found):
    """unix, IPv4, IPv6, netlink: no vsock, no packet, no alg ...; and no raw socket."""
    assert found["families"] == [socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK]
    assert found["raw"] == "EPERM"


def test_calls_that_reach_past_namespaces_are_refused(found: Found):
    """Keyrings, BPF, performance events, io_uring."""
    assert set(found["calls"].values()) == {"EPERM"}


def test_only_the_sandboxs_own_folders_can_be_written(found: Found):
    """The root, programs, settings, devices and the kernel's switches are read-only."""
    own = {"/workspace/file", "/home/agent/file", "/tmp/file", "/dev/shm/file"}
    assert {path for path, result in found["written"].items() if result == "done"} == own


def test_files_of_the_host_are_not_there(found: Found):
    """/sys and /run are the container's own."""
    assert set(found["seen"]) <= {"/sys", "/run", "/etc/hostname"}
    assert found["host"] == "sandbox"


def test_only_its_own_processes_are_seen(found: Found):
    """The first process and its sleep, and the command with its shell."""
    assert len(found["processes"]) == 4


def test_no_core_is_written(found: Found):
    """RLIMIT_CORE is 0."""
    assert found["limits"][1] == 0
