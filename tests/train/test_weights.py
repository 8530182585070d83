"""Checkpoints and pushes, with a small engine that serves a folder and can lie."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polar_train.errors import BadInput, PushFailed
from polar_train.model import load
from polar_train.weights import Push, check_probe, checkpoint_logprobs, push, save_checkpoint


@pytest.fixture
def changed(tiny_model, tmp_path) -> Path:
    """A checkpoint of the tiny model with every weight a little different."""
    model = load(tiny_model, torch.device("cpu"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1e-3 * torch.randn_like(weight))
    save_checkpoint(model, tiny_model, tmp_path / "step-1", {"loss": 0.5})
    return tmp_path / "step-1"


class Engine(ThreadingHTTPServer):
    """Answers the three routes that a push uses, from a model folder."""

    def __init__(self, folder: Path, *, honest: bool = True, refuses: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.version, self.honest, self.refuses = folder, "default", honest, refuses
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: dict) -> tuple[int, dict]:
        if path == "/model_info":
            return 200, {"weight_version": self.version}
        if path == "/generate":
            ids = body["input_ids"]
            logprobs = [None, *checkpoint_logprobs(self.folder, np.array(ids, np.int32)).tolist()]
            return 200, {
                "meta_info": {"input_token_logprobs": [[lp, i, None] for lp, i in zip(logprobs, ids, strict=True)]}
            }
        if self.refuses:
            return 400, {"success": False, "message": "no such folder"}
        self.version = body["weight_version"]
        if self.honest:
            self.folder = Path(body["model_path"])
        return 200, {"success": True, "message": "ok"}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, body = self.server.answer(self.path, json.loads(raw or "{}"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_args) -> None:
        """Quiet."""


@pytest.fixture
def serving():
    """Starts engines, and stops them afterwards."""
    started = []

    def start(folder: Path, **habits) -> Engine:
        engine = Engine(folder, **habits)
        thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        started.append((engine, thread))
        return engine

    yield start
    for engine, thread in started:
        engine.shutdown()
        thread.join()
        engine.server_close()


def test_a_checkpoint_loads_in_transformers(changed, tiny_model):
    """Model and tokenizer load from the folder alone, with the trained weights in float32."""
    model = AutoModelForCausalLM.from_pretrained(changed)
    old = load(tiny_model)
    assert model.dtype == torch.float32
    assert not torch.equal(model.model.norm.weight, old.model.norm.weight.cpu())
    assert AutoTokenizer.from_pretrained(changed).encode("abc") == AutoTokenizer.from_pretrained(tiny_model).encode(
        "abc"
    )


def test_a_checkpoint_keeps_every_file_that_describes_the_model(changed, tiny_model):
    """The chat template and tokenizer files are copied byte for byte; weights and figures are new."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (changed / name).read_bytes() == (tiny_model / name).read_bytes()
    assert json.loads((changed / "train.json").read_text()) == {"loss": 0.5}


def test_weights_of_the_source_are_not_carried_over(tiny_model, tmp_path):
    """Shards, indexes and other formats of the old weights would win over the new ones, so they stay behind."""
    source = shutil.copytree(tiny_model, tmp_path / "source")
    for name in ("pytorch_model.bin", "model.safetensors.index.json", "train.json"):
        (source / name).write_text("{}")
    save_checkpoint(load(tiny_model), source, tmp_path / "new", {"loss": 1})
    names = {file.name for file in (tmp_path / "new").iterdir()}
    assert names.isdisjoint({"pytorch_model.bin", "model.safetensors.index.json"})


def test_a_checkpoint_never_replaces_another(changed, tiny_model):
    """An existing folder is left as it was."""
    before = (changed / "model.safetensors").read_bytes()
    with pytest.raises(BadInput, match="exists and is not overwritten"):
        save_checkpoint(load(tiny_model), tiny_model, changed, {})
    assert (changed / "model.safetensors").read_bytes() == before


def test_a_failed_save_leaves_nothing(tiny_model, tmp_path):
    """When the source vanishes half way, neither the checkpoint nor its temporary folder remains."""
    with pytest.raises(FileNotFoundError):
        save_checkpoint(load(tiny_model), tmp_path / "gone", tmp_path / "to" / "new", {})
    assert list((tmp_path / "to").iterdir()) == []


def test_a_push_is_proven_by_a_probe(changed, tiny_model, serving):
    """The engine names the new version, agrees with the checkpoint and no longer with its old weights."""
    seen = push(changed, serving(tiny_model).url, "v2")
    assert (seen.version_before, seen.version_after) == ("default", "v2")
    assert seen.disagreement < 1e-4 < seen.change
    assert seen.tokens > 50


def test_a_relative_checkpoint_reaches_the_engine_as_an_absolute_path(changed, tiny_model, serving, monkeypatch):
    """The engine runs in a folder of its own."""
    monkeypatch.chdir(changed.parent)
    engine = serving(tiny_model)
    push(Path(changed.name), engine.url, "v2")
    assert engine.folder == changed


def test_an_engine_that_keeps_its_weights_is_caught(changed, tiny_model, serving):
    """A new version name over old weights fails the probe."""
    with pytest.raises(PushFailed, match="does not serve this checkpoint"):
        push(changed, serving(tiny_model, honest=False).url, "v2")


def test_pushing_what_is_served_already_is_an_error(changed, serving):
    """A push that changes nothing is not a push."""
    with pytest.raises(PushFailed, match="the weights are the old ones, or equal to them"):
        push(changed, serving(changed).url, "v2")


def test_a_refusal_is_told_in_the_engines_words(changed, tiny_model, serving):
    """Status and message come through."""
    with pytest.raises(PushFailed, match=r"/update_weights_from_disk with 400: .*no such folder"):
        push(changed, serving(tiny_model, refuses=True).url, "v2")


def test_an_engine_that_is_not_there_is_named(changed):
    """A closed port is bad input, with the address in the sentence."""
    with pytest.raises(BadInput, match=r"no engine answers at 'http://127.0.0.1:1/model_info'"):
        push(changed, "http://127.0.0.1:1", "v2")


def test_a_folder_that_is_no_checkpoint_never_reaches_the_engine(tmp_path):
    """It is refused before the engine is asked anything."""
    with pytest.raises(BadInput, match="no checkpoint at"):
        push(tmp_path, "http://127.0.0.1:1", "v2")


def test_another_version_name_is_an_error():
    """An engine that does not name the pushed version would label calls with the old one."""
    with pytest.raises(PushFailed, match="names its weights 'v1' after the push, not 'v2'"):
        check_probe(Push("v1", "v1", tokens=9, disagreement=0, change=1), "v2")


@pytest.mark.parametrize(("disagreement", "change"), [(float("nan"), 1.0), (1e-5, float("nan"))])
def test_a_probe_that_is_not_a_number_proves_nothing(disagreement, change):
    """NaN compares as neither larger nor smaller, and is a failure."""
    with pytest.raises(PushFailed):
        check_probe(Push("v1", "v2", tokens=9, disagreement=disagreement, change=change), "v2")
