"""The gradient of a forest in one pass, for CUDA: FlexAttention skips the blocks of keys that a block does not see.

Invariant: token q attends to token k where k <= q < end[k], which is every token before it on its path and no other;
positions are depths. So the result is that of `branches`, up to rounding, with each token computed once and without
cutting. All layouts go through it alike: what is not merged is a tree of its own.
FlexAttention has no backward pass on a CPU: there `branches` is the way, and here only the mask and the rest of the
pass are tested, with another kernel in its place. It knows no loss.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, PreTrainedModel

from polar_train import branches
from polar_train.branches import LossOf
from polar_train.forest import Forest, Index_T
from polar_train.model import packs, score

BLOCK = 128
"""Tokens of a block, in both directions; a forest is filled up to a whole number of them."""
LOGITS = 2**28
"""Logits that are held at once, 1 GiB of them: with a vocabulary of 150,000, of 1,789 tokens."""
KEPT_SHARE = 0.5
"""Of the memory that is free: where activations would take more, they are computed again on the way back."""
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest mean difference a token, in nats, between this and `branches` on a probe."""

NAME = "polar_forest"
"""Of the attention, among those of transformers."""

Kernel = Callable[..., Tensor]
"""(query, key, value [1, heads, T, size], block_mask=, enable_gqa=) -> [1, heads, T, size], as `flex_attention`."""


def applies(model: PreTrainedModel) -> bool:
    """Whether this way is open to a model: on CUDA, with full attention, and a probe gives the right logprobs.

    Where the probe does not, a warning says so, once for each model, and `branches` is to be taken.
    """
    if model.device.type != "cuda" or not packs(model.config):
        return False
    if model not in _probed:
        gap, limit = probe(model), PROBE_TOLERANCE[model.dtype]
        _probed[model] = gap <= limit
        if gap > limit:
            warnings.warn(
                f"FlexAttention gives {type(model).__name__} logprobs that are {gap:.3g} off on average, more than "
                f"{limit}: forests are computed node by node instead, which is slower",
                stacklevel=2,
            )
    return _probed[model]


_probed: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def backward(model: PreTrainedModel, forest: Forest, loss_of: LossOf, *, attention: str = NAME) -> None:
    """Add the gradient of the sum of `loss_of` over all tokens that bear loss to the model's; see `branches.backward`.

    `loss_of` is called once for as many tokens as `LOGITS` allows, without grad where none has an advantage.
    """
    learns = bool((forest.loss_mask_T & (forest.advantages_T * forest.loss_weight_T != 0)).any())
    _pass(model, forest, loss_of, attention=attention, learns=learns)


def logprobs(model: PreTrainedModel, forest: Forest, *, attention: str = NAME) -> Tensor:
    """Logprobs [T] float32 of the tokens that bear loss, 0 elsewhere; no gradient is made."""
    found_T = torch.zeros(len(forest), device=model.device)

    def note(logprobs_L: Tensor, _entropies_L: Tensor, at_L: Tensor) -> Tensor:
        found_T[at_L] = logprobs_L
        return logprobs_L.sum()

    _pass(model, forest, note, attention=attention, learns=False)
    return found_T


def probe(model: PreTrainedModel, *, attention: str = NAME) -> float:
    """Mean |difference| a token between the logprobs of this way and of `branches`, on a forest that branches twice.

    It shows an attention that the model does not hand over, or changes (sinks, soft caps), logits that are changed
    behind the vocabulary projection, and a kernel that is wrong; not a wrong gradient.
    """
    forest = _probe_forest(model.config.get_text_config().vocab_size)
    here_T, there_T = logprobs(model, forest, attention=attention), branches.logprobs(model, forest)
    return (here_T - there_T)[torch.from_numpy(forest.loss_mask_T).to(model.device)].abs().mean().item()


def block_mask(forest: Forest, device: torch.device) -> BlockMask:
    """Which tokens of a forest attend to which, by blocks, for the forest filled up with roots of one token.

    A block of queries sees a block of keys before it where one of these keys still holds at the first query, and sees
    all of it where all of them hold at the last one. So no matrix of tokens by tokens is ever made.
    """
    end_T = torch.from_numpy(_filled(forest.end_T, np.arange(1, _whole(len(forest)) + 1))).to(device)
    ends = end_T.view(-1, BLOCK)
    here = torch.arange(len(ends), device=device)
    before = here[:, None] > here
    full = before & (ends.amin(1) >= (here[:, None] + 1) * BLOCK)
    partial = (before & (ends.amax(1) > here[:, None] * BLOCK) & ~full) | (here[:, None] == here)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_T[key])

    tokens = len(end_T)
    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(tokens, tokens)
    )


def attention(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """A kernel as an attention of transformers, which finds a `BlockMask` in the place of its mask."""

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: BlockMask,
        *,
        scaling: float,
        dropout: float = 0.0,
        **_others: object,  # what else a model says of its attention; the probe shows whether it matters
    ) -> tuple[Tensor, None]:
        assert dropout == 0, "models with dropout are refused when they are loaded"
        groups = query.shape[1] != key.shape[1]
        usual = query.shape[-1] ** -0.5  # of the kernel; left to it, so that it is compiled for no number
        scaled = query if abs(scaling / usual - 1) < 1e-6 else query * (scaling / usual)
        out = kernel(scaled, key, value, block_mask=attention_mask, enable_gqa=groups)
        return out.transpose(1, 2).contiguous(), None

    return attend


@functools.cache
def _compiled() -> Kernel:
    # dynamic: a forest has any length, and without it each new one is compiled for anew; fullgraph: when compiled
    # too often, rather an error than the uncompiled operator, which makes a matrix of tokens by tokens
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _fused(query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
    return _compiled()(query, key, value, block_mask=block_mask, enable_gqa=enable_gqa)


AttentionInterface.register(NAME, attention(_fused))


# --- the pass -----------------------------------------------------------------------------------------------------


def _pass(model: PreTrainedModel, forest: Forest, loss_of: LossOf, *, attention: str, learns: bool) -> None:
    """Forward to the last states, the vocabulary projection and the loss part by part, then back through all."""
    tokens = _Tokens.of(forest, model.device)
    if not len(tokens.at_L):
        return
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model projects onto its vocabulary"
    keeps = not learns or _activations(model, len(tokens.ids_T)) < KEPT_SHARE * _free(model.device)
    with _set_up(model, attention, recomputes=not keeps), torch.set_grad_enabled(learns):
        states_L = _states(model, forest, tokens)
        leaves = [states_P.detach().requires_grad_(learns) for states_P in states_L.split(_at_once(model))]
        for leaf_P, at_P in zip(leaves, tokens.at_L.split(_at_once(model)), strict=True):
            loss = loss_of(*score(head(leaf_P), tokens.ids_T[at_P], tokens.temperature_T[at_P]), at_P)
            if learns:
                loss.backward()
        if learns:
            states_L.backward(torch.cat([leaf_P.grad for leaf_P in leaves if leaf_P.grad is not None]))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Of a forest that is filled up to T tokens, L of them with loss."""

    ids_T: Tensor
    positions_T: Tensor
    temperature_T: Tensor
    at_L: Tensor
    """Indices of the tokens with loss."""
    before_L: Tensor
    """Indices of the tokens that predict them."""

    @classmethod
    def of(cls, forest: Forest, device: torch.device) -> _Tokens:
        at_L = np.flatnonzero(forest.loss_mask_T)
        zeros_T = np.zeros(_whole(len(forest)), np.int64)
        columns = (
            _filled(forest.input_ids_T, zeros_T),
            _filled(forest.position_T, zeros_T),
            forest.temperature_T,
            at_L,
            forest.parent_T[at_L].astype(np.int64),
        )
        return cls(*(torch.from_numpy(column).to(device) for column in columns))


def _states(model: PreTrainedModel, forest: Forest, tokens: _Tokens) -> Tensor:
    """The last states [L, size] of the tokens that predict those with loss."""
    states_T: Tensor = model.base_model(
        input_ids=tokens.ids_T[None],
        position_ids=tokens.positions_T[None],
        attention_mask=block_mask(forest, model.device),
        use_cache=False,
    ).last_hidden_state[0]
    return states_T[tokens.before_L]


def _at_once(model: PreTrainedModel) -> int:
    return max(LOGITS // model.config.get_text_config().vocab_size, 1)


@contextmanager
def _set_up(model: PreTrainedModel, attention: str, *, recomputes: bool) -> Generator[None]:
    """The model with this attention, also while activations are computed again; as it was afterwards."""
    before: str = model.config._attn_implementation or "sdpa"  # pyright: ignore[reportPrivateUsage]  (no public name)
    recomputed = model.is_activation_checkpointing
    model.set_attn_implementation(attention)
    if recomputes and not recomputed:
        model.activation_checkpointing_enable()
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        if recomputes and not recomputed:
            model.activation_checkpointing_disable()


def _activations(model: PreTrainedModel, tokens: int) -> float:
    """Bytes that a pass keeps for the way back, roughly: those of a Llama's layers without fused kernels."""
    config = model.config.get_text_config()
    a_token = 30 * config.hidden_size + 4 * config.intermediate_size
    return tokens * config.num_hidden_layers * a_token * model.dtype.itemsize


def _free(device: torch.device) -> float:
    """Bytes of a GPU that can still be taken, those that torch holds unused included."""
    if device.type != "cuda":
        return float("inf")
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


# --- the mask -----------------------------------------------------------------------------------------------------


def _whole(tokens: int) -> int:
    """Tokens of a forest that is filled up: two blocks at least, since torch compiles anew for dimensions of 1."""
    return max(-(-tokens // BLOCK), 2) * BLOCK


def _filled(column_T: np.ndarray, filling: Index_T) -> Index_T:
    """A column with the end of `filling` behind it."""
    return np.concatenate([column_T.astype(np.int64), filling[len(column_T) :]])


def _listed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries, how many blocks of keys it sees, and their indices in front of the others."""
    counts = seen.sum(1, dtype=torch.int32)
    order = seen.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], order[None, None]


def _probe_forest(vocabulary: int) -> Forest:
    """A beginning of 150 tokens, two branches of 100, and two of 60 behind the first; all but the roots bear loss."""
    parts = ((150, -1, 470), (100, 149, 370), (60, 249, 310), (60, 249, 370), (100, 149, 470))
    begins = np.cumsum([0, *(count for count, _, _ in parts)])
    parent_T = np.concatenate(
        [np.arange(a - 1, a - 1 + count) for a, (count, _, _) in zip(begins, parts, strict=False)]
    )
    parent_T[begins[:-1]] = [parent for _, parent, _ in parts]
    position_T = np.zeros(len(parent_T), np.int32)
    for token in range(1, len(parent_T)):
        position_T[token] = position_T[parent_T[token]] + 1
    ones_T = np.ones(len(parent_T), np.float32)
    return Forest(
        input_ids_T=np.random.default_rng(0).integers(0, vocabulary, len(parent_T), dtype=np.int32),
        parent_T=parent_T.astype(np.int32),
        position_T=position_T,
        end_T=np.repeat([end for _, _, end in parts], [count for count, _, _ in parts]).astype(np.int32),
        loss_mask_T=parent_T >= 0,
        old_logprobs_T=-ones_T,
        advantages_T=ones_T,
        temperature_T=ones_T,
        loss_weight_T=ones_T / np.float32(len(parent_T)),
    )
