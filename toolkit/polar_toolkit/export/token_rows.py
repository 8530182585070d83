"""Trajectories of a merged folder as rows of prompt, response and loss mask, with what trainers want to know of them.

Invariant: prompt + response are the trajectory's tokens; the prompt ends before the first token that is trained at this
place, so a token that another trajectory trains has mask 0 or is prompt. Rows of a session stand together. The tokens
of a few trajectories are in memory at a time, of the others only names and rewards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from polar_mitm import journal
from polar_toolkit import advantages, merged
from polar_toolkit.calls import Float32s, Int32s, SessionKey
from polar_toolkit.errors import Refusal
from polar_toolkit.export.source import Source

_NAMES = ("trajectory_id", "run_id", "session_id", "group_id", "kind", "call_ids", "reward")
_TOKENS = ("input_ids", "loss_mask", "logprobs", "versions")


@dataclass(frozen=True, slots=True)
class Member:
    """A session as a member of its group."""

    session: SessionKey
    number: int
    """Of the session in the export, from 0."""
    group: str
    """The group's name; RUN/SESSION for a session without one."""
    group_number: int
    place: int
    """Of the session in its group, from 0."""
    rows: int
    reward: float | None
    advantage: float
    """Against the group (advantages.py); 0 without a reward."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """One trajectory. The arrays of the response have one element a token of it."""

    trajectory_id: str
    member: Member
    place: int
    """Of the row among those of its session, from 0."""
    number: int
    """Of the row in the export, from 0."""
    kind: str
    prompt_ids: Int32s
    response_ids: Int32s
    loss_mask: npt.NDArray[np.uint8]
    logprobs: Float32s
    """0 off the mask."""
    versions: tuple[str, ...]
    """Weight versions of the trained tokens, in the order of their first token."""
    version_numbers: tuple[int, ...]
    """The same as numbers: a name that is an integer is that; others count in the order of their first row."""
    calls: int
    """Calls on the path."""
    truncated: bool
    """Whether the last call ended at its length limit."""

    @property
    def ids(self) -> Int32s:
        """Prompt and response."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def last(self) -> bool:
        """Whether no further row of its session follows."""
        return self.place == self.member.rows - 1


def token_rows(source: Source, *, rewarded: bool = True) -> Iterator[TokenRow]:
    """All trajectories, sessions in the order of the merged folder; with `rewarded`, those that have a reward.

    Counts into `source.tally`. Raises Refusal when nothing is merged.
    """
    pieces = merged.trajectory_pieces(source.merged)
    members = _members(pieces)
    cut, tally = _truncated(source.runs), source.tally
    tally.sampled = merged.read_report(source.merged)["tokens"]["sampled"]
    numbers: dict[str, int] = {}
    places: dict[SessionKey, int] = {}
    for row in (row for piece in pieces for row in _rows(piece)):
        member = members[row["run_id"], row["session_id"]]
        trained = int(row["loss_mask"].sum())
        if rewarded and member.reward is None:
            tally.leave_out("no_reward", trained)
            continue
        place = places[member.session] = places.get(member.session, -1) + 1
        versions = [name for name in row["versions"].unique().to_pylist() if name]
        start = int(np.argmax(row["loss_mask"]))
        yield TokenRow(
            trajectory_id=row["trajectory_id"],
            member=member,
            place=place,
            number=tally.rows,
            kind=row["kind"],
            prompt_ids=row["input_ids"][:start],
            response_ids=row["input_ids"][start:],
            loss_mask=row["loss_mask"][start:],
            logprobs=row["logprobs"][start:],
            versions=tuple(versions),
            version_numbers=tuple(_number(name, numbers) for name in versions),
            calls=len(row["call_ids"]),
            truncated=row["trajectory_id"] in cut,
        )
        tally.rows += 1
        tally.trained += trained


def _members(pieces: list[merged.Piece]) -> dict[SessionKey, Member]:
    """The sessions in the order of their rows. Raises Refusal when the rows of one do not stand together."""
    columns = ["run_id", "session_id", "group_id", "reward"]
    names = pa.concat_tables([piece.read(columns) for piece in pieces]).to_pylist()
    rows: dict[SessionKey, list[dict[str, Any]]] = {}  # Any: by trajectories.SCHEMA
    before = None
    for row in names:
        session = row["run_id"], row["session_id"]
        if session != before and session in rows:
            raise Refusal(f"the rows of session {session!r} do not stand together; run polar-toolkit merge again")
        rows.setdefault(session, []).append(row)
        before = session
    groups = {session: own[0]["group_id"] for session, own in rows.items()}
    rewards = {session: own[0]["reward"] for session, own in rows.items() if own[0]["reward"] is not None}
    scores, _ = advantages.of_sessions(rewards, groups)
    sizes: dict[str, int] = {}
    members: dict[SessionKey, Member] = {}
    for session, own in rows.items():
        group = groups[session] or "/".join(session)
        place = sizes[group] = sizes.get(group, -1) + 1
        members[session] = Member(
            session, len(members), group, list(sizes).index(group), place, len(own), rewards.get(session),
            scores.get(session, 0.0),
        )  # fmt: skip
    return members


def _truncated(runs: list[Path]) -> set[str]:
    """The trajectories whose last call ended at its length limit."""
    tables = (journal.read_calls(run, columns=["finish"]).select(["call_id", "choice", "finish"]) for run in runs)
    rows = (row for table in tables for row in table.filter(pc.field("finish") == "length").to_pylist())
    return {f"{row['call_id']}.{row['choice']}" for row in rows}


def _rows(piece: merged.Piece) -> Iterator[dict[str, Any]]:  # Any: numpy views, names, and an array of versions
    for batch in piece.read([*_NAMES, *_TOKENS]).to_batches():
        names = batch.select(list(_NAMES)).to_pylist()
        for at, row in enumerate(names):
            yield row | {name: _cell(batch.column(name), at) for name in _TOKENS}


def _cell(column: pa.ListArray, at: int) -> Any:  # Any: a numpy view of numbers, an Arrow array of names
    values = column.values.slice(column.offsets[at].as_py(), column.value_lengths()[at].as_py())
    return values.to_numpy() if pa.types.is_primitive(values.type) else values


def _number(version: str, numbers: dict[str, int]) -> int:
    return int(version) if version.isdecimal() else numbers.setdefault(version, len(numbers))
