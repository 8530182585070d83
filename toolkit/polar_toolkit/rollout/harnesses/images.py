"""Container images of harnesses: built from a folder of harness_images by whatever engine DOCKER_HOST names.

Invariant: an image is made of its folder, setup.sh, the pinned version and the certificates that are given, and of
nothing else of this machine. Only what a classic builder knows is asked for; nothing is pushed anywhere.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.recipe import IMAGES, Recipe
from polar_toolkit.rollout.sandbox import OUR_IMAGES

_DOCKERFILE = "Dockerfile"
_SETUP = IMAGES / "setup.sh"
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LAST_LINES = 20
Json = Mapping[str, Any]  # Any: what the engine streams


def name_of(recipe: Recipe) -> str:
    """The tag of a harness's image."""
    return f"{OUR_IMAGES}/{recipe.name}:{recipe.version}"


def is_built(recipe: Recipe) -> bool:
    """Whether the engine has the image. Raises Refusal when there is no engine."""
    client = _engine()
    try:
        return bool(client.images.list(name_of(recipe)))
    except (APIError, requests.ConnectionError) as error:
        raise Refusal(f"the engine cannot say whether it has {name_of(recipe)!r}: {error}") from error
    finally:
        client.close()


def build(
    recipe: Recipe, *, base: str = "", extra_ca: Sequence[Path] = (), network: str = "", say: Callable[[str], None]
) -> str:
    """Build the image and return its tag; `say` is told each line of the builder.

    `base`: the image that it starts from, the Dockerfile's own for "". `extra_ca`: PEM files with certificates that the
    build and the image are to trust. `network`: how RUN steps reach the network, the engine's own way for "".

    Raises Refusal when there is no Dockerfile, no engine or no certificate, or when a step fails.
    """
    arguments = {"VERSION": recipe.version} | ({"BASE": base} if base else {})
    context = _context(recipe, extra_ca)
    client = _engine()
    try:
        steps = client.api.build(
            fileobj=context, custom_context=True, encoding="gzip", tag=name_of(recipe), buildargs=arguments, rm=True,
            forcerm=True, network_mode=network or None, labels={"polar-mitm.harness": recipe.name}, decode=True,
        )  # fmt: skip
        _follow(steps, recipe, say)
    except (APIError, requests.ConnectionError) as error:
        raise Refusal(f"the engine cannot build the image of {recipe.name!r}: {error}") from error
    finally:
        client.close()
    return name_of(recipe)


def _engine() -> docker.DockerClient:
    try:
        return docker.from_env()
    except DockerException as error:
        raise Refusal(f"no Docker engine answers ({error}): start one, or name it with DOCKER_HOST") from error


def _follow(steps: Iterator[Json], recipe: Recipe, say: Callable[[str], None]) -> None:
    """Pass on what the builder says. Raises Refusal with its last lines when a step fails."""
    last: list[str] = []
    for step in steps:
        lines = _COLOUR.sub("", str(step.get("stream", ""))).splitlines()
        for line in filter(str.strip, lines):
            say(line)
            last = [*last, line][-_LAST_LINES:]
        if "error" in step:
            said = "\n".join(last)
            raise Refusal(
                f"{recipe.folder / _DOCKERFILE} does not build: {str(step['error']).strip()}\n{said}\n(--base names "
                "another image to start from, --network host lets its steps use this machine's network, --extra-ca "
                "adds a certificate)"
            )


def _context(recipe: Recipe, extra_ca: Sequence[Path]) -> io.BytesIO:
    """The folder, setup.sh, and extra-ca/ with one certificate a file: all that the builder sees."""
    if not (recipe.folder / _DOCKERFILE).is_file():
        raise Refusal(f"{recipe.folder} holds no {_DOCKERFILE}: write one, or name an image in the task")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path in sorted(recipe.folder.iterdir()):
            tar.add(path, path.name, filter=_anonymous)
        _add(tar, _SETUP.name, _SETUP.read_bytes())
        folder = tarfile.TarInfo("extra-ca")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
        for number, certificate in enumerate(_certificates(extra_ca)):
            _add(tar, f"extra-ca/extra-{number}.crt", certificate)
    packed.seek(0)
    return packed


def _certificates(files: Sequence[Path]) -> Iterator[bytes]:
    for file in files:
        try:
            found = _CERTIFICATE.findall(file.read_bytes())
        except OSError as error:
            raise Refusal(f"--extra-ca {file} cannot be read: {error}") from error
        if not found:
            raise Refusal(f"--extra-ca {file} holds no certificate in PEM form (-----BEGIN CERTIFICATE-----)")
        yield from found


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    tar.addfile(entry, io.BytesIO(content))


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without owner and time, so that the builder's cache knows the same file again on every machine."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry
