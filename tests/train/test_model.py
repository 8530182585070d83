"""Logprobs of sampled tokens: one by hand, and what a model must be."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer, MistralConfig, Qwen3Config

from polar_mitm.tokens.fingerprint import fingerprint
from polar_train.errors import BadInput
from polar_train.model import check_tokenizer, load, packs, token_logprobs


def test_logprobs_are_those_of_logits_over_temperature_one_token_before(tiny_model):
    """The token at t is predicted by the logits at t - 1, divided by the temperature of t."""
    model = load(tiny_model).eval()
    ids = torch.arange(5, 25)
    mask = torch.zeros(20, dtype=torch.bool)
    mask[[3, 4, 19]] = True
    temperature = torch.linspace(0.5, 1.5, 20)
    with torch.no_grad():
        got = token_logprobs(model, ids, torch.arange(20), mask, temperature)
        logits = model(ids[None]).logits[0]
    by_hand = [torch.log_softmax(logits[t - 1] / temperature[t], 0)[ids[t]].item() for t in (3, 4, 19)]
    assert got.tolist() == pytest.approx(by_hand, abs=1e-5)


def test_only_states_before_loss_tokens_are_projected(tiny_model):
    """The vocabulary projection sees as many rows as there are loss tokens."""
    model = load(tiny_model).eval()
    seen = []
    model.get_output_embeddings().register_forward_hook(
        lambda _module, inputs, _output: seen.append(inputs[0].shape[1])
    )
    mask = torch.arange(50) >= 47
    token_logprobs(model, torch.arange(50), torch.arange(50), mask, torch.ones(50))
    assert seen == [3]


def test_a_model_is_loaded_in_float32(tiny_model, tmp_path):
    """Whatever its config says: an update of 1e-6 would vanish in bfloat16."""
    folder = shutil.copytree(tiny_model, tmp_path / "half")
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).dtype == torch.float32


def test_a_folder_without_a_model_is_refused(tmp_path):
    """The sentence names the folder."""
    with pytest.raises(BadInput, match="no model at"):
        load(tmp_path)


def test_a_folder_without_weights_is_refused(tiny_model, tmp_path):
    """A config alone is no model."""
    shutil.copy(tiny_model / "config.json", tmp_path)
    with pytest.raises(BadInput, match="cannot be loaded"):
        load(tmp_path)


def test_dropout_is_refused(tiny_model, tmp_path):
    """A model that drops activations cannot recompute the engine's logprobs."""
    folder = shutil.copytree(tiny_model, tmp_path / "dropping")
    config = json.loads((folder / "config.json").read_text()) | {"attention_dropout": 0.1}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"uses dropout \{'attention_dropout': 0.1\}"):
        load(folder)


def test_a_batch_of_another_tokenizer_is_refused(tiny_model, tmp_path):
    """Both fingerprints are told; without one on either side there is nothing to compare."""
    own = fingerprint(AutoTokenizer.from_pretrained(tiny_model))
    check_tokenizer(own, tiny_model)
    check_tokenizer(None, tiny_model)
    check_tokenizer("257-ab", tmp_path)
    with pytest.raises(BadInput, match=rf"tokenizer '257-ab', and that of the model at .*tiny' is '{own}': train"):
        check_tokenizer("257-ab", tiny_model)


def test_only_full_attention_packs():
    """A sliding window keeps trajectories in rows of their own."""
    assert packs(Qwen3Config())
    assert not packs(MistralConfig(sliding_window=128))
    assert not packs(Qwen3Config(use_sliding_window=True, sliding_window=64, max_window_layers=1))


def test_the_logits_of_the_token_itself_are_not_its_own(tiny_model):
    """Negative control: reading the logits at t, instead of t - 1, raises nothing and gives other logprobs."""
    model = load(tiny_model).eval()
    ids = torch.arange(5, 25)
    with torch.no_grad():
        got = token_logprobs(model, ids, torch.arange(20), torch.arange(20) > 0, torch.ones(20))
        wrong = model(ids[None]).logits[0].log_softmax(-1).gather(1, ids[:, None])[1:, 0]
    assert (got - wrong).abs().max() > 0.05
