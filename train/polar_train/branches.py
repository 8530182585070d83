"""The gradient of a forest on plain causal attention: each token computed once, whatever hangs below it.

Invariant: exact. A node's keys and values are given to its descendants as leaves, which gather the gradient from all of
them; then the node itself is gone back through. Siblings below which nothing hangs are computed together: they see the
same past, and not each other. Memory is that of one root-to-leaf path of keys and values and of the activations of one
pass, however long the path: what does not fit is computed again. It knows no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from polar_train.forest import Forest, Node
from polar_train.model import packs, score
from polar_train.rectangles import attending, mask_of

LONGEST = 2048
"""Tokens whose activations are held at once: longer nodes are cut, and what does not fit is computed again."""

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


def backward(model: PreTrainedModel, forest: Forest, loss_of: LossOf, *, longest: int = LONGEST) -> None:
    """Add the gradient of the sum of `loss_of` over all tokens that bear loss to the model's.

    `loss_of` is called once a pass, with logprobs [L] float32 of the tokens that its nodes predict, and without grad
    where nothing below has an advantage.
    """
    _Walk(model, forest, loss_of, longest).run()


def logprobs(model: PreTrainedModel, forest: Forest, *, longest: int = LONGEST) -> Tensor:
    """Logprobs [T] float32 of the tokens that bear loss, 0 elsewhere; no gradient is made."""
    found_T = torch.zeros(len(forest), device=model.device)

    def note(logprobs_L: Tensor, _entropies_L: Tensor, at_L: Tensor) -> Tensor:
        found_T[at_L] = logprobs_L
        return logprobs_L.sum()

    walk = _Walk(model, forest, note, longest)
    walk.learning[:] = 0
    walk.run()
    return found_T


class _Walk:
    def __init__(self, model: PreTrainedModel, forest: Forest, loss_of: LossOf, longest: int) -> None:
        self._model, self._forest, self._loss_of, self._longest = model, forest, loss_of, longest
        self._nodes = forest.nodes(longest)
        self._roots, self._below = _children(self._nodes, forest)
        self._most_below = _most_below(self._nodes, self._below)
        self._needs_mask, self._gathers = False, packs(model.config)
        self._ids = torch.from_numpy(forest.input_ids_T.astype(np.int64)).to(model.device)
        self._positions = torch.from_numpy(forest.position_T.astype(np.int64)).to(model.device)
        self._temperature = torch.from_numpy(forest.temperature_T).to(model.device)
        learns = forest.loss_mask_T & (forest.advantages_T * forest.loss_weight_T != 0)
        self.learning = np.concatenate([[0], np.cumsum(learns)])
        self._predicts = _predictions(self._nodes, forest)
        self._path: list[_Frame] = []

    def run(self) -> None:
        """Depth first, without recursion: a session may branch thousands of times."""
        with attending(self._model) as without_mask:
            self._needs_mask = not without_mask
            roots = list(self._roots)
            while roots or self._path:
                self._go_on(self._path[-1].children if self._path else roots)

    def _go_on(self, children: list[int]) -> None:
        if not children:
            self._leave(self._path.pop())
        elif self._below[children[0]]:
            self._enter(children.pop(0))
        else:
            self._finish(self._leaves(children))

    def _leaves(self, children: list[int]) -> list[int]:
        """Takes the first child, which is a leaf, and the leaves like it that fit beside it."""
        taken = [children[0]]
        room = self._longest - self._held() - self._length(children[0])
        for child in children[1:] if self._gathers else ():
            alike = not self._below[child] and self._learns(child) == self._learns(taken[0])
            if alike and self._length(child) <= room:
                taken.append(child)
                room -= self._length(child)
        children[:] = [child for child in children if child not in set(taken)]
        return taken

    def _finish(self, leaves: list[int]) -> None:
        learns = self._learns(leaves[0])
        with torch.set_grad_enabled(learns):
            loss, _ = self._forward(leaves)
        if learns and loss is not None:
            loss.backward()

    def _learns(self, index: int) -> bool:
        node = self._nodes[index]
        return bool(self.learning[node.end] - self.learning[node.a + 1])

    def _length(self, index: int) -> int:
        return self._nodes[index].b - self._nodes[index].a

    def _held(self) -> int:
        return sum(frame.node.b - frame.node.a for frame in self._path if frame.made is not None)

    def _enter(self, index: int) -> None:
        node, learns = self._nodes[index], self._learns(index)
        frame = _Frame(index, node, list(self._below[index]))
        keeps = learns and self._held() + self._length(index) + self._most_below[index] <= self._longest
        with torch.set_grad_enabled(keeps):
            loss, made = self._forward([index], losses=keeps or not learns)
        if keeps:
            frame.made = [*([loss] if loss is not None else []), *(t for pair in made for t in pair)]
        frame.leaves = [(k.detach().requires_grad_(learns), v.detach().requires_grad_(learns)) for k, v in made]
        self._path.append(frame)

    def _leave(self, frame: _Frame) -> None:
        leaves = [t for pair in frame.leaves for t in pair]
        if not leaves[0].requires_grad:
            return
        if frame.made is None:
            loss, made = self._forward([frame.index])
            frame.made = [*([loss] if loss is not None else []), *(t for pair in made for t in pair)]
        own = len(frame.made) - len(leaves)
        pairs = [(t, leaf.grad) for t, leaf in zip(frame.made[own:], leaves, strict=True) if leaf.grad is not None]
        tensors = frame.made[:own] + [t for t, _ in pairs]
        torch.autograd.backward(tensors, [None] * own + [g for _, g in pairs])

    def _forward(self, indices: list[int], *, losses: bool = True) -> tuple[Tensor | None, list[tuple[Tensor, Tensor]]]:
        """The loss of what some leaves, or one node, predict, and their own keys and values."""
        nodes = [self._nodes[index] for index in indices]
        cache, past = self._cache() if self._path or self._below[indices[0]] else (None, 0)
        predicted, rows = self._predicted(indices) if losses else (np.zeros(0, np.int64), np.zeros(1, np.int64))
        pieces = tuple(node.b - node.a for node in nodes)
        several: dict[str, Any] = {"pieces": pieces} if len(pieces) > 1 else {}  # Any: for the attention alone
        logits = self._model(
            input_ids=torch.cat([self._ids[node.a : node.b] for node in nodes])[None],
            position_ids=torch.cat([self._positions[node.a : node.b] for node in nodes])[None],
            attention_mask=self._mask(past, pieces),
            cache=cache,
            use_cache=cache is not None,
            logits_to_keep=torch.from_numpy(rows).to(self._model.device),
            **several,
        ).logits[0]
        made = [(keys[:, :, past:], values[:, :, past:]) for keys, values in _layers(cache)]
        if not len(predicted):
            return None, made
        at_L = torch.from_numpy(predicted).to(self._model.device)
        return self._loss_of(*score(logits, self._ids[at_L], self._temperature[at_L]), at_L), made

    def _predicted(self, indices: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that the nodes predict, and for each the row, in the nodes one after the other, that does so."""
        tokens, rows, before = [], [], 0
        for index in indices:
            tokens.append(self._predicts[index])
            rows.append(self._forest.parent_T[self._predicts[index]] - self._nodes[index].a + before)
            before += self._length(index)
        found = np.concatenate(tokens)
        return found, np.concatenate(rows).astype(np.int64) if len(found) else np.zeros(1, np.int64)

    def _mask(self, past: int, pieces: tuple[int, ...]) -> Tensor | None:
        if not self._needs_mask or not (past or len(pieces) > 1):
            return None
        like = self._path[0].leaves[0][0] if self._path else next(self._model.parameters())
        return mask_of(past, pieces, like)

    def _cache(self) -> tuple[DynamicCache, int]:
        cache = DynamicCache()
        if self._path:
            for layer in range(len(self._path[0].leaves)):
                keys, values = zip(*(frame.leaves[layer] for frame in self._path), strict=True)
                cache.update(torch.cat(keys, 2), torch.cat(values, 2), layer)
        return cache, int(cache.get_seq_length())


def _layers(cache: DynamicCache | None) -> Iterator[tuple[Tensor, Tensor]]:
    for layer in cache.layers if cache is not None else ():
        keys, values = getattr(layer, "keys"), getattr(layer, "values")  # noqa: B009 - typed for every kind of cache
        yield keys, values


def _children(nodes: list[Node], forest: Forest) -> tuple[list[int], list[list[int]]]:
    """The roots, and for each node those that begin behind its last token."""
    by_last = {node.b - 1: index for index, node in enumerate(nodes)}
    roots: list[int] = []
    below: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        parent = int(forest.parent_T[node.a])
        (roots if parent < 0 else below[by_last[parent]]).append(index)
    return roots, below


def _most_below(nodes: list[Node], below: list[list[int]]) -> list[int]:
    """For each node, the tokens of the largest one among its descendants."""
    most = [0] * len(nodes)
    for index in range(len(nodes) - 1, -1, -1):
        most[index] = max((max(most[child], nodes[child].b - nodes[child].a) for child in below[index]), default=0)
    return most


def _predictions(nodes: list[Node], forest: Forest) -> list[np.ndarray]:
    """For each node, the tokens with loss whose parent is in it."""
    tokens = np.flatnonzero(forest.loss_mask_T)
    tokens = tokens[np.argsort(forest.parent_T[tokens], kind="stable")]
    parents = forest.parent_T[tokens]
    return [tokens[np.searchsorted(parents, node.a) : np.searchsorted(parents, node.b)] for node in nodes]
