"""A harness's image is made of its folder, setup.sh and the certificates that are given.

The slow test builds every one of them on a base that is made here, on the Docker engine that DOCKER_HOST names.
"""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import docker
import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout import recipe
from polar_toolkit.rollout.harnesses.images import build, name_of
from polar_toolkit.rollout.recipe import Recipe
from tests.bench.provisions import ROOT

BASE = "polar-mitm/base:bookworm"
CLASSIC = {"ARG", "FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR"}
SYSTEM_CA = Path("/usr/local/share/ca-certificates")
"""Where an administrator puts what this machine's own network needs."""


def silent(_: str) -> None:
    """Nobody listens to the builder."""


@pytest.fixture
def tiny(tmp_path: Path) -> Recipe:
    """A harness without a Dockerfile."""
    (tmp_path / "harness.toml").write_text(
        'name = "tiny"\nversion = "1.0"\n[runs.a]\nhost = "a"\ndialect = "openai_chat"\ncommand = ["tiny", "{task}"]\n'
    )
    return recipe.load(tmp_path)


def test_the_tag_says_name_and_version(tiny: Recipe):
    """Another version is another image."""
    assert name_of(tiny) == "polar-mitm/tiny:1.0"


def test_a_folder_without_a_dockerfile_is_refused(tiny: Recipe):
    """The sentence says what to write."""
    with pytest.raises(Refusal, match="holds no Dockerfile: write one"):
        build(tiny, say=silent)


def test_a_file_without_a_certificate_is_refused(tmp_path: Path):
    """It is named, before anything is sent to an engine."""
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(Refusal, match="holds no certificate in PEM form"):
        build(recipe.find("pi"), extra_ca=[tmp_path / "ca.pem"], say=silent)


def test_an_engine_that_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch):
    """The sentence says where an engine is named."""
    with socket.socket() as taken:  # nobody listens at its port
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(Refusal, match=r"no Docker engine answers.*DOCKER_HOST"):
            build(recipe.find("pi"), say=silent)


@pytest.mark.parametrize("name", recipe.names())
def test_a_dockerfile_holds_only_what_the_classic_builder_knows(name: str):
    """No mounts, no here-documents, no COPY options; and it ends as the user `agent`."""
    text = (recipe.find(name).folder / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {keyword for keyword, _ in lines} <= CLASSIC
    assert not [rest for _, rest in lines if rest.startswith("--") or "<<" in rest]
    assert [rest for keyword, rest in lines if keyword == "USER"] == ["agent"]


@pytest.fixture(scope="module")
def base() -> str:
    """The base image, made where the engine has none yet."""
    if not os.environ.get("DOCKER_HOST") and not Path("/var/run/docker.sock").exists():
        pytest.fail("no Docker engine: start one and name it with DOCKER_HOST", pytrace=False)
    client = docker.from_env()
    known = {tag for image in client.images.list() for tag in image.tags}
    client.close()
    if BASE not in known:
        subprocess.run([ROOT / "scripts" / "base_image.sh", BASE], check=True)
    return BASE


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", recipe.names())
def test_an_image_builds_and_says_its_version(base: str, name: str):
    """As the user agent, without a network, the harness prints the pinned version."""
    found = recipe.find(name)
    tag = build(found, base=base, network="host", extra_ca=sorted(SYSTEM_CA.glob("*.crt")), say=silent)
    assert tag == name_of(found)
    said = _said(tag, found.version_command or ("id", "-un"))
    assert (found.version if found.version_command else "agent") in said


def _said(image: str, command: tuple[str, ...]) -> str:
    client = docker.from_env()
    try:
        return client.containers.run(image, list(command), network_mode="none", remove=True, stderr=True).decode()
    finally:
        client.close()
