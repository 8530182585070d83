"""One engine as a trainer steers it, against the embedded engine."""

import json
from http import HTTPStatus

import httpx
import numpy as np
import pytest
from starlette.responses import JSONResponse

from polar_train.checksums import checksums
from polar_train.control import Engine, Held
from polar_train.errors import BadInput, PushFailed
from polar_train.model import load
from polar_train.weights import checkpoint_logprobs
from tests.train.engine_sets import running

IDS = np.arange(40, 70, dtype=np.int32)


@pytest.fixture
def engine(tiny_model):
    """An engine that serves the tiny model, and the trainer's end."""
    with running(tiny_model) as served:
        control = Engine(f"{served.url}/")
        yield control
        control.close()


def test_an_engine_shows_what_it_holds(engine, tiny_model):
    """Version, folder, and the checksum of every tensor."""
    sums = {f"0 {name}": checksum for name, checksum in checksums(load(tiny_model)).items()}
    assert engine.held() == Held("default", str(tiny_model), sums)
    assert engine.precision() == "float32"


def test_a_paused_engine_holds_requests_and_still_takes_and_shows_weights(engine, tiny_model):
    """Everything but sampling answers; a request waits until the engine goes on, under the new version."""
    engine.pause("retract")
    body = {"input_ids": IDS.tolist(), "sampling_params": {"max_new_tokens": 1}, "stream": True}
    with httpx.stream("POST", f"{engine.url}/generate", json=body, timeout=60, trust_env=False) as waiting:
        engine.load(tiny_model, "v2")
        assert engine.held().version == "v2"
        engine.resume()
        lines = [line for line in waiting.iter_lines() if line.startswith("data: {")]
    assert json.loads(lines[-1].removeprefix("data: "))["meta_info"]["weight_version"] == "v2"


def test_a_prompt_gets_its_logprobs(engine, tiny_model):
    """Those of a float32 forward, for all ids but the first."""
    assert np.abs(engine.logprobs(IDS) - checkpoint_logprobs(tiny_model, IDS)).max() < 1e-4


def test_a_refusal_is_told_in_the_engines_words(engine, tmp_path):
    """Path, status and message come through."""
    with pytest.raises(PushFailed, match=r"it answered /update_weights_from_disk with 400: .*is not a folder"):
        engine.load(tmp_path / "nothing", "v2")


def test_an_answer_that_is_no_success_is_a_refusal(tiny_model):
    """SGLang may say so with status 200."""
    said = JSONResponse({"success": False, "message": "the cache was not flushed"}, status_code=HTTPStatus.OK)
    with running(tiny_model, lambda _engine, path, _body: said if "update" in path else None) as served:
        control = Engine(served.url)
        with pytest.raises(PushFailed, match="it refused the weights: 'the cache was not flushed'"):
            control.load(tiny_model, "v2")
        control.close()


def test_an_engine_that_gives_other_ids_back_is_none_of_sglangs_kind(tiny_model):
    """Logprobs of ids that were not asked for prove nothing."""
    said = JSONResponse({"meta_info": {"input_token_logprobs": [[None, 1, None], [-1.0, 2, None]]}})
    with running(tiny_model, lambda _engine, path, _body: said if path == "/generate" else None) as served:
        control = Engine(served.url)
        with pytest.raises(PushFailed, match="not an SGLang-compatible engine"):
            control.logprobs(IDS)
        control.close()


def test_an_engine_that_is_not_there_is_named():
    """A closed port is bad input, with the address in the sentence."""
    control = Engine("http://127.0.0.1:1")
    with pytest.raises(BadInput, match=r"no engine answers at 'http://127.0.0.1:1/model_info'"):
        control.held()
    control.close()


def test_engines_are_compared_where_they_name_their_tensors_alike():
    """Equal names with another checksum are a contradiction; other names are another kind of engine."""
    one, same, other = (Held("v", "f", {"a": "1", "b": checksum}) for checksum in ("2", "2", "3"))
    assert (one.contradicts(same), one.contradicts(other), one.contradicts(Held("v", "f", {"ab": "9"}))) == (
        False, True, False,
    )  # fmt: skip
    assert (one.changed(same), one.changed(other)) == (0, 1)
