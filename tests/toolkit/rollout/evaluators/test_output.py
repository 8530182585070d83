"""What a harness prints against what is expected."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from polar_toolkit.rollout.evaluators import Bench, EvaluatorError
from polar_toolkit.rollout.evaluators.output import OUTPUT, matches
from polar_toolkit.rollout.sandbox import Sandbox
from polar_toolkit.rollout.task import Check, Task

NO_SANDBOX = cast(Sandbox, None)  # nothing is run


@pytest.mark.parametrize(
    ("options", "printed", "matching"),
    [
        ({"equals": "Paris"}, " Paris\n", True),
        ({"equals": "Paris"}, "Paris!", False),
        ({"contains": "Paris"}, "It is Paris.", True),
        ({"contains": "Paris"}, "It is paris.", False),
        ({"regex": r"(?i)\bparis\b"}, "It is PARIS.", True),
        ({"regex": r"^\d+$"}, "12a", False),
        ({"number": 42}, "First 41, then 42.", True),
        ({"number": 42}, "First 42, then 41.", False),
        ({"number": 1234.5}, "It is 1,234.50", True),
        ({"number": -3, "tolerance": 0.1}, "about -3.05 degrees", True),
        ({"number": -3, "tolerance": 0.01}, "about -3.05 degrees", False),
        ({"number": 0}, "none", False),
    ],
)
def test_an_output_is_compared(options: dict[str, Any], printed: str, matching: object) -> None:
    """By exactly one of four ways."""
    assert matches(options, printed) is matching


@pytest.mark.parametrize("options", [{}, {"equals": "a", "contains": "b"}])
def test_none_or_two_ways_are_refused(options: dict[str, Any]) -> None:
    """It would not be known which is meant."""
    with pytest.raises(EvaluatorError, match="give one of equals, contains, regex, number"):
        matches(options, "a")


def test_a_pattern_that_is_none_is_refused() -> None:
    """With what is wrong in it."""
    with pytest.raises(EvaluatorError, match=r"regex '\(' is none: missing \)"):
        matches({"regex": "("}, "a")


def test_the_end_of_a_long_output_is_looked_at(tmp_path: Path) -> None:
    """An answer stands at the end; what lies more than a MiB before it does not count."""
    (tmp_path / "out").write_bytes(b"Paris\n" + b"\xff" * (1 << 20) + b"Lyon")
    for word, reward in {"Lyon": 1, "Paris": 0}.items():
        bench = Bench(
            Task("t", "?", Check("output", {"contains": word})), NO_SANDBOX, tmp_path / "out", tmp_path, tmp_path, 9
        )
        assert asyncio.run(OUTPUT.evaluate(bench)).reward == reward
