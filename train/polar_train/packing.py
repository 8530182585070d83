"""Rows to what one forward pass takes: how a packed row is laid out on a device.

Invariant: every layout gives the same logprobs and gradients, because weights are normalised over the batch and
trajectories never see each other. Only the cost differs. It knows no loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from polar_train.data import Row


@dataclass(frozen=True, slots=True)
class Pass:
    """The tensors of one forward pass; `_T` over its tokens, `_L` over its loss tokens in order."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    loss_mask_T: Tensor
    temperature_T: Tensor
    old_logprobs_L: Tensor
    advantages_L: Tensor
    weights_L: Tensor

    @property
    def learns(self) -> bool:
        """Whether any token has an advantage; without one the gradient is exactly zero."""
        return bool((self.advantages_L * self.weights_L != 0).any())


def split(row: Row) -> Iterator[Row]:
    """Each trajectory of a packed row as a row of its own, without copying.

    A causal row needs no mask; a packed one needs an N x N mask, which on a CPU costs more than the packing saves.
    """
    ends = np.cumsum(row.lengths)
    for index, end in enumerate(ends):
        part = slice(int(end - row.lengths[index]), int(end))
        yield replace(
            row,
            input_ids_T=row.input_ids_T[part],
            position_ids_T=row.position_ids_T[part],
            loss_mask_T=row.loss_mask_T[part],
            old_logprobs_T=row.old_logprobs_T[part],
            advantages_T=row.advantages_T[part],
            temperature_T=row.temperature_T[part],
            loss_weight_T=row.loss_weight_T[part],
            lengths=row.lengths[index : index + 1],
            trajectory_ids=row.trajectory_ids[index : index + 1],
        )


def to_pass(row: Row, device: torch.device) -> Pass:
    """The tensors of a row on a device; ids as int64, which embeddings want."""
    loss_mask_T = row.loss_mask_T

    def placed(values: np.ndarray, kind: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    return Pass(
        input_ids_T=placed(row.input_ids_T, torch.int64),
        position_ids_T=placed(row.position_ids_T, torch.int64),
        loss_mask_T=placed(loss_mask_T, torch.bool),
        temperature_T=placed(row.temperature_T, torch.float32),
        old_logprobs_L=placed(row.old_logprobs_T[loss_mask_T], torch.float32),
        advantages_L=placed(row.advantages_T[loss_mask_T], torch.float32),
        weights_L=placed(row.loss_weight_T[loss_mask_T], torch.float32),
    )
