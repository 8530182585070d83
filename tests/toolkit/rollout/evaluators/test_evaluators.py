"""The kinds of judging."""

from __future__ import annotations

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout import evaluators


def test_each_kind_is_found_by_its_name() -> None:
    """The six that a check may name."""
    kinds = [evaluator.kind for evaluator in evaluators.EVALUATORS]
    assert kinds == ["command", "pytest", "swebench", "harbor", "output", "callable"]
    assert [evaluators.find(kind) for kind in kinds] == list(evaluators.EVALUATORS)


def test_an_unknown_kind_is_refused() -> None:
    """With the known ones."""
    with pytest.raises(Refusal, match="no evaluator is called 'magic'; there are command, pytest"):
        evaluators.find("magic")
