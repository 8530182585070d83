"""The image that is made of this machine."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Callable

from docker import APIClient

from polar_toolkit.rollout.sandbox import BUNDLE
from polar_toolkit.rollout.sandbox.base_image import build, programs
from polar_toolkit.rollout.sandbox.docker_engine import Engine


def done[T](work: Callable[[APIClient], T]) -> T:
    """What an engine says."""

    async def scene() -> T:
        engine = Engine()
        try:
            return await engine.do(work)
        finally:
            engine.close()

    return asyncio.run(scene())


def test_it_is_made_once_for_a_working_folder():
    """The same machine and the same folder are the same image; another folder is another."""
    first, again, other = done(lambda api: [build(api, path) for path in ("/workspace", "/workspace", "/opt/app/src")])
    assert first == again
    assert first != other


def test_it_holds_no_programs(tmp_path):
    """Less than a megabyte: settings, certificates, links and empty folders, the agent's its own."""
    name = done(lambda api: build(api, "/opt/app/src"))
    container = done(lambda api: api.create_container(name, ["none"], network_disabled=True)["Id"])
    try:
        with (tmp_path / "image.tar").open("wb") as file:
            done(lambda api: [file.write(piece) for piece in api.export(container)])
    finally:
        done(lambda api: api.remove_container(container))
    with tarfile.open(tmp_path / "image.tar") as tar:
        found = {each.name: each for each in tar}
    assert (tmp_path / "image.tar").stat().st_size < 1 << 20
    assert [found[name].uid for name in ("opt/app", "opt/app/src", "home/agent", "etc")] == [0, 1000, 1000, 0]
    assert BUNDLE.lstrip("/") in found
    assert not [name for name in found if name.startswith(("usr/", "root/"))]


def test_its_programs_are_this_machines():
    """Seen at their own path."""
    assert ("/usr", "/usr") in [(str(mount.source), mount.target) for mount in programs()]
