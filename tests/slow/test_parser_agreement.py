"""Our reading of a Qwen3 sample agrees with SGLang's own parsers, or the difference is one that is listed here.

The judge is the real SGLang's `/separate_reasoning` (qwen3) and `/parse_function_call` (qwen) over generated outputs:
thinking or none, text, calls in every JSON spelling, several calls, and the ways in which models spoil them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from polar_mitm.conversation import Reasoning, Text, Tool, ToolCall
from polar_mitm.tokens import Template

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OUTPUTS = 1_250
_SCHEMA = '{"type":"object","properties":{"command":{"type":"string"}}}'
TOOLS = (Tool("run", "runs", _SCHEMA), Tool("edit_file", "edits", _SCHEMA))
SPECS = [{"type": "function", "function": {"name": t.name, "parameters": json.loads(t.parameters)}} for t in TOOLS]
JUSTIFIED = {
    "spoilt call": "SGLang drops what is no JSON between the tags without a word; we give it back as text, trainable",
    "unknown tool": "SGLang drops the call of a tool that was not offered; we give it back as text",
    "cut call": "SGLang drops a call without its closing tag; we give it back as text, and the finish is length",
    "call on one line": "SGLang wants a line break after <tool_call>; the tag is a token of its own, so we do not",
    "no arguments": "SGLang calls with {} where the model gave null; so do we only where the key is missing",
}
"""Why we differ, by the way in which the output was made."""
_AFTER = "text after a call"  # dropped by both
_WORDS = (
    "alpha",
    "naïve",
    "北京",
    "🧭",
    "x < y",
    '"quoted"',
    "line\nbreak",
    "tab\there",
    "<b>bold</b>",
    "{braces}",
    "\\n",
)


@dataclass(frozen=True, slots=True)
class Output:
    """A generated output, and how it was made."""

    text: str
    made: str


@dataclass(frozen=True, slots=True)
class Read:
    """What a parser finds in it; white space at the ends does not count."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]


def generated(number: int) -> Output:
    """The output of this number."""
    random_ = random.Random(number)
    thinking = f"<think>\n{_prose(random_)}\n</think>\n\n" if random_.random() < 0.5 else ""
    text = _prose(random_) if random_.random() < 0.7 else ""
    calls = [_call(random_) for _ in range(random_.choice([0, 1, 1, 2, 3]))]
    body = "\n".join([*([text] if text else []), *calls])
    if random_.random() < 0.75 or not calls:
        return Output(thinking + body, "as the template says")
    made = random_.choice([*JUSTIFIED, _AFTER])
    return Output(thinking + _spoilt(made, text, calls, random_), made)


def _prose(random_: random.Random) -> str:
    return " ".join(random_.choice(_WORDS) for _ in range(random_.randrange(1, 12)))


def _call(random_: random.Random, name: str = "") -> str:
    value = {"command": _prose(random_)} | ({"more": [1, None, {"a": 2.5}]} if random_.random() < 0.3 else {})
    separators = random_.choice([(", ", ": "), (",", ":"), (" , ", " : ")])
    name = name or random_.choice(TOOLS).name
    called = {"name": name, "arguments": value}
    written = json.dumps(called, separators=separators, ensure_ascii=random_.random() < 0.5)
    return f"<tool_call>\n{written}\n</tool_call>"


def _spoilt(made: str, text: str, calls: list[str], random_: random.Random) -> str:
    first = {
        "spoilt call": "<tool_call>\n" + random_.choice(['{"name": "run", "arguments": {', "run ls", "{'name': 'run'}"])
        + "\n</tool_call>",
        "unknown tool": _call(random_, "fly"),
        "call on one line": _call(random_).replace("<tool_call>\n", "<tool_call>"),
        "no arguments": '<tool_call>\n{"name": "run"' + random_.choice(["", ', "arguments": null']) + "}\n</tool_call>",
        _AFTER: calls[0] + "\n" + _prose(random_),
        "cut call": "",
    }[made]  # fmt: skip
    parts = [text, first, *calls[1:]] if made != "cut call" else [text, *calls[1:], calls[0][: len(calls[0]) // 2]]
    return "\n".join(part for part in parts if part)


def ours(template: Template, output: Output) -> Read:
    """What the proxy would tell the harness."""
    prompt = np.array(template.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), np.int32)
    ids = np.array(template.encode(output.text), np.int32)
    parts = template.parse(ids, prompt, TOOLS).parts
    return Read(
        "".join(p.text for p in parts if isinstance(p, Reasoning)).strip(),
        "".join(p.text for p in parts if isinstance(p, Text)).strip(),
        tuple((p.name, _sorted(p.arguments)) for p in parts if isinstance(p, ToolCall)),
    )


def sglangs(client: httpx.Client, output: Output) -> Read:
    """What SGLang itself would tell."""
    apart = _post(client, "/separate_reasoning", {"text": output.text, "reasoning_parser": "qwen3"})
    asked = {"text": apart["text"], "tools": SPECS, "tool_call_parser": "qwen"}
    parsed = _post(client, "/parse_function_call", asked)
    calls = tuple((call["name"], _sorted(call["parameters"])) for call in parsed["calls"])
    return Read(apart["reasoning_text"].strip(), parsed["normal_text"].strip(), calls)


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _sorted(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True)


def test_our_reading_agrees_with_sglangs(qwen3: Template, sglang_url: str) -> None:
    """Over 1,200 outputs: the same reasoning, text and calls wherever no listed difference applies."""
    differences = Counter[str]()
    surprises: list[str] = []
    made = Counter[str]()
    with httpx.Client(base_url=sglang_url, trust_env=False, timeout=60) as client:
        for number in range(OUTPUTS):
            output = generated(number)
            made[output.made] += 1
            a, b = ours(qwen3, output), sglangs(client, output)
            if a != b:
                differences[output.made] += 1
                if output.made not in JUSTIFIED:
                    surprises.append(f"{number}: {output.text!r}\n  ours    {a}\n  SGLang's {b}")
    agreed = OUTPUTS - sum(differences.values())
    print(f"{OUTPUTS} outputs, {agreed} read alike; different: {dict(differences)} of {dict(made)}")
    assert not surprises, "\n".join(surprises[:5])
    assert differences.keys() == JUSTIFIED.keys()
    assert agreed >= 1_000
