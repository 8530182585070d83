"""Keys and values of token sequences, the model's forward over several sequences at once, and the prefix cache.

Invariant: a `SequenceKV` of length n holds the keys and values of its first n tokens and of no others. The sequences
of one forward lie behind each other in one row without padding and see only themselves, so who shares a step changes
no result beyond float32 rounding.
Not here: what a request is (scheduler.py). Only full causal attention is known; other attention is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel

Ids = NDArray[np.int32]
"""Token ids [T]."""
_LOADING = Lock()
"""transformers replaces functions of torch while it loads: two models at once lose track of tied weights."""
ATTENTION = "polar_ragged"
"""The name under which transformers knows `_ragged_attention`."""


class SequenceKV:
    """Keys and values [heads, capacity, head size] of each layer, and the ids [T] they stand for."""

    __slots__ = ("_layers", "capacity", "ids")

    def __init__(self, capacity: int) -> None:
        self.ids: Ids = np.empty(0, np.int32)
        self.capacity = capacity
        self._layers: list[tuple[Tensor, Tensor]] = []

    def __len__(self) -> int:
        return self.ids.shape[0]

    def prefix(self, length: int, capacity: int) -> SequenceKV:
        """A copy of the first `length` tokens, with room for `capacity`."""
        copy = SequenceKV(max(capacity, length))
        copy.ids = self.ids[:length]
        copy._layers = [
            (_grown(keys, length, copy.capacity), _grown(values, length, copy.capacity))
            for keys, values in self._layers
        ]
        return copy

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens."""
        if length <= self.capacity:
            return
        self.capacity = max(length, self.capacity * 3 // 2)
        self._layers = [
            (_grown(keys, len(self), self.capacity), _grown(values, len(self), self.capacity))
            for keys, values in self._layers
        ]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put [heads, new, size] behind the known tokens of a layer; that layer's keys and values so far."""
        start, stop = len(self), len(self) + keys.shape[1]
        if layer == len(self._layers):  # the first forward of this sequence meets the layers in order
            self._layers.append(
                (_empty(keys, self.capacity), _empty(values, self.capacity)),
            )
        all_keys, all_values = self._layers[layer]
        all_keys[:, start:stop] = keys
        all_values[:, start:stop] = values
        return all_keys[:, :stop], all_values[:, :stop]

    def commit(self, ids: Ids) -> None:
        """The tokens just written by every layer are `ids`."""
        self.ids = np.concatenate([self.ids, ids])


def _empty(like: Tensor, capacity: int) -> Tensor:
    return like.new_empty(like.shape[0], capacity, like.shape[2])


def _grown(old: Tensor, length: int, capacity: int) -> Tensor:
    new = _empty(old, capacity)
    new[:, :length] = old[:, :length]
    return new


def shared_prefix(left: Ids, right: Ids) -> int:
    """The number of leading ids that two sequences have in common."""
    size = min(left.shape[0], right.shape[0])
    different = left[:size] != right[:size]
    return int(different.argmax()) if different.any() else size


class PrefixCache:
    """Finished sequences, the least recently used forgotten first; `limit` bounds their tokens."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[SequenceKV] = []

    def add(self, kv: SequenceKV) -> None:
        """Keep a sequence that nobody writes to any more; what it contains whole is forgotten."""
        self._kept = [old for old in self._kept if shared_prefix(old.ids, kv.ids) < len(old)]
        self._kept.append(kv)
        while self._kept and sum(old.capacity for old in self._kept) > self._limit:
            self._kept.pop(0)

    def longest(self, ids: Ids, running: Iterable[SequenceKV]) -> tuple[SequenceKV | None, int]:
        """The kept or running sequence that shares most leading tokens with `ids`, and how many."""
        best, length = None, 0
        for kv in (*self._kept, *running):
            if (shared := shared_prefix(kv.ids, ids)) > length:
                best, length = kv, shared
        for index, kv in enumerate(self._kept):
            if kv is best:
                self._kept.append(self._kept.pop(index))
                break
        return best, length

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        self._kept.clear()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one sequence contributes to a forward."""

    kv: SequenceKV
    ids: Ids
    """The tokens that follow `kv`."""
    wanted: int
    """How many of the last tokens need logits."""


def load_model(folder: Path) -> PreTrainedModel:
    """A causal language model in float32 on the CPU, ready for `forward`.

    Raises OSError or ValueError when the folder holds no complete model or one with attention other than causal.
    """
    try:
        with _LOADING:
            loaded: Any = AutoModelForCausalLM.from_pretrained(  # Any: transformers types the pair as a model
                folder, dtype=torch.float32, attn_implementation=ATTENTION, output_loading_info=True,
                local_files_only=True,
            )  # fmt: skip
    except (SafetensorError, RuntimeError) as error:  # a truncated file, or tensors of other shapes
        raise ValueError(f"the weights in {str(folder)!r} cannot be read: {error}") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{str(folder)!r} lacks the weights {missing[:3]!r} and perhaps more")
    model = cast(PreTrainedModel, model.eval())
    for parameter in model.parameters():  # out of the mapped file: memory in huge pages is read twice as fast (9.5 and
        parameter.data = parameter.data.clone()  # 4.6 tokens/s of SmolLM2-135M on a 2-core virtual machine)
    forward(model, [Piece(SequenceKV(2), np.zeros(2, np.int32), 1)])  # refuse unknown attention now, not later
    return model


@torch.inference_mode()
def forward(model: PreTrainedModel, pieces: Sequence[Piece]) -> list[Tensor]:
    """Run the model over all pieces and extend their `kv`; logits [wanted, V] of each piece."""
    positions = [np.arange(len(piece.kv), len(piece.kv) + len(piece.ids)) for piece in pieces]
    ends = np.cumsum([len(piece.ids) for piece in pieces])
    kept = [np.arange(end - piece.wanted, end) for end, piece in zip(ends, pieces, strict=True)]
    for piece in pieces:
        piece.kv.reserve(len(piece.kv) + len(piece.ids))
    answer = model(
        input_ids=torch.from_numpy(np.concatenate([piece.ids for piece in pieces])).long()[None],
        position_ids=torch.from_numpy(np.concatenate(positions))[None],
        logits_to_keep=torch.from_numpy(np.concatenate(kept)),
        use_cache=False,
        polar_pieces=[(piece, _later_tokens_masked(piece)) for piece in pieces],
    )
    for piece in pieces:
        piece.kv.commit(piece.ids)
    return list(answer.logits[0].float().split([piece.wanted for piece in pieces]))


def _later_tokens_masked(piece: Piece) -> Tensor | None:
    """Which key [L] each new token [N] may see; None where it sees all."""
    new, past = len(piece.ids), len(piece.kv)
    return None if new == 1 else torch.ones(new, past + new, dtype=torch.bool).tril(past)


def _ragged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **given: Any
) -> tuple[Tensor, None]:  # Any: whatever the model's code hands to an attention function
    """Attention of each piece to its own sequence; query [1, heads, N, size] -> [1, N, heads, size]."""
    if given.get("sliding_window") is not None or given.get("s_aux") is not None:
        raise ValueError("the embedded engine knows full causal attention only; serve this model with SGLang")
    outputs: list[Tensor] = []
    start = 0
    for piece, mask in given["polar_pieces"]:
        stop = start + len(piece.ids)
        keys, values = piece.kv.write(module.layer_idx, key[0, :, start:stop], value[0, :, start:stop])
        outputs.append(_attend(query[0, :, start:stop], keys, values, mask, given["scaling"]))
        start = stop
    return torch.cat(outputs)[None], None


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[heads, N, size] against [kv heads, L, size] -> [N, heads, size]."""
    heads, _, size = query.shape
    if mask is None:  # one token: the query heads of a group are rows of one small matrix
        grouped = query.reshape(keys.shape[0], -1, size)
        weights = torch.softmax(grouped @ keys.transpose(1, 2) * scale, dim=-1)
        return (weights @ values).reshape(1, heads, -1)
    attended = scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _no_mask(**_given: Any) -> None:  # Any: transformers' mask arguments, none of which is needed
    """The mask of a ragged row is made of its pieces, not by transformers."""


AttentionInterface.register(ATTENTION, _ragged_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)
