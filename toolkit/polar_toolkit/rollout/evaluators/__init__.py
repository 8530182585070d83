"""How work is judged: an evaluator takes a fresh sandbox with the harness's work in it and returns a reward.

Invariant: what judges comes from the task and is put in place after the harness has ended, so that nothing the harness
wrote can take its place; a reward is a finite number. One module for each kind, and the tuple of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polar_toolkit.rollout.sandbox import Sandbox
from polar_toolkit.rollout.task import Task


class EvaluatorError(Exception):
    """The work could not be judged: the evaluator's own fault, not a reward of 0."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What an evaluator is given."""

    task: Task
    sandbox: Sandbox
    """Fresh, without network, prepared as the harness's was; the harness's work is in it, the tests are at TESTS."""
    stdout: Path
    """What the harness printed."""
    workspace: Path
    """The harness's workspace on the host: foreign files, to be read and never run."""
    logs: Path
    """Folder for what the evaluator wants kept."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judgement."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    note: str = ""
    artifacts: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Files under `Bench.logs`."""


class Evaluator(Protocol):
    """One kind of judging."""

    kind: str
    """As in `Check.kind`."""

    async def evaluate(self, bench: Bench) -> Verdict:
        """Judge. Raises EvaluatorError when that cannot be done; the caller sets the deadline."""
        ...
