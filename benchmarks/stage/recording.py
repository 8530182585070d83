"""Real harnesses, recorded for a benchmark: a group of sessions of one task, merged and batched as for training.

Invariant: every session takes the turns of the `Plan` with replies of exactly the planned lengths and words of its own,
and every second one earns a reward, so that the group has something to learn. What the harness adds is its own:
prompts and tool results are as it writes them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.stage.engine import words
from polar_toolkit import batches, merge
from polar_toolkit.rollout.board import Board
from polar_toolkit.rollout.harnesses.scripted_engine import ScriptedEngine
from polar_toolkit.rollout.interceptor import Interceptor
from polar_toolkit.rollout.options import Options, Pools, attempts
from polar_toolkit.rollout.outcome import Status
from polar_toolkit.rollout.recipe import find
from polar_toolkit.rollout.runner import Runner
from polar_toolkit.rollout.sandbox import sandboxes
from polar_toolkit.rollout.task import Check, Task
from polar_train.data import read_batches
from polar_train.forest import trajectories
from polar_train.small_models import fetch

_ASSISTANT = "<|im_start|>assistant"
_TOOLS = "# Tools\n\nYou may call one or more functions"
_LONGEST = 100_000
"""Tokens of a trajectory: none is cut."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What each session of a group does."""

    sampled: tuple[int, ...]
    """Tokens of the reply to each call, the stop token with them; the last one calls no tool."""
    printed: tuple[int, ...]
    """Words that the tool of each call but the last prints, about as many tokens."""
    samples: int = 16
    """Sessions of the group."""


def record(harness: str, way: str, plan: Plan, folder: Path) -> Path:
    """Roll a group out, merge it, and give the batch file."""
    tokenizer = fetch("qwen3-tokenizer")
    speaker = _Speaker(Tokenizer.from_file(str(tokenizer / "tokenizer.json")), find(harness).shell_tool, plan)
    engine = ScriptedEngine(tokenizer, speaker.reply)
    run = folder / "run"
    with engine.serving():
        asyncio.run(_rolled(Options(run, harness, engine.url, way, tokenizer=str(tokenizer), samples=plan.samples,
                                    pools=Pools(init=2, ready=4, run=4, post=2))))  # fmt: skip
    out = folder / "merged"
    merge.merge(run, out, merge.Options(batch=batches.Options(max_tokens=_LONGEST), workers=1), lambda *_: None)
    (batch,) = (out / "batches").glob("*.parquet")
    _check(batch, plan)
    return batch


def prompt_tokens(batch: Path) -> int:
    """Tokens before the first sampled one, of the batch's first session."""
    first = next(trajectories(read_batches(batch)[0]))
    return int(first.loss_mask_T.argmax())


def _check(batch: Path, plan: Plan) -> None:
    """Each session is one trajectory with the planned replies on its mask."""
    chains = [chain for row in read_batches(batch) for chain in trajectories(row)]
    assert len(chains) == plan.samples, f"{len(chains)} trajectories of {plan.samples} sessions"
    for chain in chains:
        edges = np.flatnonzero(np.diff(chain.loss_mask_T.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        sampled = tuple((edges[:, 1] - edges[:, 0]).tolist())
        assert sampled == plan.sampled, f"sampled {sampled}, planned {plan.sampled}"


async def _rolled(asked: Options) -> None:
    task = Task(
        "words", "Print some words, then say that you are done.", Check("command", {"command": "test -e right"})
    )
    runner = Runner(
        asked, [task], recipe=find(asked.harness), sandboxes=sandboxes("local", asked.run, "benchmark"),
        interceptor=Interceptor(asked.run, asked.settings()), board=Board(attempts(asked, [task])),
    )  # fmt: skip
    rows = await runner.run()
    assert {row.status for row in rows} == {Status.COMPLETED}, [row.note for row in rows]


class _Speaker:
    """The replies of a group: words that are drawn anew for each call, in as many tokens as planned."""

    def __init__(self, tokenizer: Tokenizer, shell_tool: tuple[str, str], plan: Plan) -> None:
        self._tokenizer, self._plan = tokenizer, plan
        self._tool, self._parameter = shell_tool
        self._words = [word for word, _ in words(tokenizer)]
        self._calls = itertools.count()
        self._outcomes = itertools.cycle(("right", "wrong"))

    def reply(self, prompt: str) -> str:
        """What is said next. A prompt without tools is a small call that some harnesses make beside their agent's."""
        if _TOOLS not in prompt:
            return "Some words"
        rng, turn = random.Random(next(self._calls)), prompt.count(_ASSISTANT) - 1
        said = self._action(rng, turn) if turn < len(self._plan.printed) else "Done."
        fixed = len(self._tokenizer.encode(_thought(["so"]) + said, add_special_tokens=False).ids)
        return _thought(["so", *rng.choices(self._words, k=self._plan.sampled[turn] - fixed - 1)]) + said

    def _action(self, rng: random.Random, turn: int) -> str:
        """A shell call; the first one of a session leaves what its reward depends on."""
        leave = "" if turn else f"touch {next(self._outcomes)}; "
        phrase, count = " ".join(rng.choices(self._words, k=10)), self._plan.printed[turn] // 10
        line = f"{leave}printf ' {phrase}%.0s' $(seq {count})"
        return f'<tool_call>\n{{"name": "{self._tool}", "arguments": {{"{self._parameter}": "{line}"}}}}\n</tool_call>'


def _thought(said: list[str]) -> str:
    return f"<think>\n{' '.join(said)}\n</think>\n\n"
