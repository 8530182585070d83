"""What is said of a run, and whether it is good, from literals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar_toolkit.rollout import recipe
from polar_toolkit.rollout.harnesses.check import CLOSING, GREETING, Asked, Seen
from polar_toolkit.rollout.harnesses.findings import Finding, findings
from polar_toolkit.rollout.sandbox import Ended

PI = recipe.find("pi")
ASKED = Asked(PI, PI.way(), Path("tokenizer"))
Json = dict[str, Any]


def row(**more: Any) -> Json:
    """A call's row, as far as the lines read it."""
    return {
        "status": "completed", "kind": "agent", "dialect": "openai_responses", "parent_call_id": None,
        "parent_evidence": None, "root_reason": "first", "output_ids": [1, 2, 3], "error": None, "error_kind": None,
        "tools": '[{"name": "bash"}]', **more,
    }  # fmt: skip


SECOND = row(parent_call_id="c1", parent_evidence="pointer", root_reason=None)
GOOD = Seen("1.6.0", Ended(0, "itself", 1.0), (row(), SECOND), {"exact": 1, "root": 1}, 6, GREETING, CLOSING, {})


def lines(**change: Any) -> dict[str, Finding]:
    return {line.what: line for line in findings(ASKED, replace(GOOD, **change))}


def test_a_run_as_it_should_be_is_good_in_every_line():
    """Nothing to look at, nothing missing."""
    assert {line.mark for line in lines().values()} == {"good"}
    assert {line.hint for line in lines().values()} == {""}


@pytest.mark.parametrize(
    ("what", "change", "mark", "hint"),
    [
        ("version", {"version": "1.7.0"}, "note", "1.6.0 is pinned"),
        ("version", {"version": ""}, "note", "set version_command"),
        ("calls", {"rows": ()}, "missing", "does it trust the certificate"),
        ("calls", {"rows": (row(), row(status="refused", error_kind="bad_request", error="x: no"))}, "note", "x: no"),
        ("dialect", {"rows": (row(dialect="gemini"),)}, "note", "harness.toml says 'openai_responses'"),
        ("tool call", {"written": None}, "missing", "the tool is offered"),
        ("tool call", {"written": None, "rows": (row(tools='[{"name": "run"}]'),)}, "missing", "are offered: run"),
        ("final text", {"output": ""}, "missing", "it printed nothing"),
        ("final text", {"output": "a\nb\n"}, "missing", "is 'b'"),
        ("parents", {"rows": (row(), row(root_reason="edited"))}, "missing", "edits its history"),
        ("trained", {"trained": 3}, "note", "polar-toolkit stats"),
        ("trained", {"trained": 0}, "missing", "polar-toolkit stats"),
        ("refused names", {"refused": {"a.b": 2}}, "note", "add to `names`"),
        ("exit status", {"ended": Ended(124, "deadline", 9.0)}, "note", "decides nothing"),
    ],
)
def test_a_line_that_is_not_good_says_what_to_look_at(what: str, change: Json, mark: str, hint: str):
    """Only what makes the harness useless is missing; the rest is a note."""
    line = lines(**change)[what]
    assert line.mark == mark
    assert hint in line.hint


def test_small_calls_beside_the_agents_are_not_counted_against_it():
    """They are not trained by default, so the share is of the agent's tokens."""
    seen = lines(rows=(row(kind="auxiliary"), row(), SECOND))
    assert seen["trained"] == Finding("trained", "100.0% of the agent's sampled tokens", "good")
