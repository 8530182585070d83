"""What a gradient costs per request, packed and as a tree: CPU seconds, tokens and memory on recorded groups.

Two groups of sixteen sessions are recorded first: unmodified harnesses, one with a short prompt and one with a long
one, play planned turns against the scripted engine through the interceptor, and are merged and batched as for training.
Then the same sessions are trained in three layouts, each in a process of its own with one thread, on a random model of
SmolLM2-135M's shape with one of its thirty layers and a thirtieth of its vocabulary: the ratios are those of the whole.
Prints each figure with its limit. `--only WORD` takes the groups whose harness holds a word; `--quick` makes everything
tiny, where the limits mean nothing. Takes about eighteen minutes of one CPU, and two more to record.

Layouts that share nothing between sessions cost each session alike, so they are measured on a few and multiplied; that
this is right is measured too. Memory is measured apart from time, under a malloc that gives back at once what is freed
and is slower for it. The paper's 5.4 x is wall time of training with its rollouts, these are CPU seconds of the
gradient alone. All layouts have activations of 4,096 tokens at once, twice the trainer's default.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks.stage.figures import Figure, show
from benchmarks.stage.gradient import PASS_TOKENS, Cost, measured
from benchmarks.stage.processes import ROOT
from benchmarks.stage.recording import Plan, prompt_tokens, record
from polar_train.forest import Layout

CONSOLE = Console(width=None if sys.stdout.isatty() else 150)
PLAN = Plan(sampled=(100, 80, 120, 60, 90, 110, 70, 80), printed=(200, 150, 300, 100, 250, 180, 220))
MEMORY = 1.15
"""The most that a tree may take, of what packed takes."""


@dataclass(frozen=True, slots=True)
class Group:
    """What is recorded, and what it is to show."""

    harness: str
    way: str
    prompt: int
    """Tokens of the first prompt, by the pinned version of the harness."""
    packed: float
    """How many times faster than per request it has to be, at least."""
    tree: float
    plan: Plan = PLAN
    alone: int = 1
    """Sessions that per request is measured on, and twice as many for packed."""
    width: int = 576
    times: int = 2
    """Rounds through the layouts, of which each layout's least time counts: what else a machine does only adds."""


GROUPS = (
    Group("pi", "openai", prompt=1_395, packed=4, tree=6, alone=2),
    Group("claude-code", "anthropic", prompt=11_623, packed=5, tree=12),
)
QUICK = (replace(GROUPS[0], plan=replace(PLAN, samples=4), alone=1, width=192, times=1),)


def group(asked: Group) -> Iterator[Figure]:
    """Record a group and measure it in each layout."""
    with tempfile.TemporaryDirectory() as folder:
        batch = record(asked.harness, asked.way, asked.plan, Path(folder))
        yield from _recorded(asked, batch)
        yield from _compared(asked, batch)


def _recorded(asked: Group, batch: Path) -> Iterator[Figure]:
    plan, name = asked.plan, asked.harness
    beside = f"fixed beforehand: {asked.prompt}"
    yield Figure(f"{name}: P, the first prompt", prompt_tokens(batch), None, "tokens", beside)
    yield Figure(
        f"{name}: T, calls of a session", len(plan.sampled), None, "", f"sampled tokens {_listed(plan.sampled)}"
    )
    yield Figure(f"{name}: G, sessions", plan.samples, None, "", f"words printed by tools {_listed(plan.printed)}")


def _compared(asked: Group, batch: Path) -> Iterator[Figure]:
    name, sessions = asked.harness, asked.plan.samples
    cost = functools.partial(measured, batch, width=asked.width)
    ways = (Layout.PER_REQUEST, asked.alone), (Layout.PACKED, 2 * asked.alone), (Layout.TREE, sessions)
    rounds = [
        [cost(way, sessions=some) for way, some in (*ways, (Layout.PACKED, asked.alone))] for _ in range(asked.times)
    ]
    per_request, packed, tree, half = (min(same, key=lambda one: one.cpu_s) for same in zip(*rounds, strict=True))
    yield from _additive(name, packed, half)
    yield from _same_gradient(name, packed, cost(Layout.TREE, sessions=packed.sessions))
    whole = [_whole(one, sessions) for one in (per_request, packed, tree)]
    yield Figure(f"{name}: tokens, distinct", tree.tokens, None, "", _ratios([one.tokens for one in whole]))
    yield Figure(
        f"{name}: pairs of tokens, of the tree", tree.pairs / 1e6, None, "M", _ratios([w.pairs for w in whole])
    )
    seconds = [one.cpu_s for one in whole]
    beside = f"{_ratios(seconds)}; measured on {per_request.sessions}, {packed.sessions} and {sessions} sessions"
    yield Figure(f"{name}: CPU of the tree", tree.cpu_s, None, "s", beside)
    limit = f"the tokens alone would give {whole[0].tokens / whole[1].tokens:.1f}"
    yield Figure(f"{name}: packed, faster", seconds[0] / seconds[1], asked.packed, "x per request", limit, least=True)
    limit = f"the tokens alone would give {whole[0].tokens / whole[2].tokens:.1f}"
    yield Figure(f"{name}: tree, faster", seconds[0] / seconds[2], asked.tree, "x per request", limit, least=True)
    peaks = [cost(way, sessions=some, memory=True).peak_mb for way, some in ways]
    beside = f"{peaks[0]:.0f}, {peaks[1]:.0f} and {peaks[2]:.0f} MB above the model, {PASS_TOKENS} tokens at once"
    yield Figure(f"{name}: peak memory of the tree", peaks[2] / peaks[1], MEMORY, "x packed", beside)


def _additive(name: str, some: Cost, half: Cost) -> Iterator[Figure]:
    """Whether twice the sessions cost twice as much, where nothing is shared between them."""
    beside = f"{some.sessions} sessions {some.cpu_s:.1f} s, {half.sessions} {half.cpu_s:.1f} s"
    yield Figure(f"{name}: packed, twice the sessions", some.cpu_s / half.cpu_s / 2, None, "x twice the time", beside)


def _same_gradient(name: str, packed: Cost, tree: Cost) -> Iterator[Figure]:
    off = abs(packed.norm / tree.norm - 1) * 1e6
    yield Figure(f"{name}: norm of the gradient, tree to packed", off, 10, "millionths", f"{tree.sessions} sessions")


def _whole(cost: Cost, sessions: int) -> Cost:
    """Of all sessions, from that of some; see the module."""
    times = sessions / cost.sessions
    return replace(
        cost, tokens=round(cost.tokens * times), pairs=round(cost.pairs * times), cpu_s=cost.cpu_s * times
    )  # fmt: skip


def _ratios(three: list[int] | list[float]) -> str:
    return f"per request : packed : tree {' : '.join(f'{one / three[2]:.1f}' for one in three)}"


def _listed(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def main() -> None:
    """Record, measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="take the groups whose harness holds this word")
    parser.add_argument("--quick", action="store_true", help="everything tiny; the limits are those of the full run")
    given = parser.parse_args()
    os.environ["PATH"] = os.pathsep.join([str(ROOT / ".harness" / "node_modules" / ".bin"), os.environ["PATH"]])
    CONSOLE.print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    chosen = [one for one in (QUICK if given.quick else GROUPS) if given.only in one.harness]
    measures = [(f"{one.harness}: {group.__doc__}", functools.partial(group, one)) for one in chosen]
    show("What a gradient costs in three layouts", measures, CONSOLE)


if __name__ == "__main__":
    main()
