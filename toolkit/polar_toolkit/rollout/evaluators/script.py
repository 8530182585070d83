"""A command of an evaluator in its sandbox, and the reward that a script may leave in a file.

Invariant: a reward that was read is a finite number; a file is read on the host after everything in the sandbox has
ended, and is never run. The places are Harbor's, so that its test scripts work as they are.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_toolkit.rollout.evaluators import Bench, EvaluatorError, Verdict
from polar_toolkit.rollout.sandbox import Command, Ended
from polar_toolkit.rollout.task import LOGS

SHARE = 0.9
"""Of the time for judging; the rest is for reading what came of it."""
_LARGEST_FILE = 1 << 20


async def run(bench: Bench, argv: tuple[str, ...], name: str, env: Mapping[str, str] = {}) -> Ended:
    """Run a command in the workspace; what it prints goes to LOGS/NAME.out and .err of the bench."""
    return await bench.sandbox.run(Command(argv, env), timeout_s=bench.timeout_s * SHARE, log=bench.logs / name)


async def run_to_its_end(bench: Bench, argv: tuple[str, ...], name: str, env: Mapping[str, str] = {}) -> Ended:
    """As `run`. Raises EvaluatorError when the command did not end by itself."""
    ended = await run(bench, argv, name, env)
    if ended.by != "itself":
        raise EvaluatorError(
            f"{' '.join(argv)!r} was ended by {ended.by} after {ended.seconds:.0f} s: raise the check's timeout or the "
            "environment's limits, or let the script bound what it starts"
        )
    return ended


async def make_logs(bench: Bench) -> None:
    """Make LOGS/verifier in the sandbox, empty."""
    empty = bench.logs / "empty"
    (empty / "verifier").mkdir(parents=True)
    await bench.sandbox.put(empty, LOGS)
    shutil.rmtree(empty)


async def take_logs(bench: Bench) -> Path:
    """LOGS/verifier of the sandbox, copied to the host: foreign files."""
    folder = bench.logs / "verifier"
    await bench.sandbox.take(f"{LOGS}/verifier", folder)
    return folder


def reward_of(folder: Path, key: str = "reward") -> Verdict | None:
    """What reward.json or else reward.txt of a folder says; None where there is neither.

    Raises EvaluatorError for what is no finite number, and for a reward.json of several numbers without `key`.
    """
    for name, parse in (("reward.json", _parse_json), ("reward.txt", _parse_text)):
        if text := text_of(folder / name):
            return parse(text, key)
    return None


def text_of(path: Path, limit: int = _LARGEST_FILE) -> str:
    """What a plain file that a sandbox wrote says; "" where there is none. Raises EvaluatorError beyond the limit."""
    if path.is_symlink() or not path.is_file():
        return ""
    if path.stat().st_size > limit:
        raise EvaluatorError(f"{path.name} has {path.stat().st_size} bytes; at most {limit} are read")
    return path.read_text(errors="replace")


def finite(value: object, what: str) -> float:
    """A number. Raises EvaluatorError for anything else, booleans and infinity among it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EvaluatorError(f"{what} is {value!r}: it has to be a finite number")
    return float(value)


def _parse_text(text: str, _: str) -> Verdict:
    try:
        return Verdict(finite(float(text), "reward.txt"))
    except ValueError as error:
        raise EvaluatorError(f"reward.txt says {text[:80]!r}: it has to be a finite number") from error


def _parse_json(text: str, key: str) -> Verdict:
    try:
        found: Any = json.loads(text)  # Any: JSON
    except (ValueError, RecursionError) as error:
        raise EvaluatorError(f"reward.json says {text[:80]!r}: it has to be JSON") from error
    return from_parts(found, "reward.json", key)


def from_parts(found: Any, what: str, key: str = "reward") -> Verdict:  # Any: JSON, or what a callable returned
    """A reward from one number, or from numbers by name. Raises EvaluatorError."""
    if not isinstance(found, Mapping):
        return Verdict(finite(found, what))
    parts = {str(name): finite(value, f"{what}: {name!r}") for name, value in found.items()}
    if key in parts:
        return Verdict(parts[key], {name: value for name, value in parts.items() if name != key})
    if len(parts) == 1:
        return Verdict(next(iter(parts.values())), parts)
    raise EvaluatorError(f"{what} has {sorted(parts)}, and no {key!r}: name one of them in the option reward_key")
