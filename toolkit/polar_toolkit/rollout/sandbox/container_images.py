"""The image that a container is made of: the task's own, pulled or built where it is missing, fitted to an agent.

Invariant: an image is made once, however many sandboxes ask for it at the same time, and its name says its content, so
that a changed Dockerfile is another image. Of the task's image nothing is changed but whose the working folder is.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker import APIClient
from docker.errors import APIError, ImageNotFound
from docker.utils import parse_repository_tag

from polar_toolkit.rollout.sandbox import HOME, OUR_IMAGES, SandboxError, base_image
from polar_toolkit.rollout.sandbox.archives import UID
from polar_toolkit.rollout.sandbox.docker_engine import Engine
from polar_toolkit.rollout.task import Environment

_BUILD_S = 3600
"""The longest silence of one step of a Dockerfile."""
_SAID = 2000
"""Characters of a builder's last words."""
_FITTED = "polar-fitted"
_BUILT = "polar-task"


@dataclass(frozen=True, slots=True)
class Image:
    """What a container is made of."""

    name: str
    """Of the image that is started."""
    origin: str
    """NAME@ID of what was asked for."""
    is_base: bool
    """Made of this machine, and in need of its programs."""
    path: str = ""
    """Its own PATH."""


class Images:
    """The images of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def find(self, environment: Environment) -> Image:
        """The image for an environment, made where it is missing. Raises SandboxError."""
        wanted = environment.image or str(environment.dockerfile or "")
        async with self._turns[wanted]:
            return await self._engine.do(lambda api: _found(api, environment))


def _found(api: APIClient, environment: Environment) -> Image:
    workdir = environment.workdir
    if environment.image:
        name = environment.image
        _pull(api, name)
    elif environment.dockerfile:
        name = _built(api, environment.dockerfile)
    else:
        name = base_image.build(api, workdir)
        return Image(name, f"{name}@{_id(api, name)}", is_base=True)
    identity = _id(api, name)
    return Image(_fitted(api, identity, workdir), f"{name}@{identity}", is_base=False, path=_path(api, identity))


def _id(api: APIClient, name: str) -> str:
    return api.inspect_image(name)["Id"]


def _path(api: APIClient, identity: str) -> str:
    """The PATH that an image sets: that of a conda environment, say."""
    settings: list[str] = api.inspect_image(identity)["Config"].get("Env") or []
    return next((word.removeprefix("PATH=") for word in settings if word.startswith("PATH=")), "")


def _has(api: APIClient, name: str) -> bool:
    try:
        api.inspect_image(name)
    except ImageNotFound:
        return False
    return True


def _pull(api: APIClient, name: str) -> None:
    if _has(api, name):
        return
    if name.startswith(f"{OUR_IMAGES}/"):
        raise SandboxError(f"the image {name!r} is not on the engine; make it with: polar-toolkit harness build")
    repository, tag = parse_repository_tag(name)
    failure = f"the image {name!r} is not on the engine and cannot be pulled"
    try:
        _follow(api.pull(repository, tag or "latest", stream=True, decode=True), failure)
    except APIError as error:
        raise SandboxError(f"{failure}: {error.explanation or error}") from error


def _built(api: APIClient, folder: Path) -> str:
    name = f"{_BUILT}:{_digest(folder)}"
    if not _has(api, name):
        steps = api.build(path=str(folder), tag=name, rm=True, forcerm=True, decode=True, timeout=_BUILD_S)
        _follow(steps, f"the image of {folder} cannot be built")
    return name


def _fitted(api: APIClient, identity: str, workdir: str) -> str:
    """With a working folder and a home folder that are the agent's."""
    script = f'mkdir -p "$0" {HOME} && chown -R {UID}:{UID} "$0" {HOME}'
    recipe = f"FROM {identity}\nUSER 0:0\nRUN {json.dumps(['/bin/sh', '-c', script, workdir])}\n"
    name = f"{_FITTED}:{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    if not _has(api, name):
        file = io.BytesIO(recipe.encode())
        steps = api.build(
            fileobj=file, tag=name, rm=True, forcerm=True, decode=True, network_mode="none", timeout=_BUILD_S
        )
        _follow(
            steps, f"{workdir!r} of the image {identity} cannot be given to the agent (it needs sh, mkdir and chown)"
        )
    return name


def _follow(steps: Iterable[dict[str, Any]], failure: str) -> None:  # Any: JSON
    """To the end also after an error: a stream that is left keeps its connection."""
    said, error = "", ""
    for step in steps:
        said = (said + str(step.get("stream", "")))[-_SAID:]
        error = error or str(step.get("error", ""))
    if error:
        raise SandboxError(f"{failure}: {error.strip()}; it said: {' '.join(said.split())}")


def _digest(folder: Path) -> str:
    """Of all files below a folder, with their names and modes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        kind = f"{path.relative_to(folder)}\0{path.lstat().st_mode}\0"
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        digest.update(f"{kind}{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
