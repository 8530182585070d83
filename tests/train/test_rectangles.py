"""Attention by rectangles: the outcome and the gradient of plain attention under a mask."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from polar_train import rectangles
from polar_train.rectangles import attend, attending, mask_of


class Layer(torch.nn.Module):
    """What attention is told of a layer: how many heads share their keys."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def drawn(heads: int, groups: int, past: int, own: int) -> tuple[torch.Tensor, ...]:
    """Query, key, value with gradient, and the gradient of what comes out."""
    torch.manual_seed(0)
    shapes = [(1, heads, own, 16), (1, heads // groups, past + own, 16), (1, heads // groups, past + own, 16)]
    return *(torch.randn(shape, requires_grad=True) for shape in shapes), torch.randn(1, own, heads, 16)


def both(layer, inputs, mask, **asked) -> list[torch.Tensor]:
    """What comes out, and the gradients of what went in."""
    *leaves, gradient = inputs
    out, _ = attend(layer, *leaves, mask, **asked)
    return [out, *torch.autograd.grad(out, leaves, gradient)]


@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (9, 3), (6, 6)])
@pytest.mark.parametrize(("past", "own"), [(1, 1), (37, 20), (300, 3), (3, 300)])
def test_rectangles_are_plain_attention_under_the_mask(heads, groups, past, own):
    """Whatever shares its keys, and however much lies before."""
    inputs, layer = drawn(heads, groups, past, own), Layer(groups)
    plain = both(layer, inputs, mask_of(past, (own,), inputs[0]))
    for got, expected in zip(both(layer, inputs, None), plain, strict=True):
        assert torch.allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("past", [0, 1, 40])
@pytest.mark.parametrize("pieces", [(3, 1, 7), (1, 1), (20, 5)])
def test_pieces_see_the_past_and_not_each_other(past, pieces):
    """Under the mask, and each with the outcome that it has alone."""
    inputs, layer = drawn(9, 3, past, sum(pieces)), Layer(3)
    together = both(layer, inputs, None, pieces=pieces)
    for got, expected in zip(together, both(layer, inputs, mask_of(past, pieces, inputs[0])), strict=True):
        assert torch.allclose(got, expected, atol=2e-5)
    query, key, value, _ = inputs
    last = slice(-pieces[-1], None)
    own_key, own_value = (torch.cat([t[:, :, :past], t[:, :, last]], 2) for t in (key, value))
    mask = mask_of(past, pieces[-1:], query)
    alone, _ = attend(layer, query[:, :, last], own_key, own_value, mask)
    assert torch.allclose(together[0][:, last], alone, atol=2e-5)


def test_a_scale_of_the_layer_is_heeded():
    """Some models do not divide by the root of the width."""
    inputs, layer = drawn(4, 2, 9, 5), Layer(2)
    plain = both(layer, inputs, mask_of(9, (5,), inputs[0]), scaling=0.7)
    for got, expected in zip(both(layer, inputs, None, scaling=0.7), plain, strict=True):
        assert torch.allclose(got, expected, atol=2e-5)


def test_without_the_operator_a_mask_does_it(monkeypatch):
    """A PyTorch that has it no more: the same outcome by the public function."""
    inputs, layer = drawn(4, 2, 9, 5), Layer(2)
    here = both(layer, inputs, None)
    monkeypatch.setattr(rectangles, "_kernel", None)
    for got, expected in zip(both(layer, inputs, None), here, strict=True):
        assert torch.allclose(got, expected, atol=2e-5)


def test_a_model_attends_so_inside_the_block_only(tiny_model):
    """Its own attention is back behind it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with attending(model) as without_mask:
        assert without_mask
        assert model.config._attn_implementation == rectangles.NAME
    assert model.config._attn_implementation == "sdpa"


def test_a_model_of_another_attention_is_left_alone(tiny_model, sliding_model):
    """Where somebody chose another one, and where layers do not see all before them: a mask is needed."""
    for folder, chosen in ((tiny_model, "eager"), (sliding_model, "sdpa")):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=chosen)
        with attending(model) as without_mask:
            assert not without_mask
            assert model.config._attn_implementation == chosen
