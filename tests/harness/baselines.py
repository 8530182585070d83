"""What other ways of recording and merging make of the very calls of a harness run, beside our own trajectories.

Invariant: whoever merged, rows are judged alike and from the calls alone: a trained token is in its context when the
row, from its first token to this one, is the prompt that the engine was given for some call and what was sampled
behind it. Calls are told apart by their logprobs, which the scripted engine gives out only once. The baselines are
shown at their best: a plain proxy would hand the model what its own chat template makes of the harness's history, with
text and calls of one reply in one message, and its calls come without the auxiliary ones. This module judges no
harness.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from polar_mitm.conversation import Conversation
from polar_mitm.journal import read_calls
from polar_mitm.rows import full_prompts
from polar_mitm.tokens.plain import chat, specs
from polar_toolkit import calls, trajectories
from polar_toolkit.tree import TRAINED_KINDS, grow
from tests.bench.provisions import qwen3_tokenizer
from tests.harness.performance import Json, request_body
from tests.harness.reading import asked, read
from tests.mitm.wire.summary import decoded

NEW = ("first", "subagent", "compaction")
"""Reasons of roots whose requests hold no earlier reply."""
Int32s = np.ndarray[Any, np.dtype[np.int32]]  # Any: shapes are [T]
Float32s = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A call as somebody recorded it."""

    call_id: str
    session: str
    prompt: Int32s
    output: Int32s
    logprobs: Float32s
    ended: bool
    """Whether the model came to its own end, rather than to a limit."""
    parent: str | None = None
    """The call that it goes on from, as our record has it."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A training sample: one element a token."""

    ids: Int32s
    mask: np.ndarray[Any, np.dtype[np.uint8]]
    logprobs: Float32s


@dataclass(frozen=True, slots=True)
class Verdict:
    """What rows do to the sampled tokens of their calls."""

    sampled: int = 0
    trained: int = 0
    """Of these, how many stand on some mask."""
    out_of_context: int = 0
    """Masked places whose row is not what the token was sampled behind."""
    twice: int = 0
    """Masked places of a token that another place has already."""
    rows: int = 0
    sessions: int = 0

    def __add__(self, other: Verdict) -> Verdict:
        mine, others = self._figures(), other._figures()
        return Verdict(*(a + b for a, b in zip(mine, others, strict=True)))

    def _figures(self) -> tuple[int, ...]:
        return self.sampled, self.trained, self.out_of_context, self.twice, self.rows, self.sessions


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of one run, each of the same calls."""

    continuing: int = 0
    """Calls whose request holds an earlier reply."""
    exact: int = 0
    """Of these, how many are attached by an exact edge."""
    ours: Verdict = Verdict()
    continued: int = 0
    """Sampled tokens of replies that a later call goes on from."""
    kept: int = 0
    """Of these, how many still stand behind their prompt in the plain render of some later call."""
    spliced: Verdict = Verdict()
    """Prefix merging of what a plain proxy would have recorded."""
    prompts: int = 0
    faithful: int = 0
    """Of these, how many say what the request says, read from their tokens by code of its own (reading.py)."""

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.continuing + other.continuing,
            self.exact + other.exact,
            self.ours + other.ours,
            self.continued + other.continued,
            self.kept + other.kept,
            self.spliced + other.spliced,
            self.prompts + other.prompts,
            self.faithful + other.faithful,
        )


def compare(run: Path) -> Comparison:
    """Merge the trained kinds of a run in our way and in the others', and judge them all."""
    table = read_calls(run)
    rows = [row for row in table.to_pylist() if row["status"] == "completed"]
    prompts = full_prompts(table)
    ours = [_answer(row, prompts[row["call_id"], row["choice"]]) for row in rows if row["kind"] in TRAINED_KINDS]
    plain = [replace(a, prompt=plain_prompt(rows, a.call_id)) for a in ours]
    continuing = [row for row in rows if row["kind"] in TRAINED_KINDS and row["root_reason"] not in NEW]
    continued, kept = rerender(plain)
    forests = [grow(session) for session in calls.by_session(calls.read(run)).values()]
    return Comparison(
        len(continuing),
        sum(node.edge == "exact" for forest in forests for node in forest.nodes if node.call.kind in TRAINED_KINDS),
        judge(ours, [Row(t.input_ids, t.loss_mask, t.logprobs) for f in forests for t in trajectories.build(f)]),
        continued,
        kept,
        judge(plain, prefix_merging(plain)),
        len(rows),
        sum(_says_the_same(rows, row["call_id"], prompts[row["call_id"], row["choice"]]) for row in rows),
    )


def total(comparisons: Iterable[Comparison]) -> Comparison:
    """The sum over runs."""
    return reduce(add, comparisons, Comparison())


def _answer(row: Json, prompt: Int32s) -> Answer:
    return Answer(
        row["call_id"],
        row["session_id"],
        prompt,
        np.array(row["output_ids"], np.int32),
        np.array(row["logprobs"], np.float32),
        json.loads(row["engine_finish"])["type"] == "stop",
        row["parent_call_id"],
    )


def plain_prompt(rows: Sequence[Json], call_id: str) -> Int32s:
    """What the model's own chat template makes of the messages that the harness sent: a plain proxy's prompt."""
    conversation = _conversation(rows, call_id)
    ids = _tokenizer().apply_chat_template(
        chat(conversation.messages), tools=specs(conversation.tools), add_generation_prompt=True, return_dict=False
    )
    return np.array(ids, np.int32)


def _says_the_same(rows: Sequence[Json], call_id: str, prompt: Int32s) -> bool:
    text = str(_tokenizer().decode(prompt.tolist(), skip_special_tokens=False))
    return read(text) == asked(_conversation(rows, call_id))


def _conversation(rows: Sequence[Json], call_id: str) -> Conversation:
    """What the harness asked, decoded from its own body."""
    row = next(row for row in rows if row["call_id"] == call_id)
    sent = {"method": "POST", "host": row["host"], "path": row["path"], "headers": {"user-agent": row["user_agent"]}}
    return decoded(sent | {"body": request_body(list(rows), call_id)})


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(qwen3_tokenizer()))


def rerender(plain: Sequence[Answer]) -> tuple[int, int]:
    """Sampled tokens of replies that were gone on from; and of these the ones that the next render repeats exactly."""
    children: dict[str, list[Answer]] = {}
    for answer in plain:
        if answer.parent is not None:
            children.setdefault(answer.parent, []).append(answer)
    went_on = [answer for answer in plain if answer.call_id in children]
    kept = [a for a in went_on if any(begins(child.prompt, _whole(a)) for child in children[a.call_id])]
    return sum(len(a.output) for a in went_on), sum(len(a.output) for a in kept)


def prefix_merging(recorded: Sequence[Answer]) -> list[Row]:
    """The merge of the Polar paper (arXiv 2605.24220): chains of growing prompts, joined at the ends of turns.

    `recorded` is in order of time. A call goes to the chain whose last prompt is its longest prefix. In a chain the
    sampled replies take the place of what the next prompt has of them, whether or not they are equal; from a prompt on
    where no end of turn follows, the rest of the chain is left out.
    """
    rows: list[Row] = []
    for session in dict.fromkeys(answer.session for answer in recorded):
        mine = [answer for answer in recorded if answer.session == session]
        end = next((int(answer.output[-1]) for answer in mine if answer.ended), None)
        rows += [_joined(chain, end) for chain in _chains(mine)]
    return rows


def _chains(recorded: Sequence[Answer]) -> list[list[Answer]]:
    chains: list[list[Answer]] = []
    for answer in recorded:
        fitting = [chain for chain in chains if begins(answer.prompt, chain[-1].prompt)]
        if fitting:
            max(fitting, key=lambda chain: len(chain[-1].prompt)).append(answer)
        else:
            chains.append([answer])
    return chains


def _joined(chain: Sequence[Answer], end: int | None) -> Row:
    pieces = [(chain[0].prompt, None), (chain[0].output, chain[0].logprobs)]
    for before, answer in pairwise(chain):
        new = answer.prompt[len(before.prompt) :]
        ends = np.flatnonzero(new == end)
        if not len(ends):
            break
        closed = bool(len(before.output)) and before.output[-1] == end
        pieces += [(new[int(ends[0]) + closed :], None), (answer.output, answer.logprobs)]
    return Row(
        np.concatenate([ids for ids, _ in pieces]),
        np.concatenate([np.full(len(ids), logprobs is not None, np.uint8) for ids, logprobs in pieces]),
        np.concatenate([np.zeros(len(ids), np.float32) if lp is None else lp for ids, lp in pieces]),
    )


def judge(answers: Sequence[Answer], rows: Sequence[Row]) -> Verdict:
    """What these rows train of these answers."""
    places = [float(logprob) for row in rows for logprob in row.logprobs[row.mask == 1]]
    known = {float(logprob) for answer in answers for logprob in answer.logprobs}
    return Verdict(
        sum(len(answer.output) for answer in answers),
        len(known.intersection(places)),
        sum(int((row.mask == 1).sum() - _in_context(row, answers)) for row in rows),
        len(places) - len(set(places)),
        len(rows),
        len({answer.session for answer in answers}),
    )


def _in_context(row: Row, answers: Sequence[Answer]) -> int:
    """Masked places at which the row up to there is some call's prompt and sampled tokens."""
    right = np.zeros(len(row.ids), bool)
    for answer in answers:
        start, whole = len(answer.prompt), _whole(answer)
        end = min(len(whole), len(row.ids))
        different = np.flatnonzero(whole[:end] != row.ids[:end])
        end = int(different[0]) if len(different) else end
        if end > start:
            right[start:end] |= row.logprobs[start:end] == answer.logprobs[: end - start]
    return int((right & (row.mask == 1)).sum())


def begins(ids: Int32s, prefix: Int32s) -> bool:
    """Whether `ids` begins with `prefix`."""
    return len(prefix) <= len(ids) and np.array_equal(ids[: len(prefix)], prefix)


def _whole(answer: Answer) -> Int32s:
    return np.concatenate([answer.prompt, answer.output])
