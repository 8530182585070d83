"""What an engine must do, as cases that take a base URL: for the embedded engine and for a real SGLang alike.

Every case is a function of a `Served`; `CASES` lists them all. Logprobs are held to a Hugging Face float32 forward, so
engines that pass agree with each other. A case leaves the engine's weights as they were, but may rename their version.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polar_train.checksums import checksums

TOLERANCE = 1e-3
"""Largest difference between a logprob and the reference's, in nats; engines differ in the order of their sums."""


@dataclass(frozen=True)
class Served:
    """A running engine and the model folder that it serves."""

    url: str
    folder: Path
    incremental: bool = False
    """Whether its streams carry deltas."""

    @property
    def prompt(self) -> list[int]:
        """A short chat prompt in the model's own ids."""
        return chat_ids(self.folder, "Count from one to ten.")

    def post(self, path: str, body: Any) -> httpx.Response:
        """One JSON request."""
        return httpx.post(self.url + path, json=body, timeout=120, trust_env=False)

    def get(self, path: str) -> httpx.Response:
        """One plain request."""
        return httpx.get(self.url + path, timeout=120, trust_env=False)

    def generate(self, prompt: list[int] | None = None, *, top: dict[str, Any] | None = None, **sampling: Any) -> Any:
        """The JSON of a /generate call that succeeds, with logprobs."""
        body = {"input_ids": prompt or self.prompt, "sampling_params": sampling, "return_logprob": True}
        answer = self.post("/generate", body | (top or {}))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refusal(self, **body: Any) -> tuple[int, Any]:
        """Status and JSON of a call that is refused."""
        answer = self.post("/generate", body)
        return answer.status_code, answer.json()

    def chunks(self, rid: str | None = None, **sampling: Any) -> Iterator[dict[str, Any]]:
        """The chunks of a stream, whose last line must be [DONE]."""
        body = {"input_ids": self.prompt, "sampling_params": sampling, "return_logprob": True, "stream": True}
        yield from stream(self.url, body | ({"rid": rid} if rid else {}))


def stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON of each event of a streamed /generate call."""
    last = ""
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=120, trust_env=False) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))
            last = line or last
    assert last == "data: [DONE]"


@cache
def reference(folder: Path) -> Any:  # Any: the class depends on the folder
    """The served model in float32, by Hugging Face alone."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def tokenizer(folder: Path) -> Any:  # Any: transformers' tokenizers share no typed base
    """The served model's tokenizer."""
    return AutoTokenizer.from_pretrained(folder)


def chat_ids(folder: Path, text: str) -> list[int]:
    """One user message and the beginning of the answer."""
    message = [{"role": "user", "content": text}]
    if tokenizer(folder).chat_template is None:
        return list(tokenizer(folder).encode(text))
    return list(tokenizer(folder).apply_chat_template(message, add_generation_prompt=True, return_dict=False))


def expected(served: Served, prompt: list[int], output: list[int], temperature: float = 1.0) -> np.ndarray:
    """Reference logprobs [T] of all tokens but the first of prompt + output."""
    ids = torch.tensor(prompt + output)
    with torch.inference_mode():
        logits = reference(served.folder)(ids[None]).logits[0, :-1]
    return (logits / temperature).log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()


def logprobs(answer: Any) -> np.ndarray:
    """The logprobs of the output tokens, after checking that the triples carry the output's ids."""
    triples = answer["meta_info"]["output_token_logprobs"]
    assert [triple[1] for triple in triples] == answer["output_ids"]
    return np.array([triple[0] for triple in triples], np.float32)


def off(served: Served, prompt: list[int], answer: Any, temperature: float = 1.0) -> float:
    """Largest distance of an answer's logprobs from the reference."""
    wanted = expected(served, prompt, answer["output_ids"], temperature)[len(prompt) - 1 :]
    return float(np.abs(logprobs(answer) - wanted).max())


# ------------------------------------------------------------------------------------------------- distribution


def greedy_takes_the_likeliest_token(served: Served) -> None:
    """At temperature 0 each token is the reference's argmax, and its logprob the plain log_softmax."""
    prompt = served.prompt
    answer = served.generate(prompt, temperature=0, max_new_tokens=12)
    assert off(served, prompt, answer) < TOLERANCE
    ids = torch.tensor(prompt + answer["output_ids"])
    with torch.inference_mode():
        best = reference(served.folder)(ids[None]).logits[0].argmax(-1)[len(prompt) - 1 : -1]
    assert answer["output_ids"] == best.tolist()


def logprobs_are_tempered(served: Served) -> None:
    """A sampled token's logprob is log_softmax(logits / temperature), whatever top_p and top_k cut away."""
    for sampling in ({"temperature": 0.6}, {"temperature": 1.4, "top_p": 0.8}, {"temperature": 1.0, "top_k": 5}):
        answer = served.generate(max_new_tokens=10, ignore_eos=True, **sampling)
        assert off(served, served.prompt, answer, sampling["temperature"]) < TOLERANCE


def prompt_logprobs_are_not_tempered(served: Served) -> None:
    """logprob_start_len 0 gives a triple for each prompt token, without a logprob for the first."""
    prompt = served.prompt
    answer = served.generate(prompt, top={"logprob_start_len": 0}, temperature=0.5, max_new_tokens=1)
    triples = answer["meta_info"]["input_token_logprobs"]
    assert [triple[1] for triple in triples] == prompt
    assert triples[0][0] is None
    found = np.array([triple[0] for triple in triples[1:]], np.float32)
    assert np.abs(found - expected(served, prompt, [])).max() < TOLERANCE


def company_does_not_change_logprobs(served: Served) -> None:
    """Requests of different lengths that run together get the logprobs that each gets alone."""
    prompts = [chat_ids(served.folder, "word " * size) for size in (1, 9, 40, 90)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: served.generate(prompt, max_new_tokens=10, ignore_eos=True), prompts))
    assert max(off(served, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)) < TOLERANCE


def a_known_prefix_is_not_computed_again(served: Served) -> None:
    """A repeated prompt is cached but for its last token, a longer one at least as far, and nothing changes."""
    prompt = chat_ids(served.folder, f"A prompt like no other: {uuid.uuid4().hex}")
    first = served.generate(prompt, temperature=0, max_new_tokens=4)
    again = served.generate(prompt, temperature=0, max_new_tokens=4)
    assert again["meta_info"]["cached_tokens"] == len(prompt) - 1
    assert again["output_ids"] == first["output_ids"]
    longer = prompt + first["output_ids"] + prompt[:3]
    answer = served.generate(longer, temperature=0, max_new_tokens=4)
    assert answer["meta_info"]["cached_tokens"] >= len(prompt)
    assert off(served, longer, answer) < TOLERANCE


def a_json_schema_is_kept(served: Served) -> None:
    """Sampling under a schema gives JSON of that schema, whatever the model would have liked."""
    schema = json.dumps({"enum": ["left", "right"]})
    answer = served.generate(json_schema=schema, temperature=1.0, max_new_tokens=40)
    assert json.loads(answer["text"]) in ("left", "right")
    assert logprobs(answer).max() <= 0


# -------------------------------------------------------------------------------------------------------- shapes


def an_answer_says_what_it_is(served: Served) -> None:
    """Text, ids and meta_info have SGLang's names and forms."""
    answer = served.generate(top={"rid": (rid := uuid.uuid4().hex)}, temperature=0, max_new_tokens=3, ignore_eos=True)
    meta = answer["meta_info"]
    assert answer["text"] == tokenizer(served.folder).decode(answer["output_ids"], skip_special_tokens=True)
    assert meta["id"] == rid
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(served.prompt), 3)
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs_length"] == 3
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 3}]
    assert meta["e2e_latency"] > 0


def a_stop_token_is_in_the_ids_and_not_in_the_text(served: Served) -> None:
    """The output ends with the stop token, which the text leaves out and the finish reason names."""
    free = served.generate(temperature=0, max_new_tokens=3, ignore_eos=True)["output_ids"]
    answer = served.generate(temperature=0, max_new_tokens=20, stop_token_ids=[free[1]])
    stop = free.index(free[1])
    assert answer["output_ids"] == free[: stop + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": free[1]}
    assert answer["text"] == tokenizer(served.folder).decode(free[:stop], skip_special_tokens=True)


def a_stop_string_ends_the_text_before_it(served: Served) -> None:
    """The ids keep the tokens of a stop string, the text ends before it."""
    free = served.generate(temperature=0, max_new_tokens=3, ignore_eos=True)
    stop = tokenizer(served.folder).decode(free["output_ids"][2:3])
    answer = served.generate(temperature=0, max_new_tokens=20, stop=[stop], ignore_eos=True)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stop not in answer["text"]
    assert free["text"].startswith(answer["text"])


def several_outputs_come_as_a_list(served: Served) -> None:
    """n and a batch of prompts give an array in order, each output with an id of its own."""
    prompts = [served.prompt, [*served.prompt, *served.prompt]]
    batch = served.generate(prompts, max_new_tokens=2)  # type: ignore[arg-type]  # a list of lists is a batch
    assert [answer["meta_info"]["prompt_tokens"] for answer in batch] == [len(prompt) for prompt in prompts]
    choices = served.generate(n=2, max_new_tokens=2)
    assert len({answer["meta_info"]["id"] for answer in choices}) == 2


def a_stream_adds_up_to_the_plain_answer(served: Served) -> None:
    """The chunks of a greedy stream carry the same ids, text and logprobs as the plain answer."""
    plain = served.generate(temperature=0, max_new_tokens=6, ignore_eos=True)
    chunks = list(served.chunks(temperature=0, max_new_tokens=6, ignore_eos=True))
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    seen = chunks if served.incremental else chunks[-1:]
    assert [id for chunk in seen for id in chunk["output_ids"]] == plain["output_ids"]
    assert "".join(chunk["text"] for chunk in seen) == plain["text"]
    assert np.abs(np.concatenate([logprobs(chunk) for chunk in seen]) - logprobs(plain)).max() < TOLERANCE
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)


def unknown_keys_beside_the_sampling_ones_are_ignored(served: Served) -> None:
    """A top-level key that nobody knows changes nothing."""
    assert len(served.generate(top={"no_such_key": 1}, max_new_tokens=2, ignore_eos=True)["output_ids"]) == 2


# -------------------------------------------------------------------------------------------------------- errors


def an_unknown_sampling_key_is_refused_with_a_string(served: Served) -> None:
    """The error of an unknown sampling parameter is a string that names it."""
    status, body = served.refusal(input_ids=served.prompt, sampling_params={"max_tokens": 4})
    assert status == 400
    assert body["error"].startswith("unknown field `max_tokens`, expected one of `max_new_tokens`")


def a_bad_value_is_refused_with_a_message(served: Served) -> None:
    """A value out of range, no input and an empty input are refused in the same shape and SGLang's words."""
    cases = [
        ({"input_ids": served.prompt, "sampling_params": {"temperature": -1}},
         "temperature must be a non-negative finite number, got -1."),
        ({"sampling_params": {}}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": []}, "input_ids cannot be empty."),
    ]  # fmt: skip
    for body, message in cases:
        assert served.refusal(**body) == (400, {"error": {"message": message}})


def what_is_not_json_is_a_bad_request(served: Served) -> None:
    """Broken JSON and values of the wrong type have the third shape of an error."""
    broken = httpx.post(
        f"{served.url}/generate", content=b'{"input_ids":', headers={"content-type": "application/json"}
    )
    for answer in (broken, served.post("/generate", {"input_ids": "abc"})):
        assert answer.status_code == 400
        body = answer.json()
        assert (body["object"], body["type"], body["code"], body["param"]) == ("error", "Bad Request", 400, None)
        assert body["message"].startswith("1 validation error:")


def a_prompt_over_the_context_is_refused(served: Served) -> None:
    """Both lengths are in the message; a stream says it inside a 200."""
    limit = served.get("/v1/models").json()["data"][0]["max_model_len"]
    prompt = [served.prompt[0]] * (limit + 10)
    message = f"The input ({limit + 10} tokens) is longer than the model's context length ({limit} tokens)."
    assert served.refusal(input_ids=prompt) == (400, {"error": {"message": message}})
    [chunk] = stream(served.url, {"input_ids": prompt, "stream": True})
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    assert chunk == {"error": error}


# ------------------------------------------------------------------------------------------------------- control


def an_abort_ends_a_stream(served: Served) -> None:
    """/abort_request by rid ends the stream with what was sampled; an unknown rid is no error."""
    rid, chunks = uuid.uuid4().hex, []
    for chunk in served.chunks(rid, max_new_tokens=2000, ignore_eos=True):
        if not chunks:
            assert served.post("/abort_request", {"rid": rid}).status_code == 200
        chunks.append(chunk)
    last = chunks[-1]["meta_info"]
    assert last["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert 0 < last["completion_tokens"] < 2000
    assert served.post("/abort_request", {"rid": "no-such-request"}).status_code == 200


def an_abort_ends_a_plain_request(served: Served) -> None:
    """abort_all answers a waiting client with 200 and the finish reason abort."""
    answers: list[Any] = []
    other = threading.Thread(target=lambda: answers.append(served.generate(max_new_tokens=2000, ignore_eos=True)))
    for chunk in served.chunks(max_new_tokens=2000, ignore_eos=True):
        if other.ident is None:
            other.start()
        if chunk["meta_info"]["finish_reason"] is None and chunk["meta_info"]["completion_tokens"] >= 20:
            served.post("/abort_request", {"abort_all": True})
    served.post("/abort_request", {"abort_all": True})  # for a thread that was late
    other.join()
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


def weights_are_named_anew_by_an_update(served: Served) -> None:
    """An update from disk carries its version into /model_info and the next call, and forgets the prefixes."""
    version = f"step-{uuid.uuid4().hex[:6]}"
    before = served.generate(temperature=0, max_new_tokens=4)
    answer = served.post("/update_weights_from_disk", {"model_path": str(served.folder), "weight_version": version})
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert answer.json()["message"].endswith(f"Weight version updated to {version}.")
    assert served.get("/model_info").json()["weight_version"] == version
    after = served.generate(temperature=0, max_new_tokens=4)
    assert after["meta_info"]["weight_version"] == version
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["output_ids"] == before["output_ids"]


def a_failed_update_leaves_the_weights(served: Served) -> None:
    """A folder that holds no model is a 400 with success false, and the engine goes on as before."""
    before = served.get("/model_info").json()["weight_version"]
    answer = served.post("/update_weights_from_disk", {"model_path": "/nonexistent", "weight_version": "never"})
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert served.get("/model_info").json()["weight_version"] == before
    assert off(served, served.prompt, served.generate(temperature=0, max_new_tokens=4)) < TOLERANCE


def a_pause_holds_a_request_and_a_rename_splits_its_spans(served: Served) -> None:
    """A request that was paused with retract goes on later; its tokens are listed under both version names."""
    version, chunks = f"renamed-{uuid.uuid4().hex[:6]}", []
    for chunk in served.chunks(max_new_tokens=60, ignore_eos=True):
        if not chunks:
            paused = served.post("/pause_generation", {"mode": "retract"})
            assert paused.json() == {"message": "Generation paused successfully.", "status": "ok"}
            renamed = served.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
            assert renamed.json()["new_version"] == version
            assert served.post("/continue_generation", {}).json()["status"] == "ok"
        chunks.append(chunk)
    meta = chunks[-1]["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 60}
    assert (meta["weight_versions"][-1]["version"], meta["weight_versions"][-1]["end"]) == (version, 60)


def a_paused_engine_answers_all_but_requests(served: Served) -> None:
    """While paused a request waits, and weights are shown, exchanged and their cache flushed; then it is answered."""
    version = f"paused-{uuid.uuid4().hex[:6]}"
    assert served.post("/pause_generation", {"mode": "retract"}).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.generate, max_new_tokens=1)
        before = served.post("/weights_checker", {"action": "checksum"}).json()
        assert served.post("/flush_cache", {}).text.startswith("Cache flushed.")
        update = {"model_path": str(served.folder), "weight_version": version}
        assert served.post("/update_weights_from_disk", update).json()["success"]
        assert served.post("/weights_checker", {"action": "checksum"}).json() == before
        assert served.get("/server_info").json()["dtype"] == "float32"
        assert served.post("/continue_generation", {}).status_code == 200
        assert waiting.result()["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 1}]


def tensors_are_known_by_their_checksums(served: Served) -> None:
    """Of each part of the model by name; a tensor that no engine joins to others has that of the model folder."""
    shown = served.post("/weights_checker", {"action": "checksum"}).json()
    assert shown["success"]
    [part] = shown["ranks"]
    [place] = part["parallelism_info"]
    assert (place["role"], place["tp_rank"], place["tp_size"]) == ("target", 0, 1)
    wanted = checksums(reference(served.folder))
    for name in ("model.norm.weight", "model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        assert part["checksums"][name] == wanted[name]


def an_engine_says_what_it_serves(served: Served) -> None:
    """The information routes answer in SGLang's shapes."""
    assert [served.get(path).status_code for path in ("/health", "/health_generate", "/ready", "/ping")] == [200] * 4
    info = served.get("/model_info").json()
    assert (info["model_path"], info["is_generation"]) == (str(served.folder), True)
    assert served.get("/get_model_info").json()["weight_version"] == info["weight_version"]
    assert "max_total_num_tokens" in json.dumps(served.get("/server_info").json())
    [card] = served.get("/v1/models").json()["data"]
    assert card["max_model_len"] == reference(served.folder).config.max_position_embeddings


def the_tokenizer_can_be_asked(served: Served) -> None:
    """/tokenize gives the ids of a text without a template, /detokenize the text of ids."""
    text = "naïve Ünïcode 北京"
    ids = tokenizer(served.folder).encode(text, add_special_tokens=False)
    answer = served.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    assert served.post("/detokenize", {"tokens": ids}).json()["text"] == text


def the_cache_can_be_flushed(served: Served) -> None:
    """After /flush_cache a known prompt is computed anew."""
    served.generate(max_new_tokens=1)
    assert served.post("/flush_cache", {}).text.startswith("Cache flushed.")
    assert served.generate(max_new_tokens=1)["meta_info"]["cached_tokens"] == 0


CASES: tuple[Callable[[Served], None], ...] = (
    greedy_takes_the_likeliest_token,
    logprobs_are_tempered,
    prompt_logprobs_are_not_tempered,
    company_does_not_change_logprobs,
    a_known_prefix_is_not_computed_again,
    a_json_schema_is_kept,
    an_answer_says_what_it_is,
    a_stop_token_is_in_the_ids_and_not_in_the_text,
    a_stop_string_ends_the_text_before_it,
    several_outputs_come_as_a_list,
    a_stream_adds_up_to_the_plain_answer,
    unknown_keys_beside_the_sampling_ones_are_ignored,
    an_unknown_sampling_key_is_refused_with_a_string,
    a_bad_value_is_refused_with_a_message,
    what_is_not_json_is_a_bad_request,
    a_prompt_over_the_context_is_refused,
    an_abort_ends_a_stream,
    an_abort_ends_a_plain_request,
    weights_are_named_anew_by_an_update,
    a_failed_update_leaves_the_weights,
    a_pause_holds_a_request_and_a_rename_splits_its_spans,
    a_paused_engine_answers_all_but_requests,
    tensors_are_known_by_their_checksums,
    an_engine_says_what_it_serves,
    the_tokenizer_can_be_asked,
    the_cache_can_be_flushed,
)
