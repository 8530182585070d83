"""What `harness check` has to say of a run, line for line: what was seen, whether it is good, and what to look at.

Invariant: a line is marked `missing` only where the harness cannot be used like this; the exit status never decides.
Pure: it reads what check.py saw, and nothing else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from polar_toolkit.rollout.harnesses.check import CLOSING, GREETING, Asked, Json, Seen
from polar_toolkit.rollout.recipe import Recipe, Way
from polar_toolkit.tree import TRAINED_KINDS

Mark = Literal["good", "note", "missing"]
_STYLES: Mapping[Mark, str] = {"good": "", "note": "yellow", "missing": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    what: str
    seen: str
    mark: Mark
    hint: str = ""
    """What to look at, where it is not good."""


def findings(asked: Asked, seen: Seen) -> list[Finding]:
    """All lines, in the order of the table."""
    agents = [row for row in seen.completed() if row["kind"] in TRAINED_KINDS]
    found = [
        _version_line(asked.recipe, seen),
        _calls_line(seen),
        _dialect_line(asked.way, seen),
        _tool_line(asked.recipe, seen),
        _closing_line(seen),
        _parents_line(asked.recipe, agents),
        Finding("edges", _counted(seen.edges), "good"),
        _trained_line(agents, seen),
        _refused_line(seen),
    ]
    by = "" if seen.ended.by == "itself" else f", ended by its {seen.ended.by}"
    odd = "see logs/harness.err; the status of a harness decides nothing"
    status = seen.ended.status
    found.append(
        Finding("exit status", f"{status}{by}", "note" if status or by else "good", odd if status or by else "")
    )
    found.append(Finding("seconds", f"{seen.ended.seconds:.1f}", "good"))
    return found


def table(title: str, lines: Sequence[Finding]) -> Table:
    """The lines for people."""
    shown = Table("", "seen", "what to look at", title=title)
    for line in lines:
        shown.add_row(line.what, Text(line.seen, style=_STYLES[line.mark]), Text(line.hint))
    return shown


def _version_line(recipe: Recipe, seen: Seen) -> Finding:
    if not recipe.version_command:
        return Finding("version", "it has none", "good")
    if not seen.version:
        line = " ".join(recipe.version_command)
        return Finding(
            "version", "none printed", "note", f"`{line}` printed none: set version_command; see logs/version.*"
        )
    same = seen.version == recipe.version
    hint = "" if same else f"{recipe.version} is pinned: install it, or pin this one when you have looked at it"
    return Finding("version", seen.version, "good" if same else "note", hint)


def _calls_line(seen: Seen) -> Finding:
    kinds = Counter(str(row["kind"]) for row in seen.completed())
    others = Counter(str(row["status"]) for row in seen.rows if row["status"] != "completed")
    if not kinds:
        hint = (
            "no call was answered: does it trust the certificate, does it ask for other names than `host` and `names`, "
            "is it told to use another address? see logs/harness.err and mitmdump's log"
        )
        return Finding("calls", _counted(others), "missing", hint)
    errors = {f"{row['error_kind']}: {row['error']}" for row in seen.rows if row["error"]}
    hint = "; ".join(sorted(errors))
    return Finding("calls", _counted(kinds + others), "note" if others else "good", hint)


def _dialect_line(way: Way, seen: Seen) -> Finding:
    dialects = Counter(str(row["dialect"]) for row in seen.completed())
    same = set(dialects) == {way.dialect}
    hint = "" if same else f"harness.toml says {way.dialect!r}: put right what is wrong, the recipe or its command"
    return Finding("dialect", _counted(dialects), "good" if same else "note", hint)


def _tool_line(recipe: Recipe, seen: Seen) -> Finding:
    if not recipe.shell_tool[0]:
        return Finding("tool call", "not asked for: harness.toml names no shell_tool", "note")
    if seen.written == GREETING:
        return Finding("tool call", "executed", "good")
    offered = _offered(seen)
    hint = f"shell_tool is {list(recipe.shell_tool)}, and these tools are offered: {', '.join(offered) or 'none'}"
    if recipe.shell_tool[0] in offered:
        hint = (
            "the tool is offered; look at what it printed: logs/harness.*, and `polar-toolkit inspect` on the last call"
        )
    wrote = "hello.txt was not written" if seen.written is None else f"hello.txt holds {seen.written!r}"
    return Finding("tool call", wrote, "missing", hint)


def _offered(seen: Seen) -> list[str]:
    """The names of all tools that were offered in a call."""
    tools = [tool for row in seen.rows if row["tools"] for tool in json.loads(row["tools"])]
    return sorted({str(tool["name"]) for tool in tools})


def _closing_line(seen: Seen) -> Finding:
    if CLOSING in seen.output:
        return Finding("final text", "printed", "good")
    said = seen.output.strip().splitlines()
    hint = (
        f"the last line of its output is {said[-1]!r}"
        if said
        else "it printed nothing: does its command print replies?"
    )
    return Finding("final text", "not printed", "missing", hint)


def _parents_line(recipe: Recipe, agents: list[Json]) -> Finding:
    evidence = Counter(str(row["parent_evidence"]) for row in agents if row["parent_call_id"])
    roots = Counter(str(row["root_reason"]) for row in agents if not row["parent_call_id"])
    said = ", ".join(filter(None, (_counted(evidence), *(f"root ({why}) {count}" for why, count in roots.items()))))
    if recipe.shell_tool[0] and agents and not evidence:
        hint = (
            "no call goes on from an earlier one: it edits its history; `polar-toolkit inspect` says where it departs"
        )
        return Finding("parents", said, "missing", hint)
    return Finding("parents", said or "none", "good")


def _trained_line(agents: Sequence[Json], seen: Seen) -> Finding:
    sampled = sum(len(row["output_ids"]) for row in agents)
    if not sampled:
        return Finding("trained", "nothing was sampled for an agent", "missing", "see `calls`")
    said = f"{seen.trained / sampled:.1%} of the agent's sampled tokens"
    mark: Mark = "missing" if not seen.trained else "good" if seen.trained == sampled else "note"
    return Finding("trained", said, mark, "" if mark == "good" else "`polar-toolkit stats` says why the others are not")


def _refused_line(seen: Seen) -> Finding:
    if seen.refused is None:
        return Finding("refused names", "not known in this kind of sandbox", "good")
    hint = "add to `names` those that it waits for; the others cost nothing" if seen.refused else ""
    return Finding("refused names", _counted(seen.refused), "note" if seen.refused else "good", hint)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"
