"""Recorded logprobs against an independent float32 forward: what a researcher checks by hand before trusting them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from polar_mitm.journal import read_calls
from polar_mitm.rows import full_prompts
from polar_mitm.tokens import load
from polar_toolkit import merge
from tests.mitm.house import open_house

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "nucleus": {"temperature": 0.3, "top_p": 0.2},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}},
}


@pytest.fixture(scope="module")
def run(embedded_url: str, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two-turn sessions whose harness asks for four kinds of sampling; the run itself samples at 0.8."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    sampling = json.dumps({"temperature": 0.8, "max_new_tokens": 24, "seed": 5})
    with open_house(folder, embedded_url, load(smollm2), sampling=sampling) as house:
        house.client.timeout = 300
        for name, asked in ASKED.items():
            messages: list[dict[str, str]] = []
            for question in ("What is the capital of France?", "And of Italy?"):
                messages.append({"role": "user", "content": question})
                body = {"model": "any", "messages": messages, **asked}
                answer = house.post("/v1/chat/completions", body, authorization=f"Bearer {name}:x").json()
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return folder


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    """The served weights, loaded by transformers alone."""
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


def forward(model: Any, input_ids: list[int], temperature: float) -> np.ndarray[Any, Any]:
    """Logprobs [T-1] of all ids but the first, at a temperature."""
    with torch.inference_mode():
        logits = model(torch.tensor([input_ids])).logits[0, :-1] / temperature
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(input_ids[1:])[:, None])[:, 0].numpy()


def test_a_forward_over_the_merged_trajectories_gives_every_recorded_logprob(run: Path, model: Any, tmp_path: Path):
    """Each trained token's recorded logprob is within 1e-4 of a float32 forward over its whole trajectory."""
    merge.merge(run, tmp_path / "merged", merge.Options(), lambda *_: None)
    rows = pq.read_table(tmp_path / "merged" / "trajectories").to_pylist()
    compared, largest = 0, 0.0
    for row in rows:
        mask = np.array(row["loss_mask"], bool)
        given = forward(model, row["input_ids"], 0.8)
        difference = np.abs(given - np.array(row["logprobs"], np.float32)[1:])[mask[1:]]
        compared, largest = compared + int(mask.sum()), max(largest, float(difference.max(initial=0)))
    print(f"{compared} trained tokens in {len(rows)} trajectories, largest difference {largest:.1e}")
    assert compared > 20
    assert largest < 1e-4


def test_what_the_harness_asks_for_does_not_change_the_distribution(run: Path, model: Any):
    """Temperature 0 and top_p are recorded, not applied: their tokens are trainable and their logprobs hold."""
    table = read_calls(run)
    prompts = full_prompts(table)
    for call in table.to_pylist():
        if call["session_id"] in {"plain", "greedy", "nucleus"}:
            assert call["trainable"], call["untrainable_reason"]
            ids = [*prompts[call["call_id"], 0].tolist(), *call["output_ids"]]
            given = forward(model, ids, call["temperature"])[-len(call["output_ids"]) :]
            assert np.abs(given - np.array(call["logprobs"])).max() < 1e-4
    asked = {c["session_id"]: json.loads(c["sampling_asked"]) for c in table.to_pylist()}
    assert asked["greedy"]["temperature"] == 0
    assert asked["nucleus"]["top_p"] == 0.2


def test_tokens_drawn_under_a_schema_say_so(run: Path):
    """A JSON schema is applied, its answers parse, and its tokens are not trained, with the reason `grammar`."""
    calls = [c for c in read_calls(run).to_pylist() if c["session_id"] == "schema"]
    assert {c["untrainable_reason"] for c in calls} == {"grammar"}
    finished = [c for c in calls if c["finish"] == "stop"]
    assert all("city" in json.loads(json.loads(c["reply"])[-1]["text"]) for c in finished)
