"""Checkpoints, and the probe by which one is known in an engine."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polar_train.errors import BadInput, PushFailed
from polar_train.model import load
from polar_train.weights import PROBE, Push, check_probe, probe_of, save_checkpoint


@pytest.fixture
def changed(tiny_model, tmp_path) -> Path:
    """A checkpoint of the tiny model with every weight a little different."""
    model = load(tiny_model, torch.device("cpu"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1e-3 * torch.randn_like(weight))
    save_checkpoint(model, tiny_model, tmp_path / "step-1", {"loss": 0.5})
    return tmp_path / "step-1"


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


def seen(disagreement: float) -> Push:
    """A push after which the engine's logprobs were so far away."""
    return Push(
        url="http://engine", version_before="v1", version_after="v2", tensors=3, changed=3, tokens=9,
        disagreement=disagreement,
    )  # fmt: skip


def test_the_probe_of_a_checkpoint_is_what_a_plain_forward_gives(changed):
    """Ids by its own tokenizer, and the logprob of each but the first by a float32 forward."""
    probe = probe_of(changed)
    with torch.inference_mode():
        logits = load(changed)(torch.tensor(probe.ids_T).long()[None]).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(probe.ids_T[1:]).long()[:, None])[:, 0]
    assert AutoTokenizer.from_pretrained(changed).decode(probe.ids_T) == PROBE
    assert probe.disagreement(wanted.numpy()) < 1e-5
    assert probe.disagreement(probe.expected_T + np.float32(0.25)) == pytest.approx(0.25, abs=1e-5)


def test_a_folder_that_is_no_checkpoint_has_no_probe(tmp_path):
    """The sentence names the folder."""
    with pytest.raises(BadInput, match="no checkpoint at"):
        probe_of(tmp_path)


def test_an_engine_in_float32_is_held_to_a_thousandth():
    """What is further away is not the checkpoint."""
    check_probe(seen(9e-4), "float32")
    with pytest.raises(PushFailed, match=r"differ from the checkpoint's by 2.00e-03, more than 1e-03"):
        check_probe(seen(2e-3), "float32")


def test_an_engine_in_half_precision_is_allowed_its_rounding():
    """Its logprobs are those of rounded weights."""
    check_probe(seen(0.1), "bfloat16")
    with pytest.raises(PushFailed, match="it does not serve this checkpoint"):
        check_probe(seen(2.0), "bfloat16")


def test_a_probe_that_is_not_a_number_proves_nothing():
    """NaN compares as neither larger nor smaller, and is a failure."""
    with pytest.raises(PushFailed):
        check_probe(seen(float("nan")), "float32")
