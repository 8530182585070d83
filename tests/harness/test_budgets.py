"""A session whose budget is used up ends its real harness at once, in the words of the provider itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from polar_mitm.identity import register
from polar_mitm.journal import read_calls
from tests.bench.interception import interception
from tests.harness.performance import SESSION, TASK, actor, submitting_actor

pytestmark = pytest.mark.harness
_AT_ONCE = 25.0
"""Seconds of a whole run with two calls, start of the harness and of the machine's slowest day included."""
_LINGERS = {"qwen-code": 32.0}
"""Qwen Code 0.24.4 stays for 25 to 30 s after its last reply, whatever that was."""


@pytest.mark.parametrize(
    ("harness", "way"),
    [
        ("codex", "openai"), ("claude-code", "anthropic"), ("pi", "openai"), ("pi", "anthropic"), ("pi", "google"),
        ("pi", "openrouter"), ("qwen-code", "openai"), ("gemini-cli", "google"), ("opencode", "openai"),
        ("mini-swe-agent", "openai"),
    ],
)  # fmt: skip
def test_a_harness_ends_with_its_turns(tmp_path: Path, harness: str, way: str) -> None:
    """Its one turn is answered, its next call is refused once or twice, and it does not try for long."""
    act = submitting_actor if harness == "mini-swe-agent" else actor(harness)
    with interception(tmp_path, act) as bench:
        bench.run.mkdir()
        register(bench.run, SESSION, "group", turns=1)
        with bench.proxy():
            began = time.monotonic()
            done = bench.perform(harness, way, TASK, session=SESSION)
            took = time.monotonic() - began
        rows = read_calls(bench.run).to_pylist()
    refused = [row for row in rows if row["error_kind"] == "budget_used"]
    assert [row["kind"] for row in rows if row["status"] == "completed" and row["kind"] == "agent"] == ["agent"]
    assert 1 <= len(refused) <= 2, done.output
    assert took < _LINGERS.get(harness, _AT_ONCE), done.output
