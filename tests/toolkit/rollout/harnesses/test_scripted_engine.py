"""The scripted engine keeps SGLang's wire contract, so that a client that works with it works with SGLang."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from polar_toolkit.rollout.harnesses.scripted_engine import Fault, ScriptedEngine

TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SAMPLING = {"temperature": 1.0, "max_new_tokens": 200, "stop_token_ids": [151645]}


@pytest.fixture
def engine(qwen3_folder: Path) -> Generator[ScriptedEngine]:
    with ScriptedEngine(qwen3_folder, ["<think>\nhm\n</think>\n\nfirst  answer", "second"]).serving() as served:
        yield served


def body(engine: ScriptedEngine, text: str, **more: Any) -> dict[str, Any]:
    return {
        "input_ids": engine.encode(text),
        "rid": "a" * 32,
        "return_logprob": True,
        "sampling_params": SAMPLING,
        **more,
    }


def post(engine: ScriptedEngine, text: str, **more: Any) -> Any:
    return httpx.post(f"{engine.url}/generate", json=body(engine, text, **more)).raise_for_status()


def events(engine: ScriptedEngine, text: str) -> list[dict[str, Any]]:
    lines = post(engine, text, stream=True).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_reply_is_the_encoded_text_and_the_stop_token(engine: ScriptedEngine):
    """The plain answer holds ids, a triple for each of them and the matched stop id; text leaves specials out."""
    answer = post(engine, TURN.format("hello")).json()
    assert answer["output_ids"] == engine.encode("<think>\nhm\n</think>\n\nfirst  answer<|im_end|>")
    assert [triple[1] for triple in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 151645}
    assert answer["meta_info"]["weight_versions"] == [
        {"version": "scripted-0", "start": 0, "end": len(answer["output_ids"])}
    ]


def test_a_stream_is_increments_that_add_up(engine: ScriptedEngine):
    """Ids and triples are increments, counts are totals, the finish stands on the last event only."""
    parts = events(engine, TURN.format("hello"))
    assert [i for part in parts for i in part["output_ids"]] == engine.calls[0].output_ids.tolist()
    assert parts[-1]["meta_info"]["completion_tokens"] == len(engine.calls[0].output_ids)
    assert [bool(part["meta_info"]["finish_reason"]) for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_cumulative_stream_repeats_from_the_start(qwen3_folder: Path):
    """SGLang's default form of a stream."""
    with ScriptedEngine(qwen3_folder, ["one two three four five six seven"], cumulative=True).serving() as engine:
        parts = events(engine, TURN.format("count"))
    assert len(parts) > 1
    assert all(len(part["output_ids"]) == part["meta_info"]["completion_tokens"] for part in parts)


def test_the_turn_of_the_conversation_chooses_the_reply(engine: ScriptedEngine):
    """A prompt that holds one finished assistant turn gets the second reply, whoever asked before."""
    prompt = TURN.format("hello") + "anything<|im_end|>\n" + TURN.format("go on")
    assert post(engine, prompt).json()["text"] == "second"
    assert post(engine, prompt).json()["text"] == "second"


def test_a_function_of_the_prompt_can_be_the_script(qwen3_folder: Path):
    """A script may answer to what it reads."""
    with ScriptedEngine(qwen3_folder, lambda prompt: str("hello" in prompt)).serving() as engine:
        assert post(engine, TURN.format("hello")).json()["text"] == "True"


def test_no_two_tokens_share_a_logprob(engine: ScriptedEngine):
    """Log-probabilities are negative, distinct and exact in float32, so that a mix-up shows."""
    for _ in range(3):
        post(engine, TURN.format("hello"))
    logprobs = np.concatenate([np.array(call.logprobs) for call in engine.calls])
    assert len(np.unique(logprobs)) == len(logprobs)
    assert (logprobs < 0).all()
    assert (logprobs.astype(np.float32) == logprobs).all()


def test_a_length_limit_cuts_the_reply(engine: ScriptedEngine):
    """max_new_tokens is kept, and told as SGLang tells it."""
    answer = post(engine, TURN.format("hello"), sampling_params={"max_new_tokens": 3}).json()
    assert len(answer["output_ids"]) == 3
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


def test_a_prompt_that_holds_a_part_of_the_reply_gets_the_rest(engine: ScriptedEngine):
    """A client that resumes an aborted call from its partial ids is not told the beginning twice."""
    whole = engine.encode("<think>\nhm\n</think>\n\nfirst  answer<|im_end|>")
    ids = [*engine.encode(TURN.format("hello")), *whole[:4]]
    answer = httpx.post(f"{engine.url}/generate", json={"input_ids": ids, "rid": "b" * 32}).json()
    assert answer["output_ids"] == whole[4:]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"sampling_params": {"max_tokens": 5}}, "unknown field `max_tokens`, expected one of `max_new_tokens`, ..."),
        ({"input_ids": []}, {"message": "input_ids cannot be empty."}),
    ],
)
def test_what_sglang_refuses_is_refused(engine: ScriptedEngine, change: dict[str, Any], error: Any):
    """Unknown sampling keys and empty prompts are a 400 in SGLang's shapes."""
    answer = httpx.post(f"{engine.url}/generate", json=body(engine, "x") | change)
    assert (answer.status_code, answer.json()["error"]) == (400, error)


def test_an_id_outside_the_vocabulary_is_refused_and_not_recorded(engine: ScriptedEngine):
    """SGLang would die of such an id; a test of the client sees a 400."""
    answer = httpx.post(f"{engine.url}/generate", json={"input_ids": [999_999_999], "rid": "c"})
    assert answer.status_code == 400
    assert engine.calls == []


def test_faults_come_in_order_and_once(engine: ScriptedEngine):
    """An overloaded engine answers 503, an aborting one a part of the reply with finish abort, then all is well."""
    engine.faults += [Fault("overloaded"), Fault("abort", after=3)]
    url, sent = f"{engine.url}/generate", body(engine, TURN.format("hello"))
    assert httpx.post(url, json=sent).status_code == 503
    aborted = httpx.post(url, json=sent).json()
    assert len(aborted["output_ids"]) == 3
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert httpx.post(url, json=sent).json()["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize(("ending", "finish"), [("release", "stop"), ("abort", "abort")])
def test_a_held_call_waits_for_its_ending(engine: ScriptedEngine, ending: str, finish: str):
    """A held call stands still after its tokens until it is released, or aborted by its rid."""
    engine.faults.append(Fault("hold", after=2))
    parts: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: parts.extend(events(engine, TURN.format("hello"))))
    reader.start()
    assert engine.holding.wait(10)
    assert len(engine.calls[0].output_ids) == 2
    if ending == "release":
        engine.release()
    else:
        httpx.post(f"{engine.url}/abort_request", json={"rid": "a" * 32})
    reader.join()
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == finish


def test_a_client_that_leaves_is_on_record(qwen3_folder: Path):
    """A stream whose client goes away ends, marked as disconnected."""
    with ScriptedEngine(qwen3_folder, ["some words"]).serving() as engine:
        engine.faults.append(Fault("hold", after=1))
        sent = body(engine, TURN.format("hello"), stream=True)
        with httpx.stream("POST", f"{engine.url}/generate", json=sent) as answer:
            next(answer.iter_lines())
            assert engine.holding.wait(10)
    assert engine.calls[0].disconnected


def test_the_engine_tells_its_model_and_tokenizer(engine: ScriptedEngine, qwen3_folder: Path):
    """/model_info, /v1/models, /tokenize and /health answer what a start-up check asks for."""
    get = {path: httpx.get(engine.url + path) for path in ("/model_info", "/v1/models", "/health")}
    tokens = httpx.post(f"{engine.url}/tokenize", json={"prompt": "a <|im_end|> é", "add_special_tokens": False})
    assert get["/model_info"].json()["tokenizer_path"] == str(qwen3_folder)
    assert get["/v1/models"].json()["data"][0]["max_model_len"] == 131_072
    assert get["/health"].status_code == 200
    assert tokens.json()["tokens"] == engine.encode("a <|im_end|> é")
