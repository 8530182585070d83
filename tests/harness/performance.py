"""A real harness performs a scripted task: shell calls that write a greeting, then a closing word.

Invariant: the script is the same for every harness but for the name of its shell tool; text and JSON are spelled oddly,
so that a harness or a stage that spells them anew shows. This module judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_mitm.journal import grow, read_calls

PERFORMERS = [
    ("codex", "openai"), ("claude-code", "anthropic"), ("pi", "openai"), ("pi", "anthropic"), ("pi", "openrouter"),
]  # fmt: skip
"""Harness and provider, as in harness_images."""
TASK = "Write a greeting into the file hello.txt."
GREETING = "bonjour, café"
CLOSING = "the greeting is in hello.txt."
SESSION = "s1"
_SHELL = {"codex": ("exec_command", "cmd"), "claude-code": ("Bash", "command"), "pi": ("bash", "command")}
Json = dict[str, Any]  # Any: request bodies and rows


def script(harness: str, *, shell_calls: int = 1) -> list[str]:
    """A reply for each shell call, with reasoning, odd white space and oddly spelled arguments; then the end."""
    tool, parameter = _SHELL[harness]
    said = "<think>\nThe file has to hold a greeting.\n</think>\n\n  I will write it. \n\n<tool_call>\n"
    calls = [f'{{"name": "{tool}",  "arguments": {{"{parameter}":   "{_command(n)}" }}}}' for n in range(shell_calls)]
    return [*[f"{said}{call}\n</tool_call>" for call in calls], f"<think>\nIt is there.\n</think>\n\nDone:  {CLOSING}"]


def output(n: int) -> str:
    """What the n-th shell call prints; its text stands nowhere else."""
    return f"wrote {n}: {GREETING}"


def completed(run: Path) -> list[Json]:
    """The rows of the completed calls of a run, in order."""
    return [row for row in read_calls(run).to_pylist() if row["status"] == "completed"]


def request_body(rows: list[Json], call_id: str) -> Json:
    """The body that the harness sent, put together from what its row and its ancestors' rows hold."""
    row = next(row for row in rows if row["call_id"] == call_id)
    parent = request_body(rows, row["parent_call_id"]) if row["parent_call_id"] else None
    return grow(json.loads(row["request"]), parent)


def with_edited_output(body: Json, n: int, text: str) -> Json:
    """The same request, but the n-th shell call printed something else."""
    return json.loads(json.dumps(body, ensure_ascii=False).replace(output(n), text))


def without_turn(body: Json, n: int) -> Json:
    """The same request without the n-th reply and its tool result."""
    name = "input" if "input" in body else "messages"
    items: list[Json] = body[name]
    end = next(i for i, item in enumerate(items) if output(n) in json.dumps(item, ensure_ascii=False))
    start = end
    while _is_reply(items[start - 1]):
        start -= 1
    return body | {name: items[:start] + items[end + 1 :]}


def _command(n: int) -> str:
    return rf"printf 'bonjour, caf\u00e9' > hello.txt; echo wrote {n}: $(cat hello.txt)"


def _is_reply(item: Mapping[str, Any]) -> bool:
    return item.get("role") == "assistant" or item.get("type") in ("reasoning", "function_call")
