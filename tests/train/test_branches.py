"""The gradient of a branching forest, against a plain forward for each trajectory; and the mistakes that are silent."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from polar_train import branches
from polar_train.data import Row
from polar_train.forest import Forest, Layout, lay_out
from polar_train.model import load, token_logprobs
from polar_train.objective import Objective, Tokens, grpo_loss
from polar_train.small_models import fetch
from tests.train.test_forest import chain

CPU = torch.device("cpu")
LIMIT = 1e-5
"""Frobenius error of the gradient, relative, in float32."""


def branching(vocabulary: int, prompt: int = 40) -> list:
    """Three samples of one prompt; each forks twice: behind a reply, and behind a second one."""
    rng = np.random.default_rng(0)

    def some(count):
        return rng.integers(0, vocabulary, count).tolist()

    start, rows = some(prompt), []
    for sample in range(3):
        first = [*start, *some(8)]
        owned_first = [0] * prompt + [1] * 8
        for fork in range(2):
            second = [*first, *some(6), *some(5)]
            before = owned_first if fork == 0 else [0] * len(first)
            owned_second = [*before, *[0] * 6, *[1] * 5]
            for leaf in range(2):
                kept = owned_second if leaf == 0 else [0] * len(second)
                rows.append(chain([*second, *some(4), *some(3)], [*kept, 0, 0, 0, 0, 1, 1, 1], f"{sample}{fork}{leaf}"))
    return rows


def surrogate(holder, at):
    """Weights of a plain policy gradient, of both signs."""
    return torch.from_numpy((holder.loss_weight_T * (holder.advantages_T - 0.5))[at])


def by_trajectory(model, rows, forward=token_logprobs) -> torch.Tensor:
    """The whole gradient as one vector, from a pass for each trajectory."""
    model.zero_grad(set_to_none=True)
    for row in rows:
        at = np.flatnonzero(row.loss_mask_T)
        got = forward(
            model, torch.from_numpy(row.input_ids_T).long(), torch.arange(len(row.input_ids_T)),
            torch.from_numpy(row.loss_mask_T), torch.from_numpy(row.temperature_T),
        )  # fmt: skip
        (-((got - torch.from_numpy(row.old_logprobs_T[at])).exp() * surrogate(row, at)).sum()).backward()
    return flat(model)


def by_forest(model, rows, layout, *, max_tokens=100_000, run=branches.backward, **cut) -> torch.Tensor:
    """The same, from forests."""
    model.zero_grad(set_to_none=True)
    for forest in lay_out(rows, layout, max_tokens):
        old_T = torch.from_numpy(forest.old_logprobs_T)

        def loss_of(logprobs_L, _entropies_L, at_L, forest=forest, old_T=old_T):
            return -((logprobs_L - old_T[at_L]).exp() * surrogate(forest, at_L.numpy())).sum()

        run(model, forest, loss_of, **cut)
    return flat(model)


def flat(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def error(got: torch.Tensor, true: torch.Tensor) -> float:
    return ((got - true).norm() / true.norm()).item()


@pytest.fixture
def model(tiny_model):
    return load(tiny_model, CPU)


CUTS = [{}, {"longest": 7}, {"longest": 40}, {"longest": 16, "max_tokens": 100}]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_layout_and_cut_has_the_gradient_of_plain_passes(model, layout, cut):
    """Per request, packed and tree; nodes cut short, nothing kept, forests cut by a budget."""
    rows = branching(300)
    assert error(by_forest(model, rows, layout, **cut), by_trajectory(model, rows)) < LIMIT


def test_real_weights_have_the_gradient_of_plain_passes():
    """SmolLM2-135M: 30 layers, grouped queries, a branching forest cut into nodes of 16 tokens."""
    model = AutoModelForCausalLM.from_pretrained(fetch("smollm2-135m-instruct"), dtype=torch.float32)
    rows = branching(49_152)[:4]
    assert error(by_forest(model, rows, Layout.TREE, longest=16), by_trajectory(model, rows)) < LIMIT


def test_tokens_below_nothing_that_learns_are_only_counted(model):
    """Where no token below has an advantage, the loss is told its logprobs and nothing is gone back through."""
    rows = branching(300)
    for row in rows:
        row.advantages_T[:] = 0
    told = 0

    def loss_of(logprobs_L, _entropies_L, at_L):
        nonlocal told
        told += len(at_L)
        assert not logprobs_L.requires_grad
        return logprobs_L.sum()

    for forest in lay_out(rows, Layout.TREE, 1000):
        branches.backward(model, forest, loss_of, longest=7)
    assert told == sum(row.trained for row in rows)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_siblings_below_which_nothing_hangs_are_one_pass(tiny_model, attention):
    """Forty samples of a prompt cost two passes, with rectangles and under a mask, and more where they do not fit."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=attention, dtype=torch.float32)
    rows = [chain([*range(30), 30 + n, 7, n], [0] * 30 + [1, 1, 1], f"t{n}") for n in range(40)]
    passes = 0
    model.register_forward_hook(lambda *_: _count())

    def _count():
        nonlocal passes
        passes += 1

    true = by_trajectory(model, rows)
    for longest, expected in ((1000, 2), (60, 5)):
        passes = 0
        assert error(by_forest(model, rows, Layout.TREE, longest=longest), true) < LIMIT
        assert passes == expected


def test_a_session_that_branches_a_thousand_times(model):
    """Depth is no recursion."""
    ids = [n % 300 for n in range(1200)]
    rows = [chain([*ids[: 2 + n], 7], [0] * (2 + n) + [1], f"t{n}") for n in range(0, 1100, 110)]
    assert error(by_forest(model, rows, Layout.TREE, longest=3), by_trajectory(model, rows)) < LIMIT


# --- mistakes -----------------------------------------------------------------------------------------------------


def one_row(*, positions, mask):
    """A whole forest as one row of the model, the way of a mask: an oracle, and the place for mistakes."""

    def run(model, forest, loss_of):
        at_L = torch.from_numpy(np.flatnonzero(forest.loss_mask_T))
        ids = torch.from_numpy(forest.input_ids_T).long()
        logits = model(
            input_ids=ids[None],
            position_ids=torch.from_numpy(np.asarray(positions(forest), np.int64))[None],
            attention_mask=mask(forest),
            use_cache=False,
        ).logits[0]
        before_L = torch.from_numpy(forest.parent_T).long()[at_L]
        loss_of(logits[before_L].log_softmax(-1).gather(1, ids[at_L, None])[:, 0], None, at_L).backward()

    return run


def ancestors(forest: Forest) -> torch.Tensor:
    """Additive [1, 1, T, T]: a token attends to itself and what it hangs below."""
    here = np.arange(len(forest))
    seen = (here[None, :] <= here[:, None]) & (here[:, None] < forest.end_T[None, :])
    return torch.where(torch.from_numpy(seen), 0.0, float("-inf"))[None, None]


def depth(forest: Forest):
    return forest.position_T


def running(forest: Forest):
    return np.arange(len(forest))


def nothing(_forest: Forest):
    return None


def ones(forest: Forest) -> torch.Tensor:
    return torch.ones(1, len(forest), dtype=torch.int64)


def test_the_mask_of_ancestors_gives_the_same_gradient(model):
    """The oracle: one row, positions by depth, and what each token may see by the ends of the subtrees."""
    rows = branching(300)
    got = by_forest(model, rows, Layout.TREE, run=one_row(positions=depth, mask=ancestors))
    assert error(got, by_forest(model, rows, Layout.TREE)) < LIMIT


@pytest.mark.parametrize(
    ("layout", "positions", "mask"),
    [
        (Layout.TREE, depth, nothing),  # position jumps are read as new packed sequences
        (Layout.PACKED, depth, ones),  # a mask of ones switches the detection of packed sequences off
        (Layout.TREE, running, ancestors),  # positions that run on instead of depth
    ],
    ids=["tree without mask", "packed with ones", "running positions"],
)
def test_silent_mistakes_change_the_gradient(model, layout, positions, mask):
    """Negative controls: none of these raises, each would train on something else."""
    rows = branching(300)
    got = by_forest(model, rows, layout, run=one_row(positions=positions, mask=mask))
    assert error(got, by_trajectory(model, rows)) > 0.05


def test_a_beginning_without_gradient_changes_the_gradient(model):
    """Negative control: keys and values of the shared beginning that are made as in inference."""

    def run(model, forest, loss_of):
        walk = branches._Walk(model, forest, loss_of, 1024)
        walk._leave = lambda frame: None
        walk.run()

    rows = branching(300)
    assert error(by_forest(model, rows, Layout.TREE, run=run), by_trajectory(model, rows)) > 0.05


def opposed(vocabulary: int) -> tuple[list, Row]:
    """Samples of the same tokens by two sessions, one better and one worse, and the one row that their sum would be."""
    ids = np.random.default_rng(1).integers(0, vocabulary, 24).tolist()
    better, worse = (chain(ids, [0] * 12 + [1] * 12, "same") for _ in range(2))
    better.advantages_T[12:], worse.advantages_T[12:] = 1.0, -0.6
    summed = replace(better, advantages_T=better.advantages_T + worse.advantages_T)
    return [better, worse], summed


def clipped_gradient(model, rows, layout) -> torch.Tensor:
    """Of the clipped objective, where the policy has moved on from the one that sampled: by a factor 2, or 1 / 2."""
    model.zero_grad(set_to_none=True)
    for forest in lay_out(rows, layout, 1000):
        advantages_T, weights_T = torch.from_numpy(forest.advantages_T), torch.from_numpy(forest.loss_weight_T)

        def loss_of(logprobs_L, _entropies_L, at_L, of=(advantages_T, weights_T)):
            moved_L = logprobs_L.detach() - torch.where(at_L % 2 == 0, 0.7, -0.7)
            return grpo_loss(Tokens(logprobs_L, moved_L, of[0][at_L], of[1][at_L]), Objective())[0]

        branches.backward(model, forest, loss_of, longest=7)
    return flat(model)


def test_opposite_advantages_of_one_token_keep_their_gradients(model):
    """Two sessions sampled the same tokens: in a tree, as in passes of their own, each is clipped by itself."""
    rows, _ = opposed(300)
    apart = sum(clipped_gradient(model, [row], Layout.PER_REQUEST) for row in rows)
    assert error(clipped_gradient(model, rows, Layout.TREE), apart) < LIMIT


def test_one_summed_advantage_changes_the_gradient(model):
    """Negative control: one term with the sum of both advantages is clipped as if there were one opinion."""
    rows, summed = opposed(300)
    true = clipped_gradient(model, rows, Layout.TREE)
    assert error(clipped_gradient(model, [summed], Layout.TREE), true) > 0.05


def test_logprobs_and_entropies_are_those_of_plain_passes(model):
    """Of every trained token, under its temperature; nothing is left on the model."""
    rows = branching(300)
    (forest,) = lay_out(rows, Layout.TREE, 1000)
    forest.temperature_T[:] = 0.7
    got_T = branches.logprobs(model, forest, longest=7)
    told: list[torch.Tensor] = []
    branches.backward(model, forest, lambda lp, entropies, at: (told.append(entropies), lp.sum())[1], longest=7)
    logits = model(
        input_ids=torch.from_numpy(forest.input_ids_T).long()[None],
        position_ids=torch.from_numpy(forest.position_T).long()[None],
        attention_mask=ancestors(forest),
    ).logits[0]
    at = torch.from_numpy(np.flatnonzero(forest.loss_mask_T))
    all_LV = (logits[torch.from_numpy(forest.parent_T).long()[at]] / 0.7).log_softmax(-1)
    plain_L = all_LV.gather(1, torch.from_numpy(forest.input_ids_T).long()[at, None])[:, 0]
    assert torch.allclose(got_T[at], plain_L, atol=1e-5)
    assert torch.allclose(sum(map(torch.sum, told)), -(all_LV.exp() * all_LV).sum(), rtol=1e-5)
