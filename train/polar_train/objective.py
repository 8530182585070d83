"""The GRPO objective: a clipped ratio against the logprobs of the policy that sampled. Pure, shapes in the names.

Invariant: the loss is a plain weighted sum over tokens. Weights come normalised over the whole batch, so cutting a
batch into rows, or a row into trajectories, changes no gradient. Nothing here divides by a count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of some loss tokens; sums, so that pieces of a batch can be added up."""

    tokens: int = 0
    """Tokens that bear loss."""
    loss: float = 0.0
    """Sum of weight * token loss."""
    clipped: int = 0
    """Tokens whose gradient the clip removed."""
    gap_sum: float = 0.0
    """Sum of |logprob(train) - logprob(engine)|."""
    gap_max: float = 0.0
    """Largest of these."""

    @property
    def gap_mean(self) -> float:
        """Mean |logprob(train) - logprob(engine)| a token; 0 without tokens."""
        return self.gap_sum / max(self.tokens, 1)

    @property
    def clip_share(self) -> float:
        """Share of the tokens whose gradient the clip removed; 0 without tokens."""
        return self.clipped / max(self.tokens, 1)


def grpo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """Clipped policy-gradient loss of T tokens, all arguments float32 [T]: a scalar with gradient, and its figures.

    ratio = exp(logprobs - old_logprobs) against the *sampling* logprobs, clipped to [1 - clip_low, 1 + clip_high];
    token loss = -min(ratio * A, clipped * A); loss = sum(weight * token loss).
    """
    ratio_T = (logprobs_T - old_logprobs_T).exp()
    free_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    loss = -(weights_T * torch.minimum(free_T, clipped_T)).sum()
    return loss, _metrics(loss, (logprobs_T - old_logprobs_T).detach(), clipped_T.detach() < free_T.detach())


def total(parts: Iterable[Metrics]) -> Metrics:
    """Metrics of a batch from those of its pieces."""
    listed = list(parts)
    return Metrics(
        tokens=sum(part.tokens for part in listed),
        loss=sum(part.loss for part in listed),
        clipped=sum(part.clipped for part in listed),
        gap_sum=sum(part.gap_sum for part in listed),
        gap_max=max((part.gap_max for part in listed), default=0.0),
    )


def _metrics(loss: Tensor, difference_T: Tensor, clipped_T: Tensor) -> Metrics:
    gap_T = difference_T.abs()
    return Metrics(
        tokens=gap_T.numel(),
        loss=loss.item(),
        clipped=int(clipped_T.sum().item()),
        gap_sum=gap_T.sum(dtype=torch.float64).item(),
        gap_max=gap_T.max().item() if gap_T.numel() else 0.0,
    )
