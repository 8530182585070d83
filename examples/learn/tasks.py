"""Small questions about files, made by a seed: each wants one shell command, and an answer that only a file knows."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

NAMES = ["notes", "log", "data", "items", "list", "names", "codes", "records", "table", "words", "stock", "plan"]
ENDINGS = ["txt", "csv", "log", "md", "dat"]
KEYS = ["port", "host", "color", "size", "owner", "city", "code", "level", "mode", "theme", "region", "price"]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, of which files, and what is right."""

    kind: str
    instruction: str
    files: dict[str, str]
    command: str
    """What a good model runs."""
    answer: str


def questions(seed: str) -> Iterator[Question]:
    """Kinds in turn, without end; equal for equal seeds."""
    dice = random.Random(seed)
    while True:
        for ask in KINDS:
            yield ask(dice)


def row(question: Question, task_id: str) -> dict[str, Any]:  # Any: JSON
    """The question as a row of `polar-toolkit rollout`."""
    written = [f"printf %s {shlex.quote(text)} > {name}" for name, text in question.files.items()]
    return {
        "id": task_id,
        "instruction": question.instruction,
        "prepare": written,
        "check": {"kind": "output", "regex": rf"(?<!\w){question.answer}\W*\Z"},
        "turns": 3,
        "run_s": 120,
        "metadata": {"kind": question.kind},
    }


def _code(dice: random.Random) -> str:
    return str(dice.randrange(10_000, 100_000))


def _file(dice: random.Random) -> str:
    return f"{dice.choice(NAMES)}{dice.randrange(1, 10)}.{dice.choice(ENDINGS)}"


def _lines(dice: random.Random, low: int, high: int) -> list[str]:
    return [_code(dice) for _ in range(dice.randrange(low, high))]


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def _nth(dice: random.Random) -> Question:
    name, lines = _file(dice), _lines(dice, 12, 30)
    n = dice.randrange(2, len(lines))
    return Question("nth", f"What is line {n} of {name}?", {name: _text(lines)}, f"sed -n {n}p {name}", lines[n - 1])


def _last(dice: random.Random) -> Question:
    name, lines = _file(dice), _lines(dice, 12, 30)
    return Question("last", f"What is the last line of {name}?", {name: _text(lines)}, f"tail -n 1 {name}", lines[-1])


def _count(dice: random.Random) -> Question:
    name, lines = _file(dice), _lines(dice, 100, 1000)
    return Question("count", f"How many lines has {name}?", {name: _text(lines)}, f"wc -l < {name}", str(len(lines)))


def _largest(dice: random.Random) -> Question:
    name, lines = _file(dice), _lines(dice, 12, 30)
    command = f"sort -n {name} | tail -n 1"
    return Question("largest", f"What is the largest number in {name}?", {name: _text(lines)}, command, max(lines))


def _smallest(dice: random.Random) -> Question:
    name, lines = _file(dice), _lines(dice, 12, 30)
    command = f"sort -n {name} | head -n 1"
    return Question("smallest", f"What is the smallest number in {name}?", {name: _text(lines)}, command, min(lines))


def _value(dice: random.Random) -> Question:
    name, keys = _file(dice), dice.sample(KEYS, 8)
    values = {key: _code(dice) for key in keys}
    key = dice.choice(keys)
    text = _text([f"{key}={value}" for key, value in values.items()])
    return Question("value", f"What is the {key} in {name}?", {name: text}, f"grep {key} {name}", values[key])


KINDS: tuple[Callable[[random.Random], Question], ...] = (_nth, _last, _count, _largest, _smallest, _value)
