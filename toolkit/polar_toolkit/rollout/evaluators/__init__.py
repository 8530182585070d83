"""How work is judged: an evaluator takes a fresh sandbox with the harness's work in it and returns a reward.

Invariant: what judges comes from the task and is put in place after the harness has ended, so that nothing the harness
wrote can take its place; a reward is a finite number. One module for each kind, and the tuple of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polar_toolkit.errors import Refusal
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
    """The harness's workspace on the host: foreign files, to be read and never run; empty where a patch is carried."""
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
    options: frozenset[str]
    """The names that `Check.options` may hold."""

    async def evaluate(self, bench: Bench) -> Verdict:
        """Judge. Raises EvaluatorError when that cannot be done; the caller sets the deadline."""
        ...


def find(kind: str) -> Evaluator:
    """The evaluator of a kind. Raises Refusal for an unknown one."""
    found = next((evaluator for evaluator in EVALUATORS if evaluator.kind == kind), None)
    if found is None:
        raise Refusal(f"no evaluator is called {kind!r}; there are {', '.join(each.kind for each in EVALUATORS)}")
    return found


# The kinds; imported last, for each of them needs what stands above.
from polar_toolkit.rollout.evaluators.command import COMMAND  # noqa: E402
from polar_toolkit.rollout.evaluators.function import FUNCTION  # noqa: E402
from polar_toolkit.rollout.evaluators.harbor import HARBOR  # noqa: E402
from polar_toolkit.rollout.evaluators.output import OUTPUT  # noqa: E402
from polar_toolkit.rollout.evaluators.pytest import PYTEST  # noqa: E402
from polar_toolkit.rollout.evaluators.swebench import SWEBENCH  # noqa: E402

EVALUATORS: tuple[Evaluator, ...] = (COMMAND, PYTEST, SWEBENCH, HARBOR, OUTPUT, FUNCTION)
