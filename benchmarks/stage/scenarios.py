"""Sessions whose right merging is known: what each sampled token is, behind which tokens, and whether to train it.

Invariant: a scenario is made from random ids and a seed, with no code of the packages that are measured; two sampled
tokens never stand behind the same tokens. Full prompts are kept, so that the truth needs no rebuilding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.stage.sessions import FIRST, OBSERVED, SAMPLED, VOCABULARY
from polar_mitm.journal.frames import stamped_schema
from polar_mitm.rows import SCHEMA_VERSION, token_hash

Ids = npt.NDArray[np.int32]
_OPENER = np.array([77, 78, 79], np.int32)  # what a template writes before a reply; it belongs to the prompt
_TAIL = 3  # sampled tokens that a drifted echo writes anew, one fewer


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of a session: its first prompt, then per turn."""

    first: int = FIRST
    sampled: int = SAMPLED
    observed: int = OBSERVED


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request and its answer."""

    prompt: Ids
    output: Ids
    logprobs: npt.NDArray[np.float32]
    """All different, so that one that strays is seen."""
    parent: int
    """Index of the turn that it goes on from; -1 for none."""
    shared: int
    """Leading tokens of the prompt that are the parent's prompt + output."""
    wanted: bool
    """Whether it is to be trained: not when it was asked again and the session went on with the other answer."""
    messages: tuple[tuple[str, str, int], ...]
    """(role, text, end in the prompt) of the request."""
    said: str
    """The answer's text, which the session echoes."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The turns of one session, in the order in which they were asked."""

    name: str
    turns: tuple[Turn, ...]
    samples: int
    """The least number of training rows that holds all wanted tokens, each behind its own context."""

    @property
    def tokens_in(self) -> int:
        """Tokens of all full prompts and outputs."""
        return sum(len(turn.prompt) + len(turn.output) for turn in self.turns)

    @property
    def wanted(self) -> int:
        """Sampled tokens that are to be trained."""
        return sum(len(turn.output) for turn in self.turns if turn.wanted)


def linear(turns: int, size: Size = Size(), *, seed: int = 0) -> Scenario:
    """A session that only grows."""
    return Scenario("linear", tuple(_line(turns, size, np.random.default_rng(seed))), 1)


def interleaved(turns: int, size: Size = Size(), *, seed: int = 1) -> Scenario:
    """Four agents in one session that ask in turn; the first half of their first prompts is the same."""
    rng, agents = np.random.default_rng(seed), 4
    common = _ids(rng, size.first // 2)
    lines = [_line(turns // agents, size, rng, common=common, name=f"agent {i} ") for i in range(agents)]
    mixed = [
        replace(turn, parent=turn.parent if turn.parent < 0 else turn.parent * agents + agent)
        for step in zip(*lines, strict=True)
        for agent, turn in enumerate(step)
    ]
    return Scenario("interleaved", tuple(mixed), agents)


def drifting(turns: int, size: Size = Size(), *, seed: int = 2) -> Scenario:
    """A session in which every tenth prompt writes the last tokens of the reply before it anew."""
    line = _line(turns, size, np.random.default_rng(seed), drift=10)
    return Scenario("drift", tuple(line), 1 + (turns - 1) // 10)


def retried(turns: int, size: Size = Size(), *, seed: int = 3) -> Scenario:
    """A session that asks every tenth turn twice, and goes on with the second and the first answer alternately."""
    return Scenario("retries", tuple(_line(turns, size, np.random.default_rng(seed), retries=10)), 1)


SCENARIOS: tuple[tuple[str, Callable[[int, Size], Scenario]], ...] = (
    ("(a) linear", linear),
    ("(b) four agents in turn", interleaved),
    ("(c) drift every ten turns", drifting),
    ("(d) every tenth turn asked twice", retried),
)


def _line(
    turns: int, size: Size, rng: np.random.Generator, *, common: Ids | None = None, name: str = "", drift: int = 0,
    retries: int = 0,
) -> list[Turn]:  # fmt: skip
    """One agent's turns."""
    head = np.empty(0, np.int32) if common is None else common
    prompt = np.concatenate([head, _ids(rng, size.first - len(head) - len(_OPENER)), _OPENER])
    messages = [("system", f"{name}instructions", len(prompt) - len(_OPENER))]
    made, parent, shared = list[Turn](), -1, 0
    for number in range(turns):
        asked = [(_ids(rng, size.sampled), True)]
        if retries and number % retries == retries // 2:
            asked.insert(number // retries % 2, (_ids(rng, size.sampled), False))
        for output, wanted in asked:
            said = f"{name}answer {number}{'' if wanted else ', lost'}"
            logprobs = -rng.random(len(output), dtype=np.float32)
            made.append(Turn(prompt, output, logprobs, parent, shared, wanted, tuple(messages), said))
        parent = max(i for i, turn in enumerate(made) if turn.wanted)
        output = made[parent].output
        echo = _retokenized(output) if drift and number % drift == drift - 1 else output
        shared = len(prompt) + (len(output) if echo is output else len(output) - _TAIL)
        messages.append(("assistant", made[parent].said, len(prompt) + len(echo)))
        prompt = np.concatenate([prompt, echo, _ids(rng, size.observed - len(_OPENER)), _OPENER])
        messages.append(("user", f"{name}result {number}", len(prompt) - len(_OPENER)))
    return made


def _retokenized(output: Ids) -> Ids:
    return np.concatenate([output[:-_TAIL], (output[-_TAIL:-1] + 1) % VOCABULARY])


def _ids(rng: np.random.Generator, length: int) -> Ids:
    return rng.integers(100, VOCABULARY, length, dtype=np.int32)


# --- on disk --------------------------------------------------------------------------------------------------------

PLAIN, LINKED, WHOLE = "plain.parquet", "linked", "whole"
"""The forms: records as others keep them; a run with parents and suffixes; a run of full prompts without parents."""


def write(scenario: Scenario, folder: Path) -> None:
    """Write a scenario in all three forms."""
    folder.mkdir(parents=True)
    pq.write_table(
        pa.Table.from_pylist([_plain(turn) for turn in scenario.turns], schema=_PLAIN_SCHEMA), folder / PLAIN
    )
    for form, linked in ((LINKED, True), (WHOLE, False)):
        rows = [_row(i, scenario.turns, linked=linked) for i in range(len(scenario.turns))]
        (folder / form / "calls").mkdir(parents=True)
        table = pa.Table.from_pylist(rows, schema=stamped_schema())
        pq.write_table(table, folder / form / "calls" / "w-000001.parquet", compression="zstd")


_PLAIN_SCHEMA = pa.schema(
    [
        ("prompt_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("text", pa.string()), ("end", pa.int32())]))),
        ("said", pa.string()),
    ]
)


def _plain(turn: Turn) -> dict[str, Any]:  # Any: a row
    messages = [{"role": role, "text": text, "end": end} for role, text, end in turn.messages]
    columns = {"prompt_ids": turn.prompt, "output_ids": turn.output, "logprobs": turn.logprobs}
    return {**columns, "messages": messages, "said": turn.said}


def _row(index: int, turns: tuple[Turn, ...], *, linked: bool) -> dict[str, Any]:  # Any: a row of the calls table
    turn = turns[index]
    row = {
        "schema_version": SCHEMA_VERSION, "run_id": "r", "writer": "w", "sequence": index, "call_id": f"c{index:06d}",
        "choice": 0, "session_id": "s", "kind": "agent", "status": "completed", "prompt_len": len(turn.prompt),
        "prompt_shared": 0, "prompt_suffix": turn.prompt, "output_ids": turn.output, "logprobs": turn.logprobs,
        "versions": [{"start": 0, "end": len(turn.output), "version": "v1"}], "temperature": 1.0, "trainable": True,
        "client_delivered": turn.wanted or not linked,
    }  # fmt: skip
    if not linked:
        return row
    row |= {"prompt_hash": token_hash(turn.prompt)}
    if turn.parent < 0:
        return row | {"root_reason": "first"}
    parent = {"parent_call_id": f"c{turn.parent:06d}", "parent_choice": 0, "parent_evidence": "pointer"}
    return row | parent | {"prompt_shared": turn.shared, "prompt_suffix": turn.prompt[turn.shared :]}
