"""How a forest goes through a model: in one pass by FlexAttention on CUDA, node by node elsewhere.

Invariant: what is chosen changes the time and the memory, never the result. A model whose sequences cannot be cut
(sliding windows, linear attention) gets whole ones. It knows no loss and no rewards.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from polar_train import branches, flex
from polar_train.branches import LONGEST, LossOf
from polar_train.data import Row
from polar_train.forest import Forest, Layout, lay_out
from polar_train.model import packs

ROW_TOKENS = 65536
"""Of one forest, where nothing else is said."""


def grow(rows: list[Row], model: PreTrainedModel, layout: Layout, row_tokens: int) -> list[Forest]:
    """The rows in a layout, by forests of at most so many tokens; of a model that cannot be cut, `packed` at most."""
    if layout is Layout.TREE and not packs(model.config):
        layout = Layout.PACKED
    return list(lay_out(rows, layout, row_tokens))


def backward(model: PreTrainedModel, forest: Forest, loss_of: LossOf, *, pass_tokens: int = LONGEST) -> None:
    """Add the gradient of the sum of `loss_of` over the tokens that bear loss to the model's: `branches.backward`.

    `pass_tokens` are held with their activations at once, beyond which these are computed again.
    """
    if flex.applies(model):
        flex.backward(model, forest, loss_of)
        return
    longest = _longest(model, forest, pass_tokens)
    if not packs(model.config):
        _recompute(model, wanted=max(node.b - node.a for node in forest.nodes(longest)) > pass_tokens)
    branches.backward(model, forest, loss_of, longest=longest)


def logprobs(model: PreTrainedModel, forest: Forest, *, pass_tokens: int = LONGEST) -> Tensor:
    """Logprobs [T] float32 of the tokens that bear loss, 0 elsewhere; no gradient is made."""
    if flex.applies(model):
        return flex.logprobs(model, forest)
    return branches.logprobs(model, forest, longest=_longest(model, forest, pass_tokens))


def _longest(model: PreTrainedModel, forest: Forest, pass_tokens: int) -> int:
    """Tokens of a node: of a model whose sequences cannot be cut, all of them."""
    return pass_tokens if packs(model.config) else len(forest)


def _recompute(model: PreTrainedModel, *, wanted: bool) -> None:
    if wanted != model.is_activation_checkpointing:
        if wanted:
            model.activation_checkpointing_enable()
        else:
            model.activation_checkpointing_disable()
