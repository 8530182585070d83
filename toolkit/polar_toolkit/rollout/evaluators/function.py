"""Kind `callable`: a Python function of yours, on the host. It gets the Bench and says the reward.

Option: `callable`, as `package.module:function` or `path/to/file.py:function`. It returns a number, or numbers by name
with one called "reward"; it may be async. Invariant: what it raises is the evaluator's failure. It runs with your
rights: let it read the harness's files, and never run or import them.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polar_toolkit.rollout.evaluators import Bench, EvaluatorError, Verdict
from polar_toolkit.rollout.evaluators.script import from_parts

_Function = Callable[[Bench], Any]  # Any: the user's own


class Function:
    """The kind."""

    kind = "callable"
    options = frozenset({"callable"})

    async def evaluate(self, bench: Bench) -> Verdict:
        """See Evaluator.evaluate."""
        name = str(bench.task.check.options.get("callable", ""))
        try:
            function = _load(name)
            found = await asyncio.to_thread(function, bench)
            if inspect.isawaitable(found):
                found = await found
        except EvaluatorError:
            raise
        except Exception as error:  # whatever a user's function raises means that it did not judge
            (bench.logs / "callable.err").write_text(traceback.format_exc())
            raise EvaluatorError(f"callable {name!r} raised {error!r}; see evaluation/callable.err") from error
        return from_parts(found, f"callable {name!r}")


def _load(name: str) -> _Function:
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise EvaluatorError(f"callable is {name!r}: write module:function or path/to/file.py:function")
    module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    found = getattr(module, function, None)
    if not callable(found):
        raise EvaluatorError(f"callable {name!r}: {place} has no function {function!r}")
    return found


def _from_file(path: Path) -> Any:  # Any: a module of the user's
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise EvaluatorError(f"callable: {path} is not there, or no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FUNCTION = Function()
