"""harness_images/NAME/harness.toml and the versions that `make harnesses` installs tell the same story."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from polar_mitm.wire import DIALECTS
from tests.bench.provisions import ROOT

IMAGES = ROOT / "harness_images"
RECIPES = sorted(IMAGES.glob("*/harness.toml"), key=str)


@pytest.fixture(params=RECIPES, ids=lambda path: path.parent.name)
def recipe(request: pytest.FixtureRequest) -> dict[str, Any]:
    return tomllib.loads(request.param.read_text()) | {"folder": request.param.parent.name}


def test_the_recipe_names_the_version_that_is_installed(recipe: dict[str, Any]):
    """The version that a recipe was observed with is the pinned one."""
    requirements = IMAGES / recipe["folder"] / "requirements.txt"
    if requirements.exists():  # it comes from the Python registry
        assert f"{recipe['package']}=={recipe['version']}" in requirements.read_text().splitlines()
    else:
        pinned = json.loads((IMAGES / "package.json").read_text())["dependencies"]
        assert recipe["version"] == pinned[recipe["package"]]
    assert recipe["name"] == recipe["folder"]


def test_no_compromised_release_is_pinned():
    """litellm 1.107.0 carries foreign code."""
    for requirements in IMAGES.glob("*/requirements.txt"):
        assert "litellm==1.107.0" not in requirements.read_text().splitlines()


def test_every_command_takes_the_task_and_speaks_a_dialect_of_ours(recipe: dict[str, Any]):
    """Each way to run a harness has a place for the instruction and a protocol that is answered."""
    for run in recipe["runs"].values():
        assert "{task}" in run["command"]
        assert run["dialect"] in {dialect.name for dialect in DIALECTS}
