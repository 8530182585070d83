"""What is seen, reached and allowed inside a local sandbox, whoever started it.

Every listener that is tried is one that the test made: on all addresses of a network namespace that goes nowhere, on
unix sockets, and in a second sandbox.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from tests.bench.netns import Namespace
from tests.bench.unprivileged import run_as_nobody
from tests.toolkit.rollout.sandbox.rooms import ADDRESSES, ALLOWED, FORBIDDEN, HOST_KEY, look_around

Found = dict[str, Any]  # Any: JSON


@pytest.fixture(scope="module", params=["root", "nobody"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What a sandbox saw that root started, and one that a user without rights started."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "root":
        with Namespace() as namespace, namespace.entered(), pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPENAI_API_KEY", HOST_KEY)
            return asyncio.run(look_around(folder))
    done = run_as_nobody(["python", "-m", "tests.toolkit.rollout.sandbox.rooms", folder], folder)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def test_no_service_of_the_host_is_reached(found: Found):
    """A listener on all addresses of the host: every address is refused inside, and the listeners heard nothing."""
    assert found["tcp"] == dict.fromkeys(ADDRESSES, "ECONNREFUSED")
    assert found["reached"] == [False, False]


def test_no_unix_socket_of_the_host_is_reached(found: Found):
    """Neither by its path nor, which the file system does not hold, by an abstract name."""
    assert found["abstract"] == "ECONNREFUSED"
    assert found["unix"] == "ENOENT"


def test_no_other_sandbox_is_reached(found: Found):
    """A server in a second sandbox is at none of the addresses, and its files are not there."""
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
    assert found["names"]["localhost"] in ("127.0.0.1", "::1")
    assert found["refused"][FORBIDDEN] > 0


def test_there_is_no_capability(found: Found):
    """Not one in any set, nor a way to get one; nor another group."""
    assert set(found["capabilities"]) == {"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"}
    assert {int(value, 16) for value in found["capabilities"].values()} == {0}
    assert found["no_new_privs"] == "1"
    assert found["uid"][:3] == [1000, 1000, 1000]
    assert set(found["uid"][3]) <= {1000, 65534}  # what a user's own groups look like from inside
    assert found["mount"] == "EPERM"


def test_no_key_of_the_host_is_inside(found: Found):
    """Neither in the environment nor in what can be read of any process; nor the session's secret, nor a host path."""
    words = [*found["words"], *found["environment"], *found["environment"].values()]
    for hidden in (HOST_KEY, "a-secret-of-the-session", found["host_folder"], "POLAR_SANDBOX"):
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
    """Nothing but programs and the few settings without which they do not start."""
    assert found["seen"] == []
    assert set(found["root"]) <= {
        ".inside.py", "bin", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "tmp", "usr",
        "var", "workspace",
    }  # fmt: skip
    assert found["host"] == "sandbox"


def test_only_its_own_processes_are_seen(found: Found):
    """bubblewrap's first process, and the command."""
    assert found["processes"] == [1, 2]


def test_nothing_is_inherited_but_the_three_streams(found: Found):
    """Pipes, which name no file of the host. (The fourth is the listing itself.)"""
    assert found["descriptors"][:3] == ["pipe", "pipe", "pipe"]
    assert not [each for each in found["descriptors"][3:] if not each.startswith("/proc")]


def test_processes_are_limited_and_no_core_is_written(found: Found):
    """RLIMIT_NPROC is the task's, RLIMIT_CORE 0."""
    assert found["limits"] == [512, 0]
