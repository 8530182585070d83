"""FlexAttention's mask and pass on a CPU, where it has no backward: for gradients another kernel takes its place."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, GraniteConfig, GraniteForCausalLM

from polar_train import branches, flex
from polar_train.forest import Layout, lay_out
from polar_train.model import load
from tests.train.test_branches import LIMIT, ancestors, branching, by_forest, by_trajectory, error
from tests.train.test_forest import chain

CPU = torch.device("cpu")


def by_mask(query, key, value, *, block_mask, enable_gqa):
    """Plain attention under the dense form of the same mask."""
    length = query.shape[2]
    seen = create_mask(block_mask.mask_mod, 1, 1, length, length, device="cpu")
    return scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=enable_gqa)


AttentionInterface.register("by_mask", flex.attention(by_mask))
AttentionInterface.register("uncompiled", flex.attention(flex_attention))


@pytest.fixture
def model(tiny_model):
    return load(tiny_model, CPU)


def forests():
    """A branching one; one of many trees and of more than a block; one of a single token more than a block."""
    rows = branching(300, prompt=170)[:4]
    yield from lay_out(rows, Layout.TREE, 10_000)
    yield from lay_out(rows, Layout.PER_REQUEST, 10_000)
    yield from lay_out([chain([1] * 129, [0] * 128 + [1], "t")], Layout.TREE, 10_000)


@pytest.mark.parametrize("forest", list(forests()), ids=["tree", "per_request", "129 tokens"])
def test_the_blocks_are_those_of_the_dense_mask(forest):
    """Which blocks are seen, and which as a whole, as FlexAttention finds them in the mask of tokens by tokens."""
    mask = flex.block_mask(forest, CPU)
    length = mask.shape[-1]
    true = create_block_mask(mask.mask_mod, 1, 1, length, length, device="cpu")
    assert length % 128 == 0
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(mask, name), getattr(true, name)), name


def test_a_token_sees_its_ancestors_and_what_fills_a_block_only_itself():
    """The mask of the oracle, and beyond the forest roots of one token."""
    forest = next(forests())
    mask = flex.block_mask(forest, CPU)
    length, tokens = mask.shape[-1], len(forest)
    seen = create_mask(mask.mask_mod, 1, 1, length, length, device="cpu")[0, 0]
    assert torch.equal(seen[:tokens, :tokens], ancestors(forest)[0, 0] == 0)
    assert torch.equal(seen[tokens:], torch.eye(length, dtype=torch.bool)[tokens:])


@pytest.mark.parametrize("layout", Layout)
def test_every_layout_has_the_gradient_of_plain_passes(model, layout):
    """The same pass with plain attention for a kernel."""
    rows = branching(300, prompt=120)[:3]
    got = by_forest(model, rows, layout, run=flex.backward, attention="by_mask")
    assert error(got, by_trajectory(model, rows)) < LIMIT


def test_parts_of_the_vocabulary_projection_and_recomputed_activations_change_no_gradient(model, monkeypatch):
    """Seven tokens of logits at once, and no memory for activations."""
    monkeypatch.setattr(flex, "LOGITS", 7 * 320)
    monkeypatch.setattr(flex, "KEPT_SHARE", 0.0)
    model.train()
    rows = branching(300)[:4]
    got = by_forest(model, rows, Layout.TREE, run=flex.backward, attention="by_mask")
    assert error(got, by_trajectory(model, rows)) < LIMIT
    assert not model.is_activation_checkpointing


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # which a CPU takes half a minute for
def test_flex_attention_gives_the_logprobs_of_branches(model):
    """The real kernel's forward, uncompiled, in a model with grouped queries."""
    forest = next(forests())
    here_T = flex.logprobs(model, forest, attention="uncompiled")
    assert torch.allclose(here_T, branches.logprobs(model, forest), atol=1e-4)


def test_the_model_is_left_as_it_was(model):
    """Its attention is put back, also after an error."""
    before = model.config._attn_implementation
    with pytest.raises(ZeroDivisionError):
        flex.backward(model, next(forests()), lambda *_: 1 / 0, attention="by_mask")
    assert model.config._attn_implementation == before


def test_tokens_without_an_advantage_are_only_counted(model):
    """As in `branches`: the loss is told their logprobs without gradient."""
    forest = next(forests())
    forest.advantages_T[:] = 0
    told = []
    flex.backward(model, forest, lambda lp, _e, at: (told.append((lp, at)), lp.sum())[1], attention="by_mask")
    assert sum(len(at) for _, at in told) == forest.loss_mask_T.sum()
    assert not any(lp.requires_grad for lp, _ in told)
    assert all(p.grad is None for p in model.parameters())


def test_a_probe_tells_a_model_that_scales_its_logits(model):
    """Granite divides them behind the vocabulary projection, which this way would leave out."""
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, logits_scaling=8.0, initializer_range=0.15,
    )  # fmt: skip
    limit = flex.PROBE_TOLERANCE[torch.float32]
    assert flex.probe(model, attention="by_mask") < limit
    assert flex.probe(GraniteForCausalLM(config), attention="by_mask") > limit


def test_a_probe_tells_a_mask_that_is_not_heeded(model):
    """Negative control: attention to all tokens before, of whatever branch."""
    causal = flex.attention(
        lambda q, k, v, *, block_mask, enable_gqa: scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=enable_gqa
        )
    )
    AttentionInterface.register("causal", causal)
    assert flex.probe(model, attention="causal") > 100 * flex.PROBE_TOLERANCE[torch.float32]


def test_the_probe_is_a_forest():
    """Parents before children, depths that count up, ends that nest: the ends are those of the parents."""
    forest = flex._probe_forest(300)
    parent_T, here = forest.parent_T, np.arange(len(forest))
    below = here[parent_T >= 0]
    assert (parent_T < here).all()
    assert (forest.position_T[below] == forest.position_T[parent_T[below]] + 1).all()
    assert (forest.end_T[below] <= forest.end_T[parent_T[below]]).all()
    for token in here:
        path = {token}
        below_it = [later for later in range(token + 1, len(forest)) if parent_T[later] in path and not path.add(later)]
        assert forest.end_T[token] == token + 1 + len(below_it)


def test_a_cpu_takes_the_other_way(model):
    """There is no backward pass of FlexAttention there."""
    assert not flex.applies(model)


def test_a_scale_of_its_own_reaches_the_kernel():
    """A model may scale its queries otherwise than the kernel does."""
    mask = flex.block_mask(next(forests()), CPU)
    query, key, value = (torch.randn(1, 2, mask.shape[-1], 16) for _ in range(3))
    got, _ = flex.attention(by_mask)(torch.nn.Module(), query, key, value, mask, scaling=0.5)
    seen = create_mask(mask.mask_mod, 1, 1, mask.shape[-1], mask.shape[-1], device="cpu")
    plain = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.5)
    assert torch.allclose(got, plain.transpose(1, 2), atol=1e-5)
