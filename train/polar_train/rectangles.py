"""Exact attention of tokens that hang below others, on a CPU and without a mask: all of the past, then one another.

Invariant: the outcome is that of plain attention under the mask of `branches`, and so is its gradient. Tokens of which
each sees the whole past make one dense rectangle, in which the heads of a group share their keys; what they see of each
other is a causal square, one for each of the pieces that do not see each other. The two are merged by the log of their
summed exponentials, and gone back through with the merged one, as in ring attention. Nothing is computed that a mask
would only hide, and no mask lies in memory.

It calls the operator behind `scaled_dot_product_attention` on a CPU, which alone gives that log away and is private to
PyTorch; wherever it cannot be had, or a layer wants more than plain attention, the public function does it with a mask.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from polar_train.model import packs

NAME = "polar_rectangles"
"""Under which transformers knows it. A name without a mask function: none is built for it."""
_kernel: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_kernel_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
"""Any: operators are not typed; None where this PyTorch has none of the name."""
_EXTRAS = ("softcap", "s_aux", "position_bias")
"""Of a layer's arguments: what changes the scores, and is left to the public function."""


@contextmanager
def attending(model: PreTrainedModel) -> Generator[bool]:
    """While inside, the model attends so and needs no mask; the value says whether it does.

    It does not when it lies on a GPU, uses another attention than PyTorch's, or has layers that do not see all.
    """
    before = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]  (has no public name)
    if before != "sdpa" or model.device.type != "cpu" or not packs(model.config):
        yield False
        return
    model.set_attn_implementation(NAME)
    try:
        yield True
    finally:
        model.set_attn_implementation(before)


def mask_of(past: int, pieces: Sequence[int], like: Tensor) -> Tensor:
    """Additive [1, 1, own, past + own]: all of the past, and causal inside each of the pieces, of so many tokens."""
    own = sum(pieces)
    mask = torch.full((own, past + own), float("-inf"), dtype=like.dtype, device=like.device)
    mask[:, :past] = 0
    for a, b in _spans(pieces):
        mask[a:b, past + a : past + b].triu_(1)
    return mask[None, None]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    pieces: tuple[int, ...] | None = None,
    **asked: Any,  # Any: what transformers gives to every attention
) -> tuple[Tensor, None]:
    """A layer's attention as transformers calls it: query [1, H, own, D], key and value [1, K, past + own, D].

    `pieces`: tokens of each of the pieces of `own` that do not see each other; one piece unless given.
    """
    own, past = query.shape[2], key.shape[2] - query.shape[2]
    cut = pieces or (own,)
    wanted = attention_mask is None and (past > 0 or len(cut) > 1)
    if wanted and _plain(query, value, asked):
        out: Tensor = _Rectangles.apply(query, key, value, scaling, cut)  # pyright: ignore[reportUnknownMemberType]
        return out.transpose(1, 2).contiguous(), None
    mask = mask_of(past, cut, query) if wanted else attention_mask
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **asked)


def _plain(query: Tensor, value: Tensor, asked: dict[str, Any]) -> bool:
    had = _kernel is not None and _kernel_backward is not None
    return had and query.shape[-1] == value.shape[-1] and all(asked.get(name) is None for name in _EXTRAS)


AttentionInterface.register(NAME, attend)


class _Rectangles(torch.autograd.Function):
    """(query [1, H, own, D], key and value [1, K, past + own, D], scale, pieces) -> [1, H, own, D]."""

    @staticmethod
    def forward(
        ctx: Any,  # Any: autograd's
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        pieces: tuple[int, ...],
    ) -> Tensor:
        past, groups = key.shape[2] - query.shape[2], query.shape[1] // key.shape[1]
        own = _own(key, value, past, groups)
        squares = [_kernel(*_rows(a, b, query, *own), 0.0, True, scale=scale) for a, b in _spans(pieces)]
        out, log = (torch.cat(parts, 2) for parts in zip(*(square[:2] for square in squares), strict=True))
        if past:
            dense, dense_log = _kernel(
                _folded(query, groups), key[:, :, :past], value[:, :, :past], 0.0, False, scale=scale
            )
            dense_log, own_log = dense_log.reshape(log.shape), log
            log = torch.logaddexp(dense_log, own_log)
            out = _share(dense_log, log, query) * dense.reshape(query.shape) + _share(own_log, log, query) * out
        ctx.save_for_backward(query, key, value, out, log)
        ctx.scale, ctx.pieces = scale, pieces
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # Any: autograd's
        (gradient,) = gradients
        query, key, value, out, log = ctx.saved_tensors
        past, groups = key.shape[2] - query.shape[2], query.shape[1] // key.shape[1]
        own = _own(key, value, past, groups)
        squares = [
            _kernel_backward(
                *_rows(a, b, gradient, query, *own, out), _laid(log[:, :, a:b]), 0.0, True, scale=ctx.scale
            )
            for a, b in _spans(ctx.pieces)
        ]
        to_query, to_key, to_value = (torch.cat(parts, 2) for parts in zip(*squares, strict=True))
        to_key, to_value = (t.unflatten(1, (-1, groups)).sum(2) for t in (to_key, to_value))
        if not past:
            return to_query, to_key, to_value, None, None
        of_gradient, of_query, of_out, of_log = (_folded(t, groups) for t in (gradient, query, out, log[..., None]))
        more_to_query, to_past_key, to_past_value = _kernel_backward(
            of_gradient, of_query, key[:, :, :past], value[:, :, :past], of_out, _laid(of_log[..., 0]), 0.0, False,
            scale=ctx.scale,
        )  # fmt: skip
        return (
            to_query + more_to_query.reshape(query.shape),
            torch.cat([to_past_key, to_key], 2),
            torch.cat([to_past_value, to_value], 2),
            None,
            None,
        )


def _spans(pieces: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(pieces, initial=0)))


def _rows(a: int, b: int, *tensors: Tensor) -> list[Tensor]:
    return [tensor[:, :, a:b] for tensor in tensors]


def _own(key: Tensor, value: Tensor, past: int, groups: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens themselves, one for each head of the query."""
    return key[:, :, past:].repeat_interleave(groups, 1), value[:, :, past:].repeat_interleave(groups, 1)


def _folded(heads: Tensor, groups: int) -> Tensor:
    """[1, H, own, D] -> [1, K, groups * own, D]: heads that share their keys are more queries of one head."""
    return heads.reshape(1, -1, groups * heads.shape[2], heads.shape[3])


def _share(part: Tensor, whole: Tensor, like: Tensor) -> Tensor:
    return (part - whole).exp()[..., None].to(like.dtype)


def _laid(log: Tensor) -> Tensor:
    """[1, H, own] laid out as the operator itself does it: the heads innermost."""
    return log.transpose(1, 2).contiguous().transpose(1, 2)
