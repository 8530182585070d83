"""Which image a container is made of. That it is the agent's is seen in test_docker.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polar_toolkit.rollout.sandbox import SandboxError
from polar_toolkit.rollout.sandbox.container_images import Image, Images
from polar_toolkit.rollout.sandbox.docker_engine import Engine
from polar_toolkit.rollout.task import Environment


def found(*environments: Environment) -> list[Image]:
    """All asked for at the same time."""

    async def scene() -> list[Image]:
        engine = Engine()
        try:
            images = Images(engine)
            return await asyncio.gather(*map(images.find, environments))
        finally:
            engine.close()

    return asyncio.run(scene())


def test_without_a_wish_it_is_this_machines():
    """Its name says its content."""
    one, other = found(Environment(), Environment())
    assert one == other
    assert one.is_base
    assert one.origin.startswith(f"{one.name}@sha256:")


def test_a_step_that_fails_is_quoted(tmp_path: Path):
    """With the folder of the Dockerfile."""
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY no-such-file /\n")
    with pytest.raises(SandboxError, match=rf"image of {tmp_path} cannot be built: .*no-such-file"):
        found(Environment(dockerfile=tmp_path))


def test_an_image_that_nobody_has_cannot_be_pulled():
    """Nothing listens at the discard port of this machine."""
    with pytest.raises(SandboxError, match="'localhost:9/no-such:1' is not on the engine and cannot be pulled"):
        found(Environment(image="localhost:9/no-such:1"))


def test_a_harnesss_own_image_is_never_looked_for_elsewhere():
    """Nobody else has the right one: it is built."""
    with pytest.raises(SandboxError, match=r"polar-mitm/pi:0\.0' is not on the engine; make it with: polar-toolkit"):
        found(Environment(image="polar-mitm/pi:0.0"))
