"""Real harnesses inside docker sandboxes, through a real mitmdump."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from polar_toolkit.rollout.sandbox.docker import Docker
from tests.bench.contained import SESSION, Left, perform, perform_together
from tests.bench.netns import Namespace
from tests.harness.performance import CLOSING, GREETING

HARNESSES = [("pi", "openai"), ("codex", "openai"), ("claude-code", "anthropic")]
pytestmark = pytest.mark.harness


@pytest.mark.parametrize(("harness", "way"), HARNESSES, ids=lambda value: value)
def test_a_harness_finishes_its_task(harness: str, way: str, tmp_path: Path):
    """Two turns through the switchboard, the file is there, and both calls are the session's."""
    with Namespace() as namespace:
        with namespace.entered():
            left = perform(harness, way, tmp_path, kind=Docker)
        assert namespace.attempts() == []
    assert finished(left), left
    assert Counter(left.calls).keys() == {SESSION}


def test_two_harnesses_at_once_do_not_mix(tmp_path: Path):
    """Each call is recorded in the session of the container that it came from."""
    with Namespace() as namespace, namespace.entered():
        both = perform_together("pi", "openai", tmp_path, ("one.1", "one.2"), kind=Docker)
    assert all(finished(left) for left in both), both
    counts = Counter(both[0].calls) | Counter(both[1].calls)  # whoever ended last saw all of them
    assert counts["one.1"] == counts["one.2"] == 2


def finished(left: Left) -> bool:
    print(f"\nmade in {left.made_s * 1000:.0f} ms, ran {left.seconds:.2f} s, refused {left.refused}")
    return left.status == 0 and CLOSING in left.output and left.greeting == GREETING
