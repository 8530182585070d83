"""Real harnesses inside local sandboxes: started by root, and by a user who has no rights at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.contained import SESSION, Left, perform
from tests.bench.netns import Namespace
from tests.bench.unprivileged import run_as_nobody
from tests.harness.performance import CLOSING, GREETING

HARNESSES = [("pi", "openai"), ("codex", "openai"), ("claude-code", "anthropic")]
BYPASS = "--dangerously-bypass-approvals-and-sandbox"
OWN_SANDBOX = "--sandbox workspace-write"
pytestmark = pytest.mark.harness


@pytest.mark.parametrize(("harness", "way"), HARNESSES, ids=lambda value: value)
def test_a_harness_finishes_its_task(harness: str, way: str, tmp_path: Path):
    """Two turns through the switchboard, the file is there, and both calls are the session's."""
    with Namespace() as namespace:
        with namespace.entered():
            left = perform(harness, way, tmp_path)
        assert namespace.attempts() == []
    assert finished(left), left


@pytest.mark.parametrize(("harness", "way"), HARNESSES, ids=lambda value: value)
def test_a_harness_finishes_its_task_for_a_user_without_rights(harness: str, way: str, tmp_path_factory):
    """The same, runner, interceptor and sandbox all started by nobody, with no capability to gain."""
    left = as_nobody(tmp_path_factory.mktemp("nobody"), harness, way)
    assert finished(left), left


def test_codex_keeps_its_own_sandbox(tmp_path: Path):
    """Codex's nested bubblewrap works inside ours when root started it."""
    with Namespace() as namespace, namespace.entered():
        left = perform("codex", "openai", tmp_path, {BYPASS: OWN_SANDBOX})
    assert finished(left), left


def test_codex_keeps_its_own_sandbox_for_a_user_without_rights(tmp_path_factory):
    """And when nobody did."""
    left = as_nobody(tmp_path_factory.mktemp("nobody"), "codex", "openai", f"{BYPASS}={OWN_SANDBOX}")
    assert finished(left), left


def as_nobody(folder: Path, *words: str) -> Left:
    harness, way, *replaced = words
    done = run_as_nobody(["python", "-m", "tests.bench.contained", harness, way, folder, *replaced], folder)
    assert done.returncode == 0, done.stdout
    return Left(**json.loads(done.stdout.splitlines()[-1]))


def finished(left: Left) -> bool:
    print(f"\nmade in {left.made_s * 1000:.0f} ms, ran {left.seconds:.2f} s, refused {left.refused}")
    return left.status == 0 and CLOSING in left.output and left.greeting == GREETING and set(left.calls) == {SESSION}
