"""Rewards of sessions: RUN/rewards.jsonl, one line a reward; the last line of a session wins.

Invariant: what is in the file is finite and names a session of the run; earlier lines are never changed. It knows
nothing of groups or advantages.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polar_toolkit import calls
from polar_toolkit.errors import Refusal, UnreadableFile

FILE = "rewards.jsonl"


def read(run: Path) -> dict[str, float]:
    """The reward of each scored session of a run. Raises UnreadableFile that names the line."""
    path = run / FILE
    return dict(_lines(path)) if path.is_file() else {}


def append(run: Path, rewards: Mapping[str, float]) -> None:
    """Add one line a session, durably.

    Raises Refusal, with nothing written, for a reward that is not finite or a session that the run does not have.
    """
    for session, reward in rewards.items():
        if not math.isfinite(reward):
            raise Refusal(f"reward of session {session!r} is {reward!r}; give a finite number")
    _refuse_unknown(run, rewards)
    _append_durably(run / FILE, as_lines(rewards))


def as_lines(rewards: Mapping[str, float]) -> str:
    """Rewards by session as the text of a rewards file."""
    return "".join(json.dumps({"session_id": s, "reward": r}) + "\n" for s, r in rewards.items())


def from_file(path: Path) -> dict[str, float]:
    """Rewards of a .jsonl or .csv file with the fields session_id and reward. Raises Refusal or UnreadableFile."""
    if not path.is_file():
        raise Refusal(f"{path} does not exist; give a .jsonl or .csv file with session_id and reward")
    if path.suffix == ".csv":
        with path.open(newline="") as lines:
            return dict(_parse(f"{path}:{n}", row) for n, row in enumerate(csv.DictReader(lines), start=2))
    if path.suffix == ".jsonl":
        return dict(_lines(path))
    raise Refusal(f"{path} is neither .jsonl nor .csv; give session_id and reward in one of these")


def known_sessions(run: Path) -> set[str]:
    """Sessions that were registered or that made a call."""
    return registered_sessions(run) | {call.session_id for call in calls.read(run)}


def registered_sessions(run: Path) -> set[str]:
    """Sessions in RUN/sessions.jsonl."""
    path = run / "sessions.jsonl"
    if not path.is_file():
        return set()
    return {str(row.get("session_id")) for _, row in _json_lines(path)}


def _refuse_unknown(run: Path, sessions: Iterable[str]) -> None:
    missing = set(sessions) - registered_sessions(run)
    missing = missing - known_sessions(run) if missing else missing
    if missing:
        raise Refusal(f"{run} has no session {sorted(missing)[0]!r}; polar-toolkit inspect {run} lists the ones it has")


def _append_durably(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lines(path: Path) -> Iterable[tuple[str, float]]:
    return (_parse(where, row) for where, row in _json_lines(path))


def _json_lines(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:  # Any: JSON values
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UnreadableFile(f"{where} is not JSON: {line[:80]!r}; correct or remove the line") from error
        if not isinstance(row, dict):
            raise UnreadableFile(f"{where} is not a JSON object: {line[:80]!r}; correct or remove the line")
        yield where, row


def _parse(where: str, row: Mapping[str, Any]) -> tuple[str, float]:  # Any: JSON or CSV values
    session, reward = row.get("session_id"), row.get("reward")
    if not isinstance(session, str) or not session:
        raise UnreadableFile(f"{where}: session_id is {session!r}; give the name of a session")
    try:
        value = float(reward)  # type: ignore[arg-type]  # None and lists raise TypeError, caught below
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise UnreadableFile(f"{where}: reward of session {session!r} is {reward!r}; give a finite number")
    return session, value
