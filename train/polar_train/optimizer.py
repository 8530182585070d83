"""AdamW in float32, whatever the model computes in.

Invariant: the weights that are trained, the gradients that add up over a batch, and the two moments are float32. A
model that computes in bfloat16 holds rounded copies of them: bfloat16 tells numbers apart that differ by 0.4 %, so that
an update of 1e-6 would be lost, and so would the gradient of one forest beside the sum of many. There is no weight
decay and no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polar_train.errors import BadInput

BETAS = (0.9, 0.999)
"""How much of the mean gradient, and of its mean square, an update keeps for the next; torch's own."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What torch's AdamW keeps of each parameter."""


class Optimizer:
    """AdamW over the float32 weights of a model, which it puts into the precision that is computed in."""

    def __init__(
        self,
        model: PreTrainedModel,
        lr: float,
        compute: torch.dtype = torch.float32,
        betas: tuple[float, float] = BETAS,
    ) -> None:
        self._model = model
        self._weights: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            self._weights[name] = parameter if compute == torch.float32 else _copied(parameter, compute)
        self._adam = torch.optim.AdamW(self._weights.values(), lr=lr, betas=betas, weight_decay=0.0)

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to a norm, and give the norm it had."""
        return torch.nn.utils.clip_grad_norm_(self._weights.values(), max_norm).item()

    def step(self) -> None:
        """Change the weights by the gradient that added up, and forget it."""
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if parameter is not self._weights[name]:
                    parameter.copy_(self._weights[name])

    def weights(self) -> dict[str, Tensor]:
        """The model's state dict with the weights in float32."""
        state = self._model.state_dict(keep_vars=True)
        trained = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return {
            key: self._weights[trained[id(value)]].detach() if id(value) in trained else value
            for key, value in state.items()
        }

    def moments(self) -> dict[str, Tensor]:
        """What it remembers from the updates so far, by `moment.parameter`; empty before the first."""
        return {
            f"{moment}.{name}": self._adam.state[weight][moment]
            for name, weight in self._weights.items()
            if weight in self._adam.state
            for moment in MOMENTS
        }

    def restore(self, moments: Mapping[str, Tensor]) -> None:
        """Go on from the `moments` of another of the same model.

        Raises BadInput when one is missing.
        """
        for name, weight in self._weights.items():
            wanted = {moment: f"{moment}.{name}" for moment in MOMENTS}
            if missing := [key for key in wanted.values() if key not in moments]:
                raise BadInput(f"the optimizer's state lacks {missing[0]!r}: it is of another model")
            self._adam.state[weight] = {
                moment: moments[key].to("cpu" if moment == "step" else weight.device, copy=True)
                for moment, key in wanted.items()
            }


def _copied(parameter: torch.nn.Parameter, compute: torch.dtype) -> Tensor:
    """The float32 copy of a parameter, to which its gradients are added as they come."""
    weight = parameter.detach().float().clone()
    parameter.data = parameter.detach().to(compute)
    parameter.register_post_accumulate_grad_hook(_added_to(weight))
    return weight


def _added_to(weight: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        weight.grad = parameter.grad.float() if weight.grad is None else weight.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
