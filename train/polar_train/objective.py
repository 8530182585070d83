"""The GRPO objective: a clipped ratio against the policy that sampled. Pure, shapes in the names.

Invariant: the loss is a plain weighted sum over tokens. Weights come normalised over the whole batch, so cutting a
batch into rows, or a row into trajectories, changes no gradient. Nothing here divides by a count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Objective:
    """What is optimised."""

    clip_low: float = 0.2
    """The ratio is clipped below at 1 - this,"""
    clip_high: float = 0.28
    """and above at 1 + this (DAPO's asymmetric clip)."""
    importance_cap: float | None = None
    """None: the ratio is against the logprobs at sampling. Else it is against the trainer's own logprobs before the
    first update (the proximal policy), and each token's loss weighs min(proximal / sampling, this): truncated
    importance sampling for the gap between engine and trainer, and for older weights."""
    kl: float = 0.0
    """Weight of the k3 estimate of KL(policy || reference)."""


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
    ratio_sum: float = 0.0
    """Sum of the ratios."""
    kl_sum: float = 0.0
    """Sum of the k3 estimates; 0 without a reference."""
    entropy_sum: float = 0.0
    """Sum of the entropies of the tokens' distributions, in nats."""

    @property
    def gap_mean(self) -> float:
        """Mean |logprob(train) - logprob(engine)| a token; 0 without tokens."""
        return self.gap_sum / max(self.tokens, 1)

    @property
    def clip_share(self) -> float:
        """Share of the tokens whose gradient the clip removed; 0 without tokens."""
        return self.clipped / max(self.tokens, 1)

    @property
    def ratio_mean(self) -> float:
        """Mean ratio a token."""
        return self.ratio_sum / max(self.tokens, 1)

    @property
    def kl_mean(self) -> float:
        """Mean k3 estimate a token."""
        return self.kl_sum / max(self.tokens, 1)

    @property
    def entropy_mean(self) -> float:
        """Mean entropy a token, in nats."""
        return self.entropy_sum / max(self.tokens, 1)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What T tokens bring to the loss, all float32 [T]."""

    logprobs_T: Tensor
    """Of the policy that is trained; with gradient."""
    sampled_T: Tensor
    """At sampling time, by the engine."""
    advantages_T: Tensor
    weights_T: Tensor
    proximal_T: Tensor | None = None
    """By the trainer before the first update; None in that update itself, where they are `logprobs_T`."""
    reference_T: Tensor | None = None
    """By the reference model."""
    entropies_T: Tensor | None = None


def grpo_loss(tokens: Tokens, objective: Objective) -> tuple[Tensor, Metrics]:
    """Clipped policy-gradient loss: a scalar with gradient, and its figures.

    ratio = exp(logprobs - old), old the sampling logprobs, or with an importance cap the proximal ones; clipped to
    [1 - clip_low, 1 + clip_high]; token loss = -importance * min(ratio * A, clipped * A) + kl * k3;
    loss = sum(weight * token loss). k3 = exp(reference - logprobs) - (reference - logprobs) - 1 (Schulman's estimator).
    """
    old_T, importance_T = _old(tokens, objective)
    ratio_T = (tokens.logprobs_T - old_T).exp()
    free_T = ratio_T * tokens.advantages_T
    clipped_T = ratio_T.clamp(1 - objective.clip_low, 1 + objective.clip_high) * tokens.advantages_T
    k3_T = _k3(tokens)
    held_T = (
        clipped_T < free_T
    )  # not torch.minimum: on a tie, as at ratio 1 under a clip of 0, that halves the gradient
    token_T = -importance_T * torch.where(held_T, clipped_T, free_T) + objective.kl * k3_T
    loss = (tokens.weights_T * token_T).sum()
    return loss, _metrics(tokens, loss, ratio_T.detach(), held_T, k3_T.detach())


def total(parts: Iterable[Metrics]) -> Metrics:
    """Metrics of a batch from those of its pieces."""
    listed = list(parts)
    sums: dict[str, Any] = {f.name: sum(getattr(part, f.name) for part in listed) for f in fields(Metrics)}  # Any: sums
    return replace(Metrics(**sums), gap_max=max((part.gap_max for part in listed), default=0.0))


def _old(tokens: Tokens, objective: Objective) -> tuple[Tensor, Tensor]:
    """What the ratio is against, and the importance of each token."""
    if objective.importance_cap is None:
        return tokens.sampled_T, torch.ones_like(tokens.sampled_T)
    proximal_T = tokens.logprobs_T.detach() if tokens.proximal_T is None else tokens.proximal_T
    return proximal_T, (proximal_T - tokens.sampled_T).exp().clamp(max=objective.importance_cap)


def _k3(tokens: Tokens) -> Tensor:
    if tokens.reference_T is None:
        return torch.zeros_like(tokens.sampled_T)
    ahead_T = tokens.reference_T - tokens.logprobs_T
    return ahead_T.exp() - ahead_T - 1


def _metrics(tokens: Tokens, loss: Tensor, ratio_T: Tensor, clipped_T: Tensor, k3_T: Tensor) -> Metrics:
    gap_T = (tokens.logprobs_T - tokens.sampled_T).detach().abs()

    def added(values_T: Tensor) -> float:
        return values_T.sum(dtype=torch.float64).item()

    return Metrics(
        tokens=gap_T.numel(),
        loss=loss.item(),
        clipped=int(clipped_T.sum().item()),
        gap_sum=added(gap_T),
        gap_max=gap_T.max().item() if gap_T.numel() else 0.0,
        ratio_sum=added(ratio_T),
        kl_sum=added(k3_T),
        entropy_sum=added(tokens.entropies_T) if tokens.entropies_T is not None else 0.0,
    )
