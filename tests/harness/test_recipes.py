"""harness_images/NAME/harness.toml and the versions that `make harnesses` installs tell the same story."""

from __future__ import annotations

import json

import pytest

from polar_toolkit.rollout import recipe
from polar_toolkit.rollout.recipe import Recipe

INSTALLED = [name for name in recipe.names() if recipe.find(name).package]


@pytest.fixture(params=INSTALLED)
def installed(request: pytest.FixtureRequest) -> Recipe:
    return recipe.find(request.param)


def test_the_recipe_names_the_version_that_is_installed(installed: Recipe):
    """The version that a recipe was observed with is the pinned one."""
    requirements = installed.folder / "requirements.txt"
    if requirements.exists():  # it comes from the Python registry
        assert f"{installed.package}=={installed.version}" in requirements.read_text().splitlines()
    else:
        pinned = json.loads((recipe.IMAGES / "package.json").read_text())["dependencies"]
        assert installed.version == pinned[installed.package]
    assert installed.name == installed.folder.name


def test_no_compromised_release_is_pinned():
    """litellm 1.107.0 carries foreign code."""
    for requirements in recipe.IMAGES.glob("*/requirements.txt"):
        assert "litellm==1.107.0" not in requirements.read_text().splitlines()


def test_a_recipe_says_all_that_a_sandbox_and_a_check_need(installed: Recipe):
    """Every installed harness has a program to mount, a shell tool, and something that prints its version."""
    assert installed.programs
    assert all(installed.shell_tool)
    assert installed.version_command
