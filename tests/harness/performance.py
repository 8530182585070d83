"""A real harness performs a scripted task: shell calls that write a greeting, then a closing word.

Invariant: the script is the same for every harness but for what its shell tool is called; text and JSON are spelled
oddly, so that a harness or a stage that spells them anew shows. This module judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polar_mitm.journal import grow, read_calls
from polar_toolkit.rollout import recipe

PERFORMERS = [
    ("codex", "openai"), ("claude-code", "anthropic"), ("pi", "openai"), ("pi", "anthropic"), ("pi", "openrouter"),
]  # fmt: skip
"""Harness and provider, as in harness_images."""
TASK = "Write a greeting into the file hello.txt."
GREETING = "bonjour, café"
CLOSING = "the greeting is in hello.txt."
SESSION = "s1"
_CLIENTS_SHELL = ("run", "command")
"""What the clients that are written for the tests call theirs."""
_ASSISTANT = "<|im_start|>assistant"
_TOOLS = "# Tools\n\nYou may call one or more functions"
_SUMMARY = "The greeting was written; nothing is left to do but to say so."
Json = dict[str, Any]  # Any: request bodies and rows
Actor = Callable[[str], str]
"""A script as a function of the prompt's text."""


def script(harness: str, *, shell_calls: int = 1) -> list[str]:
    """A reply for each shell call, with reasoning, odd white space and oddly spelled arguments; then the end."""
    tool, parameter = recipe.find(harness).shell_tool if harness in recipe.names() else _CLIENTS_SHELL
    said = "<think>\nThe file has to hold a greeting.\n</think>\n\n  I will write it. \n\n<tool_call>\n"
    calls = [f'{{"name": "{tool}",  "arguments": {{"{parameter}":   "{_command(n)}" }}}}' for n in range(shell_calls)]
    return [*[f"{said}{call}\n</tool_call>" for call in calls], f"<think>\nIt is there.\n</think>\n\nDone:  {CLOSING}"]


def actor(harness: str) -> Actor:
    """Plays `script`, and answers the small calls that some harnesses make beside it: titles and routes."""
    replies = script(harness)

    def act(prompt: str) -> str:
        if "complexity_score" in prompt and _TOOLS not in prompt:  # Gemini CLI 0.61.0 asks which model to take
            return '{"complexity_reasoning": "one file", "complexity_score": 5}'
        return replies[min(turn(prompt), 1)] if _TOOLS in prompt else "A greeting"

    return act


def tidy_actor(prompt: str) -> str:
    """For Pi: the same task, spelled as Qwen3's chat template spells it, so that a plain re-render repeats it."""
    call = json.dumps({"name": "bash", "arguments": {"command": _plain_command(0)}}, ensure_ascii=False)
    said = "<think>\nThe file has to hold a greeting.\n</think>\n\nI will write it.\n<tool_call>\n"
    return [f"{said}{call}\n</tool_call>", f"<think>\nIt is there.\n</think>\n\nDone: {CLOSING}"][min(turn(prompt), 1)]


def compacting_actor(prompt: str) -> str:
    """For Codex when it compacts: the history goes, its summary stays, and the work goes on from there."""
    call, closing = script("codex")
    if _SUMMARY in prompt:
        return closing
    return _SUMMARY if "summar" in prompt[prompt.rindex("<|im_start|>user") :].lower() else call


def code_actor(prompt: str) -> str:
    """For Codex's own default model: its one tool, `exec`, takes JavaScript."""
    code = f"text((await tools.exec_command({{cmd: {json.dumps(_plain_command(0))}}})).output)"
    call = json.dumps({"name": "exec", "arguments": {"input": code}}, ensure_ascii=False)
    first = f"<think>\nA greeting.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
    return [first, script("codex")[-1]][min(turn(prompt), 1)]


def submitting_actor(prompt: str) -> str:
    """For mini-swe-agent, whose run ends with a command and not with a reply."""
    words = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {CLOSING}"
    call = json.dumps({"name": "bash", "arguments": {"command": words}})
    return [script("mini-swe-agent")[0], f"It is there.\n\n<tool_call>\n{call}\n</tool_call>"][min(turn(prompt), 1)]


def delegating_actor(prompt: str) -> str:
    """For Claude Code: two sub-agents in parallel, one of which writes the file."""
    if TASK in prompt:
        launch = [
            json.dumps({"name": "Agent", "arguments": {"description": name, "prompt": f"SUBTASK {name}"}})
            for name in ("one", "two")
        ]
        calls = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in launch)
        return [f"Two will do it.\n\n{calls}", script("claude-code")[-1]][min(turn(prompt), 1)]
    shell = script("claude-code")[0]
    return [shell if "SUBTASK one" in prompt else shell.replace("hello.txt", "other.txt"), "Done."][
        min(turn(prompt), 1)
    ]


def turn(prompt: str) -> int:
    """The number of assistant turns in a prompt before the one that it asks for."""
    return prompt.count(_ASSISTANT) - 1


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


def _plain_command(n: int) -> str:
    return _command(n).replace(r"\u00e9", "é")


def _command(n: int) -> str:
    """Without command substitution, which Gemini CLI 0.61.0 refuses to run."""
    return rf"printf 'bonjour, caf\u00e9' > hello.txt; printf 'wrote {n}: '; cat hello.txt"


def _is_reply(item: Mapping[str, Any]) -> bool:
    return item.get("role") == "assistant" or item.get("type") in ("reasoning", "function_call")
