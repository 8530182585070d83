"""Merged trajectories against plain forwards: recorded through the gateway, sampled turn by turn, computed in one row.

The model is a small one that was taught to call a tool and then to answer, so that the sessions are those of an agent:
tool turns, text turns, a fork, and an update of the weights between two turns.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polar_mitm.conversation import Message, Text, Tool, ToolCall, ToolResult
from polar_mitm.journal import read_calls
from polar_mitm.tokens import Template, load
from polar_toolkit import merge
from polar_train.small_models import fetch
from tests.mitm.house import House, open_house
from tests.train.test_serve import changed_copy, serving

TEMPERATURE = 0.8
TOLERANCE = 1e-4
PARAMETERS = '{"type": "object", "properties": {"path": {"type": "string"}}}'
ASKED = "What is in a?"
CALLED = '<think>\n\n</think>\n\n<tool_call>\n{"name": "look",  "arguments": {"path":  "a"}}\n</tool_call>'
SEEN = "one file"
SAID = "<think>\n\n</think>\n\n  One file is in it."
Json = dict[str, Any]  # Any: bodies
Floats = np.ndarray[Any, np.dtype[np.float32]]  # Any: shape [T]


@dataclass(frozen=True)
class Recorded:
    """A merged run and the weights that sampled it."""

    rows: list[Json]
    """Its trajectories."""
    calls: list[Json]
    weights: dict[str, Any]
    """By version: a transformers model."""


@pytest.fixture(scope="module")
def acting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of tiny-qwen3 after it learned one conversation by heart: a call of `look`, and an answer."""
    base, folder = fetch("tiny-qwen3"), tmp_path_factory.mktemp("acting") / "model"
    template = load(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids, targets = _lesson(template)
    embeddings = model.model.embed_tokens.weight.requires_grad_(
        False
    )  # nearly all of it; the layers learn faster alone
    spoken, generator = ids[targets].unique(), torch.Generator().manual_seed(0)
    # Among 151,669 random directions of 64 dimensions many can never win, and the end of a turn, as padding, is zero.
    embeddings[spoken] = torch.randn(len(spoken), embeddings.shape[1], generator=generator)
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=3e-2)
    for _ in range(30):
        hidden = model.model(ids[None]).last_hidden_state[0, targets - 1]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[targets])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def _lesson(template: Template) -> tuple[torch.Tensor, torch.Tensor]:
    """The conversation's ids [T], and the places of the two replies in it."""
    tools = (Tool("look", "", PARAMETERS),)
    asked = Message("user", (Text(ASKED),))
    call = Message("assistant", (ToolCall("c1", "look", '{"path": "a"}'),))
    seen = Message("tool", (ToolResult("c1", SEEN),))
    replies = [[*template.encode(text), template.stop_ids[-1]] for text in (CALLED, SAID)]
    first = template.render((asked,), tools)
    second = template.bridge(first, np.array(replies[0], np.int32), (asked, call, seen), 2, tools)
    assert second is not None
    places = [*range(len(first), len(first) + len(replies[0])), *range(len(second), len(second) + len(replies[1]))]
    return torch.tensor([*second.tolist(), *replies[1]]), torch.tensor(places)


class Talk:
    """A harness of one session: it runs every call that it is given and goes on until the model only speaks."""

    def __init__(self, house: House, session: str, history: list[Json] | None = None, *, tools: bool = True) -> None:
        self.messages = list(history or [])
        self._house, self._session = house, session
        look = {"type": "function", "function": {"name": "look", "parameters": json.loads(PARAMETERS)}}
        self._offer: Json = {"tools": [look]} if tools else {}

    def say(self, text: str) -> None:
        """A user message, and all the turns that it takes."""
        self.messages.append({"role": "user", "content": text})
        for _ in range(3):  # a model that calls for ever is stopped
            body = {"model": "any", "messages": self.messages, **self._offer}
            answer = self._house.post("/v1/chat/completions", body, authorization=f"Bearer {self._session}:x")
            assert answer.status_code == 200, answer.text
            reply = answer.json()["choices"][0]["message"]
            self.messages.append(reply)
            calls = reply.get("tool_calls") or []
            self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": SEEN} for call in calls]
            if not calls:
                return


@pytest.fixture(scope="module")
def recorded(acting: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Four sessions, merged; in the last one the weights change between two turns."""
    folder = tmp_path_factory.mktemp("recorded")
    run, other = folder / "run", changed_copy(acting, folder / "other")
    sampling = json.dumps({"temperature": TEMPERATURE, "max_new_tokens": 40, "seed": 3})
    with serving(acting) as engine, open_house(run, engine.url, load(acting), sampling=sampling) as house:
        house.client.timeout = httpx.Timeout(120)
        tools = Talk(house, "tools")
        tools.say(ASKED)
        tools.say("And now?")
        fork = Talk(house, "fork")
        fork.say(ASKED)
        again = Talk(house, "fork", fork.messages)
        fork.say("And now?")
        again.say("Something else?")
        text = Talk(house, "text", tools=False)
        for words in ("Hello.", "Go on.", "And on."):
            text.say(words)
        updated = Talk(house, "update")
        updated.say(ASKED)
        update = {"model_path": str(other), "weight_version": "other"}
        assert engine.post("/update_weights_from_disk", update).json()["success"]
        updated.say("And now?")
    merge.merge(run, folder / "merged", merge.Options(), lambda *_: None)
    weights = {
        version: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for version, path in (("default", acting), ("other", other))
    }
    return Recorded(pq.read_table(folder / "merged" / "trajectories").to_pylist(), read_calls(run).to_pylist(), weights)


def differences(recorded: Recorded, *, swapped: bool = False) -> dict[str, Floats]:
    """By weight version: |recorded logprob - one float32 forward of the whole trajectory| of each trained token.

    `swapped`: against the forward of the other version's weights.
    """
    found: dict[str, list[Floats]] = {version: [] for version in recorded.weights}
    others = dict(zip(recorded.weights, reversed(recorded.weights), strict=True))
    for row in recorded.rows:
        versions = np.array(row["versions"])[1:]
        logprobs = np.array(row["logprobs"], np.float32)[1:]
        for version in set(versions) - {""}:
            given = forward(recorded.weights[others[version] if swapped else version], row["input_ids"])
            found[version].append(np.abs(given - logprobs)[versions == version])
    return {version: np.concatenate(parts) for version, parts in found.items()}


def forward(model: Any, input_ids: list[int]) -> Floats:
    """Logprobs [T-1] of all ids but the first."""
    with torch.inference_mode():
        logits = model(torch.tensor([input_ids])).logits[0, :-1] / TEMPERATURE
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(input_ids[1:])[:, None])[:, 0].numpy()


def test_the_sessions_are_those_of_an_agent(recorded: Recorded):
    """What the other tests speak of was recorded: tool turns, text turns, a fork, and both versions in one row."""
    finishes = Counter(call["finish"] for call in recorded.calls)
    assert finishes["tool_calls"] >= 3
    children = Counter(call["parent_call_id"] for call in recorded.calls if call["parent_call_id"])
    assert max(children.values()) == 2
    assert [call["root_reason"] for call in recorded.calls if call["root_reason"]] == ["first"] * 4
    assert any({"default", "other"} <= set(row["versions"]) for row in recorded.rows)
    assert Counter(row["session_id"] for row in recorded.rows) == {"tools": 1, "fork": 2, "text": 1, "update": 1}


def test_every_trained_token_has_the_logprob_of_its_whole_trajectory(recorded: Recorded):
    """|difference| <= 1e-4 on all sampled tokens, over every turn, on both sides of the fork and of the update."""
    found = differences(recorded)
    sampled = sum(len(call["output_ids"]) for call in recorded.calls)
    for version, off in found.items():
        print(f"{version}: {len(off)} tokens, largest difference {off.max():.1e}")
        assert off.max() <= TOLERANCE
    assert sum(map(len, found.values())) == sampled


def test_the_other_versions_weights_give_other_logprobs(recorded: Recorded):
    """The control: what one version sampled is not what the other would say, by far."""
    for off in differences(recorded, swapped=True).values():
        assert off.max() > 1000 * TOLERANCE
