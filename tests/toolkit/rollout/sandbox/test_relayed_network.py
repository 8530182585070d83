"""Docker sandboxes that an engine makes by itself: an internal network with a relay each.

The engine has its usual flags, with bridges and packet filters, and so a network namespace of its own: it changes
nothing of the machine's network, and nothing leaves the namespace.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.outcome import Status
from polar_toolkit.rollout.sandbox import BUNDLE, CA, Plan, SandboxError
from polar_toolkit.rollout.sandbox.container import RUN_LABEL
from polar_toolkit.rollout.sandbox.container_images import Image
from polar_toolkit.rollout.sandbox.docker import Docker
from polar_toolkit.rollout.sandbox.docker_engine import Engine
from polar_toolkit.rollout.sandbox.relayed_network import HOST, WAY, RelayedNetwork, Relays, relays
from polar_toolkit.rollout.task import Environment
from tests.bench.contained import perform_together
from tests.bench.provisions import ROOT
from tests.bench.rolling import rolled
from tests.harness.performance import CLOSING, GREETING
from tests.toolkit.rollout.sandbox.rooms import ALLOWED, FORBIDDEN, network, room
from tests.toolkit.rollout.sandbox.test_docker import image_of_its_own
from tests.toolkit.rollout.test_faults import ASK as ASK_MODEL
from tests.toolkit.rollout.test_faults import WORK, options, task
from tests.toolkit.rollout.test_faults import engine as scripted

BRIDGE = "172.17.0.1"
"""The engine's own, in a namespace that has no other."""
RUN_ID = "relayed"
ASK = (
    "import socket, sys, time; began = time.monotonic()\n"
    "try: print(socket.gethostbyname(sys.argv[1]))\n"
    "except OSError as error: print(error.errno)\n"
    "print(time.monotonic() - began)"
)
CALL = (
    "import socket, sys\n"
    "try: print('reached', socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).recv(9))\n"
    "except OSError as error: print('not reached')"
)


@pytest.fixture(scope="module")
def engine() -> Generator[docker.APIClient]:
    """An engine that this process's DOCKER_HOST names meanwhile, in whose network we are."""
    folder = Path(tempfile.mkdtemp(prefix="dockerd-"))  # short: its socket's path may have 107 characters
    name = folder.name
    subprocess.run(["ip", "netns", "add", name], check=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        inside = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        os.setns(inside, os.CLONE_NEWNET)
        os.close(inside)
        yield from _engine(folder)
    finally:
        os.setns(before, os.CLONE_NEWNET)
        os.close(before)
        subprocess.run(["ip", "netns", "delete", name], check=True)
        shutil.rmtree(folder)


def _engine(folder: Path) -> Generator[docker.APIClient]:
    host = f"unix://{folder}/docker.sock"
    words = ["dockerd", "--host", host, "--data-root", folder / "data", "--exec-root", folder / "exec"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*words, "--pidfile", folder / "pid"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while not (folder / "docker.sock").is_socket():  # it is made last
            assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)
        client = docker.APIClient(host)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", host)
            patch.setenv(WAY, "relay")
            patch.setenv(HOST, BRIDGE)
            yield client
        client.close()
    finally:
        process.terminate()
        process.wait(60)
        subprocess.run(["umount", "-R", "-l", folder / "data", folder / "exec"], check=False, capture_output=True)


def left(engine: docker.APIClient) -> list[str]:
    """What bears the label of a run."""
    chosen = {"label": RUN_LABEL}
    return [
        *(each["Id"] for each in engine.containers(all=True, filters=chosen)),
        *(each["Name"] for each in engine.networks(filters=chosen)),
        *(each["Name"] for each in engine.volumes(filters=chosen)["Volumes"] or []),
    ]


@pytest.mark.harness
@pytest.mark.slow
def test_two_harnesses_at_once_finish_their_tasks(engine: docker.APIClient, tmp_path: Path):
    """Each through its own relay, to an interceptor at the bridge's address; nothing of them is left."""
    both = perform_together("pi", "openai", tmp_path, ("one.1", "one.2"), kind=Docker, listen_host=BRIDGE)
    for each in both:
        print(f"\nmade in {each.made_s * 1000:.0f} ms, ran {each.seconds:.2f} s, refused {each.refused}")
        assert (each.status, each.greeting) == (0, GREETING), each
        assert CLOSING in each.output
    counts = Counter(both[0].calls) | Counter(both[1].calls)  # whoever ended last saw all of them
    assert counts == {"one.1": 2, "one.2": 2}
    assert left(engine) == []


@pytest.mark.slow
def test_nothing_is_reached_but_allowed_names_through_the_relay(engine: docker.APIClient, tmp_path: Path):
    """Other names do not exist, at once; another name in a hello is refused, and no service of the machine answers."""

    async def scene() -> None:
        asked: list[bytes] = []

        async def interceptor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.close()

        server = await asyncio.start_server(interceptor, BRIDGE, 0)
        way_out = network(server.sockets[0].getsockname()[1], secret="a-secret-of-the-session")
        with socket.create_server(("0.0.0.0", 0)) as listener:
            port = listener.getsockname()[1]
            async with room(tmp_path, network=way_out, kind=Docker(tmp_path, RUN_ID)) as one:
                known, *_ = (await one.sh(f'python3 -c "{ASK}" {ALLOWED.upper()}')).out.split()
                unknown, seconds = (await one.sh(f'python3 -c "{ASK}" {FORBIDDEN}')).out.split()
                assert known.startswith(("198.18.", "198.19."))
                assert unknown == str(socket.EAI_NONAME)
                assert float(seconds) < 2
                done = await one.sh(f"curl -sk --connect-to ::{ALLOWED}:443 https://{FORBIDDEN}/")
                assert done.status == 35, done  # the connection ended within the handshake
                assert asked == []
                gateway = known.rpartition(".")[0] + "." + str(int(known.rpartition(".")[2]) - 1)
                for address in (gateway, BRIDGE, "127.0.0.1", "192.0.2.7"):
                    assert (await one.sh(f'python3 -c "{CALL}" {address} {port}')).out == "not reached\n", address
                assert (await one.sh("env; cat /proc/*/environ")).out.count("a-secret-of-the-session") == 0
                refused: Counter[str] = getattr(one.sandbox, "refused")  # noqa: B009  # not of the protocol
                assert refused[f"{FORBIDDEN}:443"] == 1
                assert refused[FORBIDDEN] > 0
        server.close()

    asyncio.run(scene())
    assert left(engine) == []


@pytest.mark.slow
def test_no_other_sandbox_is_reached(engine: docker.APIClient, tmp_path: Path):
    """Each has a network of its own, also after everything in it was killed."""

    async def scene() -> None:
        way_out = network(9)
        async with (
            room(tmp_path, network=way_out, kind=Docker(tmp_path, RUN_ID)) as one,
            room(tmp_path, name="other", network=way_out, kind=Docker(tmp_path, RUN_ID)) as other,
        ):
            await other.sandbox.kill()
            address = (await other.sh("hostname -i")).out.strip()
            assert address.startswith("198.1"), address
            serving = asyncio.create_task(other.sh(f"timeout 60 python3 -m http.server --bind {address} 8123"))
            assert (await one.sh(f'python3 -c "{CALL}" {address} 8123')).out == "not reached\n"
            assert not serving.done()
            await other.sandbox.kill()
            await serving

    asyncio.run(scene())
    assert left(engine) == []


@pytest.mark.slow
def test_an_image_of_its_own_needs_no_file_of_this_machine(engine: docker.APIClient, tmp_path: Path):
    """An engine elsewhere could not show it: the certificates are copied into the container."""

    async def scene() -> None:
        environment = Environment(dockerfile=image_of_its_own(tmp_path / "image"), workdir="/testbed")
        way_out = network(9)
        async with room(tmp_path, environment, network=way_out, kind=Docker(tmp_path, RUN_ID)) as one:
            assert (await one.sh(f"cat {BUNDLE}")).out.encode() == way_out.bundle.read_bytes()
            assert (await one.sh(f"cat {CA}")).out.encode() == way_out.ca.read_bytes()
            inspected = [
                engine.inspect_container(each["Id"]) for each in engine.containers(filters={"label": RUN_LABEL})
            ]
            assert [] in [each["Mounts"] for each in inspected]

    asyncio.run(scene())
    assert left(engine) == []


@pytest.mark.slow
def test_a_rollout_ends_with_its_row(engine: docker.APIClient, tmp_path: Path):
    """The interceptor listens where the relay finds it; the attempt is judged in a sandbox without a network."""
    folder = tmp_path / "harness"
    folder.mkdir()
    shutil.copy(ROOT / "harness_images" / "shell" / "harness.toml", folder)
    with scripted() as served:
        asked = replace(options(tmp_path, served, "docker"), harness=str(folder), listen_host=BRIDGE)
        rows = asyncio.run(rolled(asked, [task("asks", f"{ASK_MODEL}; {WORK}", run_s=30)])).rows
    assert (rows["asks.1"].status, rows["asks.1"].reward, rows["asks.1"].calls) == (Status.COMPLETED, 1.0, 1), rows
    assert left(engine) == []


@pytest.mark.slow
def test_a_sweep_removes_relays_and_networks(engine: docker.APIClient, tmp_path: Path):
    """Of a runner that died; a sandbox is one, although it has two containers."""

    async def scene() -> None:
        dead = Docker(tmp_path, RUN_ID)
        await dead.create(Plan("one", tmp_path / "one", Environment(), network=network(9)))
        await dead.close()
        assert len(left(engine)) > 2
        swept = Docker(tmp_path, RUN_ID)
        assert await swept.sweep() == 1
        assert await swept.sweep() == 0
        await swept.close()

    asyncio.run(scene())
    assert left(engine) == []


@pytest.mark.slow
def test_the_check_says_where_the_relay_finds_the_interceptor(engine: docker.APIClient, tmp_path: Path):
    """It tried one out."""

    async def scene() -> str:
        kind = Docker(tmp_path, RUN_ID)
        try:
            return await kind.check()
        finally:
            await kind.close()

    assert f"through a relay that finds it at '{BRIDGE}'" in asyncio.run(scene())
    assert left(engine) == []


def test_a_pattern_of_names_is_refused():
    """The engine's name service knows whole names."""
    with pytest.raises(SandboxError, match=r"'\*.example.com' cannot be allowed"):
        RelayedNetwork(network(9, "*.example.com"), {}, Relays("here", ""), Image("base", "base", is_base=True))


@pytest.mark.parametrize(
    ("host", "asked", "wanted"),
    [
        ("unix:///run/docker.sock", "", False),
        ("unix:///run/docker.sock", "relay", True),
        ("tcp://192.0.2.7:2375", "", True),
        ("tcp://192.0.2.7:2375", "listeners", False),
    ],
)
def test_a_relay_is_for_engines_elsewhere_and_for_who_asks(
    host: str, asked: str, *, wanted: bool, monkeypatch: pytest.MonkeyPatch
):
    """Or, not seen here, for who is not root."""
    monkeypatch.setenv("DOCKER_HOST", host)
    monkeypatch.setenv(WAY, asked)
    engine = Engine()
    assert (relays(engine) is not None) is wanted
    engine.close()


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch):
    """With what there is."""
    monkeypatch.setenv(WAY, "carrier pigeon")
    engine = Engine()
    with pytest.raises(Refusal, match="give relay or listeners"):
        relays(engine)
    engine.close()
