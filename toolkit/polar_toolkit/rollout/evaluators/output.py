"""Kind `output`: what the harness printed, compared with what the task expects. Nothing is run.

Options, exactly one of: `equals` (but for white space at the ends), `contains`, `regex` (searched for), `number` (the
last one that was printed, within `tolerance`, 0 by default). Invariant: only the last MiB of the output is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polar_toolkit.rollout.evaluators import Bench, EvaluatorError, Verdict

_LOOKED_AT = 1 << 20
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WAYS = ("equals", "contains", "regex", "number")


class Output:
    """The kind."""

    kind = "output"
    options = frozenset({*_WAYS, "tolerance"})

    async def evaluate(self, bench: Bench) -> Verdict:
        """See Evaluator.evaluate."""
        return Verdict(float(matches(bench.task.check.options, _end_of(bench.stdout))))


def matches(options: Mapping[str, Any], printed: str) -> bool:  # Any: TOML or JSON
    """Whether an output is what the options expect. Raises EvaluatorError for options that say two things."""
    ways: dict[str, Callable[[Any], bool]] = {  # Any: TOML or JSON
        "equals": lambda wanted: printed.strip() == str(wanted).strip(),
        "contains": lambda wanted: str(wanted) in printed,
        "regex": lambda wanted: _search(str(wanted), printed),
        "number": lambda wanted: _is_near(float(wanted), float(options.get("tolerance", 0)), printed),
    }
    named = [name for name in _WAYS if name in options]
    if len(named) != 1:
        raise EvaluatorError(f"the output check has the options {sorted(options)}: give one of {', '.join(_WAYS)}")
    return ways[named[0]](options[named[0]])


def _search(pattern: str, printed: str) -> bool:
    try:
        return bool(re.search(pattern, printed))
    except re.error as error:
        raise EvaluatorError(f"regex {pattern!r} is none: {error}") from error


def _is_near(wanted: float, tolerance: float, printed: str) -> bool:
    found = _NUMBER.findall(printed)
    return bool(found) and abs(float(found[-1].replace(",", "")) - wanted) <= tolerance


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOOKED_AT))
        return file.read().decode(errors="replace")


OUTPUT = Output()
