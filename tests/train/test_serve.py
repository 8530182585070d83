"""The embedded engine over HTTP: the contract that real SGLang keeps too, then what is its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from polar_train.serve import app
from polar_train.served import Engine
from polar_train.small_models import fetch
from tests.train.engine_contract import (
    CASES,
    Served,
    a_stream_adds_up_to_the_plain_answer,
    expected,
    logprobs,
    off,
)


@contextmanager
def serving(folder: Path, *, incremental: bool = False) -> Iterator[Served]:
    """The engine in a thread of this process, on a free port."""
    engine = Engine(folder, incremental=incremental)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app(engine), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", folder, incremental)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        engine.close()


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    """The random two-layer Qwen3 with the real tokenizer."""
    with serving(fetch("tiny-qwen3")) as served:
        yield served


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Served]:
    """A real small model."""
    with serving(fetch("smollm2-135m-instruct")) as served:
        yield served


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_embedded_engine_keeps_the_contract(case, tiny):
    """Each case of engine_contract.py holds for the embedded engine."""
    case(tiny)


def test_incremental_streams_add_up_to_the_plain_answer(tiny):
    """With incremental streams the chunks are deltas of ids, text and logprobs."""
    with serving(tiny.folder, incremental=True) as served:
        a_stream_adds_up_to_the_plain_answer(served)


def test_a_real_model_gets_the_logprobs_of_a_plain_forward(smollm2):
    """SmolLM2's tempered samples, cached and in company, are within 1e-4 of a Hugging Face float32 forward."""
    together = [[*smollm2.prompt, *smollm2.prompt[: 5 * size]] for size in range(6)]
    body = {"input_ids": together, "return_logprob": True}
    body["sampling_params"] = {"temperature": 0.7, "max_new_tokens": 24, "ignore_eos": True}
    for answer, prompt in zip(smollm2.post("/generate", body).json(), together, strict=True):
        assert off(smollm2, prompt, answer, 0.7) < 1e-4


def test_a_seed_gives_the_same_tokens_alone_and_in_company(tiny):
    """sampling_seed fixes an output whoever else is running."""
    alone = tiny.generate(sampling_seed=7, max_new_tokens=12)["output_ids"]
    body = {"input_ids": [tiny.prompt, tiny.prompt[:4], tiny.prompt], "sampling_params": [{}, {}, {"sampling_seed": 7}]}
    body["sampling_params"] = [params | {"max_new_tokens": 12} for params in body["sampling_params"]]
    assert tiny.post("/generate", body).json()[2]["output_ids"] == alone


def test_new_weights_change_the_distribution_of_a_paused_request(tiny, tmp_path):
    """A request held over an update is computed anew: its later tokens have the new weights' logprobs."""
    other = changed_copy(tiny.folder, tmp_path / "other")
    chunks = []
    for chunk in tiny.chunks(max_new_tokens=40, ignore_eos=True):
        if not chunks:
            tiny.post("/pause_generation", {"mode": "retract"})
            answer = tiny.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "other"})
            assert answer.json()["success"], answer.text
            tiny.post("/continue_generation", {})
        chunks.append(chunk)
    tiny.post("/update_weights_from_disk", {"model_path": str(tiny.folder), "weight_version": "default"})
    last, meta = chunks[-1], chunks[-1]["meta_info"]
    first, second = meta["weight_versions"]
    assert (second["version"], second["end"], meta["num_retractions"]) == ("other", 40, 1)
    prompt, cut = tiny.prompt, first["end"]
    old = expected(tiny, prompt, last["output_ids"])[len(prompt) - 1 :]
    new = expected(Served(tiny.url, other), prompt, last["output_ids"])[len(prompt) - 1 :]
    assert abs(logprobs(last)[:cut] - old[:cut]).max() < 1e-4
    assert abs(logprobs(last)[cut:] - new[cut:]).max() < 1e-4
    assert abs(old[cut:] - new[cut:]).max() > 0.01


def test_weights_of_another_shape_are_refused(tiny, tiny_model):
    """An update must keep the model's shape; the message names the field."""
    answer = tiny.post("/update_weights_from_disk", {"model_path": str(tiny_model)})
    assert answer.status_code == 400
    assert "vocab_size is 320 there and 151669 in the served model" in answer.json()["message"]


def test_truncated_weights_are_refused(tiny, tmp_path):
    """A half-written checkpoint leaves the old weights."""
    broken = changed_copy(tiny.folder, tmp_path / "broken")
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    answer = tiny.post("/update_weights_from_disk", {"model_path": str(broken)})
    assert (answer.status_code, answer.json()["success"]) == (400, False)


def test_an_unknown_id_is_refused(tiny):
    """SGLang would crash on an id outside the vocabulary; here it is a 400 that names it."""
    status, body = tiny.refusal(input_ids=[5, 151669])
    assert (status, body["error"]["message"]) == (
        400,
        "input_ids contains 151669, outside the model's vocabulary of 151669.",
    )


def test_a_client_that_leaves_ends_its_request(tiny):
    """When a streaming or waiting client goes away, its request stops: the cache can be flushed, as nothing runs."""
    body = {"input_ids": tiny.prompt, "sampling_params": {"max_new_tokens": 20000, "ignore_eos": True}}
    with httpx.stream("POST", f"{tiny.url}/generate", json=body | {"stream": True}, timeout=60) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{tiny.url}/generate", json=body, timeout=0.3)
    tiny.generate(max_new_tokens=1)  # answered only by a step that comes after both left
    while tiny.post("/flush_cache", {}).status_code != 200:  # the test's timeout is its limit
        pass


def test_a_running_rid_cannot_be_used_twice(tiny):
    """Two live requests of one id could not be told apart by an abort."""
    seen = 0
    for chunk in tiny.chunks("twice", max_new_tokens=500, ignore_eos=True):
        if seen == 0:
            status, body = tiny.refusal(input_ids=tiny.prompt, rid="twice")
            assert (status, body["error"]["message"]) == (400, "Duplicate request ID detected: twice")
            tiny.post("/abort_request", {"rid": "twice"})
        seen = chunk["meta_info"]["completion_tokens"]
    assert seen < 500


def test_run_prints_its_url_and_ends_when_told(tiny_model):
    """`run` on port 0 prints one line with the URL it serves, and SIGTERM ends it."""
    code = "import sys; from polar_train.serve import run; run(sys.argv[1], '127.0.0.1', 0, threads=1)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tiny_model)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        line = process.stdout.readline()
        url = line.removeprefix("engine ready: ").split()[0]
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        process.terminate()
        assert process.wait(30) in (0, -15)


def changed_copy(folder: Path, target: Path) -> Path:
    """The model in `folder` with one matrix doubled, saved in `target`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[1].mlp.down_proj.weight.data *= 2
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target
