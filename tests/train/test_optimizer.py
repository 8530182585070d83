"""AdamW in float32: what torch's does, and the same for a model that computes in bfloat16."""

import pytest
import torch

from polar_train.errors import BadInput
from polar_train.grpo import Settings
from polar_train.model import load
from polar_train.optimizer import Optimizer

CPU = torch.device("cpu")
IDS = torch.arange(40)[None] % 7


def learn(model, optimizer):
    model(input_ids=IDS, labels=IDS).loss.backward()
    norm = optimizer.clip(1.0)
    optimizer.step()
    return norm


def test_in_float32_it_is_torchs(tiny_model):
    """The model's own parameters, clipped and stepped."""
    model, other = load(tiny_model, CPU), load(tiny_model, CPU)
    norm = learn(model, Optimizer(model, 1e-3))
    other(input_ids=IDS, labels=IDS).loss.backward()
    assert norm == torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0).item()
    torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.0).step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_betas_are_torchs(tiny_model):
    """Two updates with a first beta of 0, as TOML writes it: the second has nothing of the first but its square."""
    betas = Settings(beta1=0, beta2=0.98).betas
    model, other = load(tiny_model, CPU), load(tiny_model, CPU)
    ours = Optimizer(model, 1e-3, betas=betas)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-3, betas=(0.0, 0.98), weight_decay=0.0)
    for _ in range(2):
        learn(model, ours)
        other(input_ids=IDS, labels=IDS).loss.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_small_steps_of_a_bfloat16_model_add_up(tiny_model):
    """Thirty steps far below what bfloat16 tells apart move its weights as they move float32's."""
    model, other = load(tiny_model, CPU), load(tiny_model, CPU)
    ours, exact = Optimizer(model, 1e-5, torch.bfloat16), Optimizer(other, 1e-5)
    begun = {name: weight.clone() for name, weight in exact.weights().items()}
    for _ in range(30):
        learn(model, ours)
        learn(other, exact)
    name = "model.layers.0.mlp.up_proj.weight"
    moved, wanted = ours.weights()[name] - begun[name], exact.weights()[name] - begun[name]
    assert torch.nn.functional.cosine_similarity(moved.flatten(), wanted.flatten(), dim=0) > 0.9
    assert model.get_parameter(name).dtype == torch.bfloat16
    assert torch.equal(model.get_parameter(name), ours.weights()[name].bfloat16())


def test_gradients_of_a_bfloat16_model_add_up_in_float32(tiny_model):
    """Six hundred gradients of 1 are 600; in bfloat16 their sum comes to rest at 256."""
    model = load(tiny_model, CPU)
    optimizer = Optimizer(model, 0.0, torch.bfloat16)
    for _ in range(600):
        model.get_parameter("model.norm.weight").sum().backward()
    assert optimizer.clip(1.0) == pytest.approx(600 * model.config.hidden_size**0.5, rel=1e-4)


def test_positions_stay_float32(tiny_model):
    """Only parameters are rounded: the frequencies of the positions are not."""
    model = load(tiny_model, CPU)
    Optimizer(model, 1e-3, torch.bfloat16)
    assert {buffer.dtype for _, buffer in model.named_buffers()} == {torch.float32}


def test_its_weights_are_a_whole_state_dict(tiny_model):
    """Shared weights too, and all in float32."""
    model = load(tiny_model, CPU)
    weights = Optimizer(model, 1e-3, torch.bfloat16).weights()
    assert weights.keys() == model.state_dict().keys()
    assert weights["lm_head.weight"] is not None
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_restored_it_goes_on_alike(tiny_model, compute):
    """Its second step is the same from its moments and weights."""
    model = load(tiny_model, CPU)
    first = Optimizer(model, 1e-3, compute)
    learn(model, first)
    copied = load(tiny_model, CPU)
    copied.load_state_dict({name: weight.clone() for name, weight in first.weights().items()})
    second = Optimizer(copied, 1e-3, compute)
    second.restore({name: moment.clone() for name, moment in first.moments().items()})
    learn(model, first)
    learn(copied, second)
    assert all(torch.equal(weight, second.weights()[name]) for name, weight in first.weights().items())


def test_moments_of_another_model_are_refused(tiny_model):
    """The first that is missing is named."""
    model = load(tiny_model, CPU)
    with pytest.raises(BadInput, match=r"lacks 'exp_avg\.model\.embed_tokens\.weight'"):
        Optimizer(model, 1e-3).restore({})
