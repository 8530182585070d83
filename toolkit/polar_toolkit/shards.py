"""Runs cut into shards: sessions that are merged together, and the row groups that hold their calls.

Invariant: every session of the runs is in one shard, in the order of the sessions' first calls; where the cuts lie
follows from the calls alone, not from who merges them. Planning reads a few scalar columns and no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from polar_mitm import journal
from polar_toolkit import calls
from polar_toolkit.calls import Call, SessionKey
from polar_toolkit.errors import Refusal, UnreadableFile
from polar_toolkit.locations import is_remote

SHARD_TOKENS = 8_000_000
"""Stored tokens of a shard: what bounds the memory of a merge."""
SHARD_CALLS = 20_000
_COLUMNS = ("run_id", "session_id", "writer", "sequence", "prompt_len", "prompt_shared", "versions")


@dataclass(frozen=True, slots=True)
class Shard:
    """Sessions of one run that are merged together."""

    run: str
    """Name of the run's folder."""
    sessions: tuple[SessionKey, ...]
    places: tuple[tuple[Path, int], ...]
    """Files and row groups that hold their calls, later ones replacing rows."""

    def read(self) -> dict[SessionKey, list[Call]]:
        """The calls of each session, in order. Raises UnreadableFile."""
        try:
            rows = journal.read_row_groups(self.places, {name for _, name in self.sessions}, calls.COLUMNS)
        except journal.UnreadableRun as error:
            raise UnreadableFile(str(error)) from error
        found = calls.by_session(calls.from_table(rows))
        return {session: found[session] for session in self.sessions}


@dataclass(frozen=True, slots=True)
class Plan:
    """All shards of the runs, run by run."""

    shards: tuple[Shard, ...]
    versions: tuple[str, ...]
    """All weight versions, the oldest first."""

    def sessions_of(self, run: str) -> int:
        """How many sessions a run has."""
        return sum(len(shard.sessions) for shard in self.shards if shard.run == run)


def plan(runs: Sequence[Path], scratch: Path, *, tokens: int = SHARD_TOKENS, rows: int = SHARD_CALLS) -> Plan:
    """Cut the runs into shards of at most so many stored tokens and calls, unless one session has more.

    Journals that are not sealed are copied to the folder `scratch`, where the shards read them.
    Raises Refusal when there is no call, for two runs of one id, and for a remote run that is not sealed.
    """
    shards: list[Shard] = []
    seen: dict[str, Path] = {}
    versions: dict[str, tuple[Any, ...]] = {}  # Any: run, writer and sequence of the first call that has it
    for number, run in enumerate(runs):
        sessions = _sessions(run, scratch, lambda version, order, at=number: _note(versions, version, (at, *order)))
        for run_id in {one.key[0] for one in sessions}:
            if seen.setdefault(run_id, run) != run:
                raise Refusal(f"{run} and {seen[run_id]} are one run ({run_id!r}): one is a copy; move it away")
        shards += (_shard(run, part) for part in _cut(sessions, tokens, rows))
    if not seen:
        raise Refusal(f"{runs[0]} has no calls yet; run a harness through its interceptor, then merge again")
    return Plan(tuple(shards), tuple(sorted(versions, key=lambda name: _age(name, versions))))


@dataclass(slots=True)
class _Session:
    """What planning knows of a session."""

    key: SessionKey
    first: tuple[str, int]
    """(writer, sequence) of its first call."""
    tokens: float = 0
    calls: int = 0
    places: dict[tuple[int, int], Path] = field(default_factory=dict[tuple[int, int], Path])
    """By place of the file among those of the run, and row group."""


def _sessions(run: Path, scratch: Path, note: Callable[[str, tuple[str, int]], None]) -> list[_Session]:
    """The sessions of a run in order of their first call. `note` is told of weight versions."""
    found: dict[SessionKey, _Session] = {}
    try:
        for place, path in enumerate(_settled(run, scratch)):
            for group, (rows, elements) in enumerate(journal.row_groups(path, _COLUMNS)):
                sampled = elements.get("output_ids", 0) / max(1, len(rows))
                for row in _by_session(rows):
                    key, first = (
                        (row["run_id"] or "", row["session_id"] or ""),
                        (row["writer"] or "", row["sequence_min"] or 0),
                    )
                    session = found.setdefault(key, _Session(key, first))
                    session.first = min(session.first, first)
                    session.tokens += (row["prompt_len_sum"] or 0) - (row["prompt_shared_sum"] or 0)
                    session.tokens += sampled * row["sequence_count"]
                    session.calls += row["sequence_count"]
                    session.places[place, group] = path
                _note_versions(rows, note)
    except journal.UnreadableRun as error:
        raise UnreadableFile(str(error)) from error
    return sorted(found.values(), key=lambda session: (session.first, session.key))


def _settled(run: Path, scratch: Path) -> list[Path]:
    if is_remote(run) and any((run / "journal").glob("*.journal")):
        raise Refusal(
            f"{run} has a journal that is not sealed, and a journal is locked where it is written; merge it there, "
            "or end the interceptor and copy what it sealed"
        )
    copies = scratch / run.name
    copies.mkdir()
    return journal.settle(run, copies, calls.COLUMNS)


def _by_session(rows: pa.Table) -> list[dict[str, Any]]:  # Any: a row's values
    grouped = rows.group_by(["run_id", "session_id", "writer"], use_threads=False)
    return grouped.aggregate(
        [("sequence", "min"), ("sequence", "count"), ("prompt_len", "sum"), ("prompt_shared", "sum")]
    ).to_pylist()


def _note_versions(rows: pa.Table, note: Callable[[str, tuple[str, int]], None]) -> None:
    """Tell of each weight version of these rows and of the first call that has it."""
    spans = rows["versions"].combine_chunks()
    table = pa.table({"row": spans.value_parent_indices(), "version": spans.flatten().field("version")})
    calls_of = rows.select(["writer", "sequence"]).take(table["row"])
    named = calls_of.append_column("version", table["version"])
    grouped = named.group_by(["version", "writer"], use_threads=False).aggregate([("sequence", "min")])
    for row in grouped.to_pylist():
        note(row["version"], (row["writer"], row["sequence_min"]))


def _note(versions: dict[str, tuple[Any, ...]], version: str, order: tuple[Any, ...]) -> None:  # Any: as in `plan`
    versions[version] = min(versions.get(version, order), order)


def _age(name: str, versions: dict[str, tuple[Any, ...]]) -> tuple[Any, ...]:  # Any: as in `plan`
    """Numbers by value when all are numbers, else names by their first call."""
    return (int(name),) if all(other.isdecimal() for other in versions) else versions[name]


def _cut(sessions: Sequence[_Session], tokens: int, rows: int) -> Iterator[list[_Session]]:
    part: list[_Session] = []
    room = tokens - 0.0, rows
    for session in sessions:
        room = room[0] - session.tokens, room[1] - session.calls
        if part and min(room) < 0:
            yield part
            part, room = [], (tokens - session.tokens, rows - session.calls)
        part.append(session)
    if part:
        yield part


def _shard(run: Path, sessions: Sequence[_Session]) -> Shard:
    places = {place: path for session in sessions for place, path in session.places.items()}
    ordered = tuple((path, place[1]) for place, path in sorted(places.items(), key=lambda item: item[0]))
    return Shard(run.name, tuple(session.key for session in sessions), ordered)
