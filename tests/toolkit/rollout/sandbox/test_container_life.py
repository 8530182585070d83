"""A container's life, told to the engine: each step may be done again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import APIClient
from docker.errors import NotFound

from polar_toolkit.rollout.sandbox import SandboxError, base_image
from polar_toolkit.rollout.sandbox.container_life import folders, kill, remove, start, sweep
from polar_toolkit.rollout.sandbox.docker_engine import Engine

RUN = "container-life"


@pytest.fixture
def api() -> Iterator[APIClient]:
    clients: list[APIClient] = []

    async def connect() -> None:
        engine = Engine()
        await engine.do(clients.append)

    asyncio.run(connect())
    yield clients[0]
    sweep(clients[0], Path("/nowhere"), RUN)
    clients[0].close()


def container(api: APIClient, folder: Path, *command: str) -> str:
    host = api.create_host_config(network_mode="none", binds=["/usr:/usr:ro"])
    labels = {"polar.run": RUN, "polar.folder": str(folder)}
    image = base_image.build(api, "/workspace")
    return api.create_container(image, list(command), host_config=host, labels=labels)["Id"]


def test_it_is_started_and_killed_as_often_as_one_likes(api: APIClient, tmp_path: Path):
    """Its first process is another each time it was killed in between."""
    made = container(api, tmp_path, "sleep", "60")
    first = start(api, made)
    assert start(api, made) == first
    kill(api, made)
    kill(api, made)
    assert start(api, made) != first


class EndsAtOnce:
    """An engine whose container has ended before anybody looks."""

    def start(self, container: str) -> None:
        """Nothing stays."""

    def inspect_container(self, container: str) -> dict[str, object]:
        return {"State": {"Running": False, "ExitCode": 7, "Pid": 0}}


def test_one_that_ends_at_once_is_an_error():
    """With its status."""
    with pytest.raises(SandboxError, match="abc ended at once with status 7"):
        start(EndsAtOnce(), "abc")  # pyright: ignore[reportArgumentType]  # all of the client that is needed


def test_its_files_grow_in_its_own_layer(api: APIClient, tmp_path: Path):
    """Which exists on this machine."""
    (folder,) = folders(api, container(api, tmp_path, "true"), {})
    assert folder.is_dir()


def test_what_is_gone_is_removed_already(api: APIClient, tmp_path: Path):
    """Containers and volumes."""
    made = container(api, tmp_path, "true")
    for _ in range(2):
        remove(api, made, ["no-such-volume"])
    with pytest.raises(NotFound):
        api.inspect_container(made)


def test_a_sweep_removes_folders_of_the_run_alone(api: APIClient, tmp_path: Path):
    """A label that names a folder elsewhere is not followed."""
    ours, theirs = tmp_path / "run" / "one", tmp_path / "elsewhere"
    for each in (ours, theirs):
        each.mkdir(parents=True)
        container(api, each, "true")
    assert sweep(api, tmp_path / "run", RUN) == 2
    assert (ours.exists(), theirs.exists()) == (False, True)
