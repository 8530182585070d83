"""What a rollout leaves on disk of itself: what was asked for, and what has become of each attempt.

Invariant: an attempt whose `ended` event is there is done and its outcome is whole; every other one is missing,
whatever was killed when. `rollout/plan.json` never changes; `rollout/events.jsonl` only grows, is the machines' log
and the state in one, and is written by one runner at a time. It decides nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from polar_toolkit.errors import Refusal, UnreadableFile
from polar_toolkit.rollout import options as asked
from polar_toolkit.rollout.options import Options
from polar_toolkit.rollout.outcome import Outcome
from polar_toolkit.rollout.outcome import from_json as outcome_of
from polar_toolkit.rollout.task import Attempt, Task

FOLDER = "rollout"
"""In the run folder."""
_PLAN = "plan.json"
_EVENTS = "events.jsonl"
_LOCK = "lock"
_SCHEMA_VERSION = 1


# --- the plan -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for, once and for all."""

    run_id: str
    """Marks the sandboxes of this rollout on a machine that has others'."""
    source: Path
    """Where the tasks were read."""
    task_ids: tuple[str, ...]
    """Of this runner's shard, in order."""
    digest: str
    """Of the tasks' contents as far as they are values: the files that they name are not read."""
    options: Options
    versions: Mapping[str, str]


def digest_of(tasks: Sequence[Task]) -> str:
    """One value for all that the tasks say."""
    text = json.dumps([asdict(task) for task in tasks], sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()


def write_plan(plan: Plan) -> None:
    """Begin a rollout: the file appears whole or not at all. Raises Refusal when the run folder holds one already."""
    folder = _folder(plan.options.run)
    begun = folder / f".{_PLAN}.{os.getpid()}"
    row = {
        "schema_version": _SCHEMA_VERSION,
        "run_id": plan.run_id,
        "source": str(plan.source),
        "task_ids": plan.task_ids,
        "digest": plan.digest,
        "options": plan.options.as_json(),
        "versions": dict(plan.versions),
    }
    with begun.open("w") as file:
        json.dump(row, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(begun, folder / _PLAN)  # a rename would go over another runner's plan
    except FileExistsError as error:
        run = plan.options.run
        raise Refusal(
            f"{run} holds a rollout already: polar-toolkit rollout --resume {run} finishes it; "
            "for another one name another run folder"
        ) from error
    finally:
        begun.unlink(missing_ok=True)


def read_plan(run: Path) -> Plan:
    """What was asked for. Raises Refusal when there is no rollout, UnreadableFile when the file is broken."""
    path = run / FOLDER / _PLAN
    if not path.is_file():
        raise Refusal(f"{run} holds no rollout ({path} is missing); start one: polar-toolkit rollout TASKS {run}")
    try:
        row: dict[str, Any] = json.loads(path.read_text())  # Any: JSON values
        options = asked.from_json({**row["options"], "run": run})
        ids = tuple(row["task_ids"])
        return Plan(row["run_id"], Path(row["source"]), ids, row["digest"], options, row["versions"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableFile(f"{path} is malformed ({error!r}); start the rollout anew in another folder") from error


# --- the events ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Past:
    """What earlier runners did."""

    outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    """Of attempts that are done, by attempt id."""
    tried: dict[str, int] = field(default_factory=dict[str, int])
    """The highest try of each attempt that was begun."""
    open: set[str] = field(default_factory=set[str])
    """Sessions that were begun and not ended."""

    def take(self, event: Mapping[str, Any]) -> None:  # Any: JSON
        """Account for one more event."""
        match event["event"]:
            case "began":
                known = self.tried.get(event["attempt_id"], 0)
                self.tried[event["attempt_id"]] = max(known, event["tried"])
                self.open.add(event["session_id"])
            case "again":
                self.open.discard(event["session_id"])
            case "ended":
                self.open.discard(event["outcome"]["session_id"])
                if not event["missing"]:
                    self.outcomes[event["outcome"]["attempt_id"]] = outcome_of(event["outcome"])
            case _:
                return


class State:
    """The events of a run, held by one runner while the block lasts.

    Entering raises Refusal when another runner holds them.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self.past = Past()

    def __enter__(self) -> Self:
        folder = _folder(self._run)
        self._lock = _locked(folder / _LOCK)
        try:
            self.past = _read(folder / _EVENTS)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._events = os.open(folder / _EVENTS, flags, 0o600)
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._events)
        os.close(self._lock)

    def note(self, event: str, **fields: Any) -> None:  # Any: JSON values
        """Append an event: it survives the runner's death, not yet the machine's."""
        row = {"time": round(time.time(), 3), "event": event, **fields}
        os.write(self._events, json.dumps(row, default=str).encode() + b"\n")

    async def began(self, attempt: Attempt) -> None:
        """A try is begun, durably: its session is never used for another one."""
        self.note("began", attempt_id=attempt.attempt_id, session_id=attempt.session_id, tried=attempt.tried)
        await asyncio.to_thread(os.fsync, self._events)

    async def ended(self, outcome: Outcome, *, missing: bool) -> None:
        """An attempt is done, durably; or it was stopped, and is `missing` still."""
        self.note("ended", missing=missing, outcome=outcome.as_json())
        await asyncio.to_thread(os.fsync, self._events)


def _folder(run: Path) -> Path:
    """The rollout's, in a run folder that nobody else may read."""
    run.mkdir(parents=True, exist_ok=True, mode=0o700)
    (run / FOLDER).mkdir(exist_ok=True, mode=0o700)
    return run / FOLDER


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 32).decode()
        os.close(descriptor)
        raise Refusal(
            f"another runner works on {path.parent.parent} (process {holder}); wait for it, or end it with "
            f"kill {holder}"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _read(path: Path) -> Past:
    """What the events say. The beginning of a line that a dying machine left at the end is cut off."""
    past = Past()
    if not path.exists():
        return past
    whole = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                past.take(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise UnreadableFile(f"{path}:{number} is no event: {line[:80]!r}; remove the line") from error
            whole += len(line)
    os.truncate(path, whole)
    return past
