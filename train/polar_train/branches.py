"""The gradient of a forest on plain causal attention: each token computed once, whatever hangs below it.

Invariant: exact. A node's keys and values are given to its descendants as leaves, which gather the gradient from all of
them; then the node itself is gone back through. Memory is that of one root-to-leaf path of keys and values and of the
activations of one node, however long the path: what does not fit is computed again. It knows no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from polar_train.forest import Forest, Node

LONGEST = 1024
"""Tokens of a node that are computed at once; longer ones are cut."""
KEPT = 1024
"""Tokens on the path whose activations are kept for the way back; beyond them nodes are computed twice."""

LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logprobs [L], entropies [L] in nats without grad, indices of the L tokens in the forest) -> their loss, a scalar."""


@dataclass(slots=True)
class _Frame:
    """A node on the path from the root to where we are."""

    index: int
    node: Node
    children: list[int]
    leaves: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    """Keys and values of each layer, cut off from what made them, so that gradients gather in them."""
    made: list[Tensor] | None = None
    """The same with their graph, and the loss in front, where it was kept."""


def backward(
    model: PreTrainedModel, forest: Forest, loss_of: LossOf, *, longest: int = LONGEST, kept: int = KEPT
) -> None:
    """Add the gradient of the sum of `loss_of` over all tokens that bear loss to the model's.

    `loss_of` is called once a node, with logprobs [L] float32 of the tokens that the node predicts, and without grad
    where nothing below has an advantage.
    """
    _Walk(model, forest, loss_of, longest, kept).run()


def logprobs(model: PreTrainedModel, forest: Forest, *, longest: int = LONGEST) -> Tensor:
    """Logprobs [T] float32 of the tokens that bear loss, 0 elsewhere; no gradient is made."""
    found_T = torch.zeros(len(forest), device=model.device)

    def note(logprobs_L: Tensor, _entropies_L: Tensor, at_L: Tensor) -> Tensor:
        found_T[at_L] = logprobs_L
        return logprobs_L.sum()

    walk = _Walk(model, forest, note, longest, 0)
    walk.learning[:] = 0
    walk.run()
    return found_T


class _Walk:
    def __init__(self, model: PreTrainedModel, forest: Forest, loss_of: LossOf, longest: int, kept: int) -> None:
        self._model, self._forest, self._loss_of, self._kept = model, forest, loss_of, kept
        self._nodes = forest.nodes(longest)
        self._roots, self._below = _children(self._nodes, forest)
        self._ids = torch.from_numpy(forest.input_ids_T.astype(np.int64)).to(model.device)
        self._positions = torch.from_numpy(forest.position_T.astype(np.int64)).to(model.device)
        self._temperature = torch.from_numpy(forest.temperature_T).to(model.device)
        learns = forest.loss_mask_T & (forest.advantages_T * forest.loss_weight_T != 0)
        self.learning = np.concatenate([[0], np.cumsum(learns)])
        self._predicts = _predictions(self._nodes, forest)
        self._path: list[_Frame] = []

    def run(self) -> None:
        """Depth first, without recursion: a session may branch thousands of times."""
        for root in self._roots:
            self._enter(root)
            while self._path:
                frame = self._path[-1]
                if frame.children:
                    self._enter(frame.children.pop(0))
                else:
                    self._path.pop()
                    self._leave(frame)

    def _enter(self, index: int) -> None:
        node = self._nodes[index]
        learns = bool(self.learning[node.end] - self.learning[node.a + 1])
        frame = _Frame(index, node, list(self._below[index]))
        if not frame.children:
            with torch.set_grad_enabled(learns):
                loss, _ = self._forward(index)
            if learns and loss is not None:
                loss.backward()
            return
        held = sum(f.node.b - f.node.a for f in self._path if f.made is not None)
        keeps = learns and held + node.b - node.a <= self._kept
        with torch.set_grad_enabled(keeps):
            loss, made = self._forward(index, losses=keeps or not learns)
        if keeps:
            frame.made = [*([loss] if loss is not None else []), *(t for pair in made for t in pair)]
        frame.leaves = [(k.detach().requires_grad_(learns), v.detach().requires_grad_(learns)) for k, v in made]
        self._path.append(frame)

    def _leave(self, frame: _Frame) -> None:
        leaves = [t for pair in frame.leaves for t in pair]
        if not leaves[0].requires_grad:
            return
        if frame.made is None:
            loss, made = self._forward(frame.index)
            frame.made = [*([loss] if loss is not None else []), *(t for pair in made for t in pair)]
        own = len(frame.made) - len(leaves)
        pairs = [(t, leaf.grad) for t, leaf in zip(frame.made[own:], leaves, strict=True) if leaf.grad is not None]
        tensors = frame.made[:own] + [t for t, _ in pairs]
        torch.autograd.backward(tensors, [None] * own + [g for _, g in pairs])

    def _forward(self, index: int, *, losses: bool = True) -> tuple[Tensor | None, list[tuple[Tensor, Tensor]]]:
        """The loss of what a node predicts, and its own keys and values."""
        node, predicted = self._nodes[index], self._predicts[index] if losses else np.zeros(0, np.int64)
        cache, past = self._cache() if self._path or self._below[index] else (None, 0)
        rows = self._forest.parent_T[predicted] - node.a if len(predicted) else np.zeros(1)
        logits = self._model(
            input_ids=self._ids[None, node.a : node.b],
            position_ids=self._positions[None, node.a : node.b],
            attention_mask=_mask(past, node.b - node.a, self._model) if past else None,
            cache=cache,
            use_cache=cache is not None,
            logits_to_keep=torch.from_numpy(rows.astype(np.int64)).to(self._model.device),
        ).logits[0]
        made = [(keys[:, :, past:], values[:, :, past:]) for keys, values in _layers(cache)]
        if not len(predicted):
            return None, made
        at_L = torch.from_numpy(predicted).to(self._model.device)
        logprobs_LV = (logits.float() / self._temperature[at_L, None]).log_softmax(-1)
        logprobs_L = logprobs_LV.gather(1, self._ids[at_L, None])[:, 0]
        return self._loss_of(logprobs_L, _entropies(logprobs_LV.detach()), at_L), made

    def _cache(self) -> tuple[DynamicCache, int]:
        cache = DynamicCache()
        if self._path:
            for layer in range(len(self._path[0].leaves)):
                keys, values = zip(*(frame.leaves[layer] for frame in self._path), strict=True)
                cache.update(torch.cat(keys, 2), torch.cat(values, 2), layer)
        return cache, int(cache.get_seq_length())


def _entropies(logprobs_LV: Tensor) -> Tensor:
    return -(logprobs_LV.exp() * logprobs_LV).sum(-1)


def _layers(cache: DynamicCache | None) -> Iterator[tuple[Tensor, Tensor]]:
    for layer in cache.layers if cache is not None else ():
        keys, values = getattr(layer, "keys"), getattr(layer, "values")  # noqa: B009 - typed for every kind of cache
        yield keys, values


def _mask(past: int, count: int, model: PreTrainedModel) -> Tensor:
    """Additive [1, 1, count, past + count]: all of the past, and causal among themselves."""
    own = torch.full((count, count), float("-inf"), dtype=model.dtype, device=model.device).triu(1)
    return torch.cat([own.new_zeros(count, past), own], 1)[None, None]


def _children(nodes: list[Node], forest: Forest) -> tuple[list[int], list[list[int]]]:
    """The roots, and for each node those that begin behind its last token."""
    by_last = {node.b - 1: index for index, node in enumerate(nodes)}
    roots: list[int] = []
    below: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        parent = int(forest.parent_T[node.a])
        (roots if parent < 0 else below[by_last[parent]]).append(index)
    return roots, below


def _predictions(nodes: list[Node], forest: Forest) -> list[np.ndarray]:
    """For each node, the tokens with loss whose parent is in it."""
    tokens = np.flatnonzero(forest.loss_mask_T)
    tokens = tokens[np.argsort(forest.parent_T[tokens], kind="stable")]
    parents = forest.parent_T[tokens]
    return [tokens[np.searchsorted(parents, node.a) : np.searchsorted(parents, node.b)] for node in nodes]
