"""Harbor task folders, as Harbor 0.25's own models read them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.task import Budget, Limits
from polar_toolkit.rollout.tasks import folders

ROOT = Path(__file__).parents[4]
TOML = """
schema_version = "1.3"
source = "a registry"
[task]
name = "some-org/fix-the-build"
keywords = ["build"]
[metadata]
difficulty = "hard"
written = 2026-11-30
[agent]
timeout_sec = 900.0
user = "root"
[verifier]
timeout_sec = 120.0
env = { MODE = "strict", KEY = "${JUDGE_KEY}", LEVEL = "${LEVEL:-2}" }
[environment]
build_timeout_sec = 300.0
cpus = 1
memory_mb = 2048
storage_mb = 10240
network_mode = "allowlist"
allowed_hosts = ["data.example"]
env = { LANG = "C" }
[[environment.mcp_servers]]
name = "tools"
url = "http://tools.example"
"""
DOCKERFILE = "FROM python:3.13 AS base\nWORKDIR /elsewhere\nFROM base\nWORKDIR /srv\nWORKDIR app\nRUN true\n"


def write(folder: Path, toml: str = TOML, dockerfile: str = DOCKERFILE) -> Path:
    """A task's folder."""
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Fix the build.\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    return folder


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Harbor's TaskConfig. It writes TOML by a library that reading does not need."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / ".peers")])
    monkeypatch.setitem(sys.modules, "toml", ModuleType("toml"))
    try:
        from harbor.models.task.config import TaskConfig  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        pytest.fail(f"Harbor's models cannot be imported ({error}): run `make peers`", pytrace=False)
    return TaskConfig


def test_a_task_says_what_harbor_reads(judge: Any, tmp_path: Path) -> None:
    """Times, sizes, hosts and name, field by field."""
    theirs = judge.model_validate_toml(TOML)
    ours = folders.read(write(tmp_path / "task"))
    assert ours.budget == Budget(
        theirs.environment.build_timeout_sec, theirs.agent.timeout_sec, theirs.verifier.timeout_sec
    )
    assert ours.environment.limits == Limits(
        theirs.environment.memory_mb, theirs.environment.cpus, Limits().pids, theirs.environment.storage_mb
    )
    assert list(ours.allow_hosts) == theirs.environment.allowed_hosts
    assert ours.task_id == theirs.task.short_name
    assert dict(ours.environment.variables) == theirs.environment.env


def test_older_sizes_are_read_as_harbor_reads_them(judge: Any, tmp_path: Path) -> None:
    """'2G' and '512M'."""
    toml = '[environment]\nmemory = "2G"\nstorage = "512M"\n'
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Harbor's, about these fields
        theirs = judge.model_validate_toml(toml).environment
    ours = folders.read(write(tmp_path / "task", toml)).environment.limits
    assert (ours.memory_mb, ours.disk_mb) == (theirs.memory_mb, theirs.storage_mb) == (2048, 512)


def test_the_dockerfile_says_where_the_work_is_done(tmp_path: Path) -> None:
    """The last stage's last WORKDIR, joined; an image that is named goes before the Dockerfile."""
    folder = write(tmp_path / "built")
    assert folders.read(folder).environment.dockerfile == folder / "environment"
    assert folders.read(folder).environment.workdir == "/srv/app"
    named = folders.read(write(tmp_path / "named", '[environment]\ndocker_image = "x:1"\nworkdir = "/w"\n'))
    assert (named.environment.image, named.environment.dockerfile, named.environment.workdir) == ("x:1", None, "/w")
    assert folders.read(write(tmp_path / "plain", dockerfile="FROM x\n")).environment.workdir == "/app"


def test_it_is_judged_by_its_test_script(tmp_path: Path) -> None:
    """With the verifier's variables; one that would take its value from the host is left out."""
    folder = write(tmp_path / "task")
    check = folders.read(folder).check
    assert (check.kind, check.tests) == ("harbor", folder / "tests")
    assert check.options == {"env": {"MODE": "strict", "LEVEL": "2"}}


def test_what_is_not_used_is_listed(tmp_path: Path) -> None:
    """In the metadata, beside the task's own."""
    metadata = folders.read(write(tmp_path / "task")).metadata
    assert (metadata["difficulty"], metadata["written"]) == ("hard", "2026-11-30")
    assert metadata["ignored"] == [
        "agent.user", "environment.mcp_servers", "environment.network_mode", "source", "task.keywords",
        "verifier.env.KEY",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('[[steps]]\nname = "one"\n', "steps is .*: tasks of several steps are not run here"),
        ('[environment]\nos = "Windows"\n', "environment.os is 'windows': only linux"),
        ('[environment]\nmemory = "much"\n', "environment.memory is 'much': write it like"),
    ],
)
def test_what_would_be_another_task_is_refused(toml: str, said: str, tmp_path: Path) -> None:
    """Rather than run as something else."""
    with pytest.raises(Refusal, match=said):
        folders.read(write(tmp_path / "task", toml))


def test_services_are_refused(tmp_path: Path) -> None:
    """They would be missing."""
    folder = write(tmp_path / "task")
    (folder / "environment" / "docker-compose.yaml").touch()
    with pytest.raises(Refusal, match=r"environment/docker-compose.yaml is 'there': services are not run"):
        folders.read(folder)


def test_a_folder_without_a_judge_is_refused(tmp_path: Path) -> None:
    """The message names both formats."""
    folder = write(tmp_path / "task")
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(Refusal, match=r"tests/test.sh is missing: a Harbor task has one; .* a table \[check\]"):
        folders.read(folder)
