"""One GRPO update, read from top to bottom: batches in, a checkpoint and its figures out.

Invariant: the gradient is of the loss over the *whole* batch, whatever the rows and however they are laid out; a
checkpoint is written only after a step whose loss and gradient are finite and whose gradient is not zero.
It does not sample, score or talk to an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from polar_train import passes
from polar_train.branches import LONGEST
from polar_train.data import Row, read_batches, read_tokenizer
from polar_train.errors import BadInput, NothingLearned
from polar_train.forest import Forest, Layout
from polar_train.model import check_tokenizer, load
from polar_train.objective import Metrics, Objective, Tokens, grpo_loss, total
from polar_train.optimizer import BETAS, Optimizer
from polar_train.weights import check_free, save_checkpoint


@dataclass(frozen=True, slots=True)
class Settings:
    """What a step may be told."""

    lr: float = 1e-6
    """Learning rate of AdamW; no weight decay."""
    objective: Objective = field(default_factory=Objective)
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm."""
    steps: int = 1
    """Updates from this batch, each over the whole of it."""
    layout: Layout = Layout.TREE
    """How much is merged before it is computed; the gradient is the same."""
    row_tokens: int = passes.ROW_TOKENS
    """Of one forest: more share more of their beginnings, and take more memory for their data."""
    pass_tokens: int = LONGEST
    """Held with their activations at once: what a longer path has is computed twice, and more takes more memory."""
    beta1: float = BETAS[0]
    """Of AdamW: how much of the mean gradient an update keeps for the next; 0 steps by its own gradient alone."""
    beta2: float = BETAS[1]
    """Of AdamW: how much of the mean squared gradient an update keeps for the next."""

    @property
    def betas(self) -> tuple[float, float]:
        """Both as floats: TOML's `0` is an int, which torch does not take."""
        return float(self.beta1), float(self.beta2)


@dataclass(frozen=True, slots=True)
class Update:
    """Figures of one update, taken before the weights changed."""

    loss: float
    grad_norm: float
    """Before clipping."""
    gap_mean: float
    """Mean |logprob(train) - logprob(engine)| over the trained tokens."""
    gap_max: float
    clip_share: float
    ratio_mean: float
    kl_mean: float
    """Mean k3 estimate of KL(policy || reference) a token; 0 without a reference."""
    entropy_mean: float
    """Of the distributions that the trained tokens were drawn from, in nats."""
    tokens: int
    """Tokens that bear loss."""
    computed: int
    """Tokens that went through the model, those that are computed again not counted again."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run of `train` did; written as train.json into the checkpoint."""

    model: str
    batches: str
    rows: int
    trajectories: int
    versions: list[str]
    """Weight versions that sampled the trained tokens."""
    settings: Settings
    updates: list[Update]

    def as_dict(self) -> dict[str, object]:
        """The fields, nested ones too, as JSON takes them."""
        return asdict(self)


def train(
    batches: Path,
    model_folder: Path,
    out: Path,
    settings: Settings,
    *,
    advance: Callable[[int, int], None],
    reference: Path | None = None,
) -> Report:
    """Updates a model from batch Parquet and writes the checkpoint to `out`.

    `advance(done, planned)` is called after every forward and backward pass. Raises BadInput before anything is
    written, NothingLearned when there is no trained token, no gradient, or a number that is not finite.
    """
    check_free(out)
    check_reference(settings, reference)
    check_tokenizer(read_tokenizer(batches), model_folder, reference)
    rows = read_batches(batches)
    if not any(row.trained for row in rows):
        raise NothingLearned(
            f"no trainable token in {str(batches)!r}: `polar-toolkit stats` lists why each was left out"
        )
    model = load(model_folder)
    kept = load(reference).eval() if reference else None
    check_vocabulary(rows, model, kept)
    updates = update(model, rows, settings, advance=advance, reference=kept)
    report = Report(
        model=model_folder.name,
        batches=batches.name,
        rows=len(rows),
        trajectories=sum(len(row.lengths) for row in rows),
        versions=sorted(frozenset[str]().union(*(row.versions for row in rows))),
        settings=settings,
        updates=updates,
    )
    save_checkpoint(model, model_folder, out, report.as_dict())
    return report


def update(
    model: PreTrainedModel,
    rows: list[Row],
    settings: Settings,
    *,
    advance: Callable[[int, int], None],
    reference: PreTrainedModel | None = None,
    optimizer: Optimizer | None = None,
) -> list[Update]:
    """`settings.steps` updates of the model in place, each over all rows; see `train`.

    `reference` is the model that `settings.objective.kl` keeps the policy near; `optimizer` the one of the batches
    before, a new one if not given.
    """
    forests = passes.grow(rows, model, settings.layout, settings.row_tokens)
    planned = len(forests) * settings.steps
    optimizer = optimizer or Optimizer(model, settings.lr, betas=settings.betas)
    model.train()
    earlier = _earlier(model, reference, forests, settings)
    updates: list[Update] = []
    for step in range(settings.steps):
        parts: list[Metrics] = []
        for index, forest in enumerate(forests):
            parts.append(backward(model, forest, settings, earlier[index]))
            advance(step * len(forests) + index + 1, planned)
        norm = optimizer.clip(settings.max_grad_norm)
        updates.append(_update(total(parts), norm, sum(map(len, forests))))
        optimizer.step()
    return updates


@dataclass(frozen=True, slots=True)
class Earlier:
    """Logprobs [T] of a forest's tokens by other policies than the trained one, where the objective asks for them."""

    proximal_T: Tensor | None = None
    reference_T: Tensor | None = None


def _earlier(
    model: PreTrainedModel, reference: PreTrainedModel | None, forests: list[Forest], settings: Settings
) -> list[Earlier]:
    """In the first update the proximal policy is the trained one itself."""
    proximal = settings.objective.importance_cap is not None and settings.steps > 1
    return [
        Earlier(
            passes.logprobs(model, forest, pass_tokens=settings.pass_tokens) if proximal else None,
            passes.logprobs(reference, forest, pass_tokens=settings.pass_tokens) if reference else None,
        )
        for forest in forests
    ]


def backward(model: PreTrainedModel, forest: Forest, settings: Settings, earlier: Earlier = Earlier()) -> Metrics:
    """Adds the gradient of one forest to the model's, and gives its figures."""
    sampled_T, advantages_T, weights_T = (
        torch.from_numpy(column).to(model.device)
        for column in (forest.old_logprobs_T, forest.advantages_T, forest.loss_weight_T)
    )
    parts: list[Metrics] = []

    def loss_of(logprobs_L: Tensor, entropies_L: Tensor, at_L: Tensor) -> Tensor:
        proximal_L, reference_L = (
            None if column is None else column[at_L] for column in (earlier.proximal_T, earlier.reference_T)
        )
        tokens = Tokens(
            logprobs_L, sampled_T[at_L], advantages_T[at_L], weights_T[at_L], proximal_L, reference_L, entropies_L
        )
        loss, metrics = grpo_loss(tokens, settings.objective)
        parts.append(metrics)
        return loss

    if (
        settings.objective.kl
    ):  # pulls at tokens without advantage too, which are otherwise gone through without gradient
        forest = replace(forest, advantages_T=np.ones_like(forest.advantages_T))
    passes.backward(model, forest, loss_of, pass_tokens=settings.pass_tokens)
    return total(parts)


def _update(metrics: Metrics, norm: float, computed: int) -> Update:
    if not torch.isfinite(torch.tensor([metrics.loss, norm])).all():
        raise NothingLearned(
            f"loss {metrics.loss!r} with gradient norm {norm!r} is not finite: the largest gap between trainer and "
            f"engine logprobs is {metrics.gap_max!r}; was this batch sampled from this model?"
        )
    if norm == 0 and metrics.clipped:
        raise NothingLearned(
            f"the gradient norm is 0: the clip holds back {metrics.clipped} of {metrics.tokens} tokens; lower the "
            "learning rate or the number of steps, or sample anew"
        )
    if norm == 0:
        raise NothingLearned(
            "the gradient norm is 0: all advantages are 0, which is so when the rewards of a group are equal"
        )
    return Update(
        loss=metrics.loss,
        grad_norm=norm,
        gap_mean=metrics.gap_mean,
        gap_max=metrics.gap_max,
        clip_share=metrics.clip_share,
        ratio_mean=metrics.ratio_mean,
        kl_mean=metrics.kl_mean,
        entropy_mean=metrics.entropy_mean,
        tokens=metrics.tokens,
        computed=computed,
    )


def check_reference(settings: Settings, reference: Path | None) -> None:
    """Raises BadInput when there is a weight of the KL without a reference, or a reference without a weight."""
    if (settings.objective.kl > 0) != (reference is not None):
        raise BadInput(f"kl is {settings.objective.kl!r} and the reference {reference!r}: give both or neither")


def check_vocabulary(rows: list[Row], *models: PreTrainedModel | None) -> None:
    """Raises BadInput when the rows hold a token id that one of the models does not know; None is no model."""
    largest = max(int(row.input_ids_T.max()) for row in rows)
    for model in filter(None, models):
        size: int = model.config.get_text_config().vocab_size
        if largest >= size:
            raise BadInput(
                f"the batch holds token id {largest!r}, the vocabulary of the model at {model.name_or_path!r} has "
                f"{size}: it is another model's batch"
            )
