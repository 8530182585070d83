"""The GRPO loss, against numpy and on paper."""

import numpy as np
import pytest
import torch

from polar_train.objective import Metrics, Objective, Tokens, grpo_loss, total


def in_numpy(logprobs, old, advantages, weights, low, high):
    """The loss in five lines."""
    ratio = np.exp(logprobs - old)
    clipped = np.clip(ratio, 1 - low, 1 + high)
    gain = np.minimum(ratio * advantages, clipped * advantages)
    return -(weights * gain).sum()


def tensors(*columns):
    return [torch.tensor(column, dtype=torch.float32) for column in columns]


@pytest.mark.parametrize("seed", range(5))
def test_loss_is_the_numpy_loss(seed):
    """On random tokens with both signs of advantage and ratios on both sides of the clip."""
    rng = np.random.default_rng(seed)
    old = rng.uniform(-5, 0, 200)
    columns = old + rng.normal(0, 0.5, 200), old, rng.normal(size=200), rng.uniform(size=200)
    loss, _ = grpo_loss(Tokens(*tensors(*columns)), Objective())
    assert loss.item() == pytest.approx(in_numpy(*columns, 0.2, 0.28), rel=1e-5)


def with_all(tokens, objective):
    """The whole objective, importance and KL included, in numpy."""
    lp, sampled, advantages, weights, proximal, reference = (column.detach().double().numpy() for column in tokens)
    importance = np.minimum(np.exp(proximal - sampled), objective.importance_cap)
    ratio = np.exp(lp - proximal)
    clipped = np.clip(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
    gain = importance * np.minimum(ratio * advantages, clipped * advantages)
    k3 = np.exp(reference - lp) - (reference - lp) - 1
    return (weights * (objective.kl * k3 - gain)).sum()


@pytest.mark.parametrize("seed", range(5))
def test_loss_with_importance_and_kl_is_the_numpy_loss(seed):
    """Proximal and reference policies of their own, a cap that bites, both signs of advantage."""
    rng = np.random.default_rng(seed)
    sampled = rng.uniform(-5, 0, 200)
    proximal, logprobs, reference = (sampled + rng.normal(0, spread, 200) for spread in (1.0, 1.2, 0.8))
    tokens = tensors(logprobs, sampled, rng.normal(size=200), rng.uniform(size=200), proximal, reference)
    objective = Objective(importance_cap=2.0, kl=0.05)
    loss, metrics = grpo_loss(Tokens(*tokens), objective)
    assert loss.item() == pytest.approx(with_all(tokens, objective), rel=1e-5)
    assert metrics.kl_mean == pytest.approx(
        np.mean(np.exp(reference - logprobs) - (reference - logprobs) - 1), rel=1e-5
    )


def test_without_a_proximal_policy_the_ratio_starts_at_one():
    """In the first update the proximal policy is the trained one: only the importance knows the engine."""
    logprobs, sampled = tensors([-1.0, -2.0], [-2.0, -1.0])
    loss, metrics = grpo_loss(Tokens(logprobs, sampled, *tensors([1, 1], [1, 1])), Objective(importance_cap=2.0))
    assert loss.item() == pytest.approx(-(2.0 + np.exp(-1.0)))
    assert metrics.ratio_mean == pytest.approx(1)


def test_loss_on_paper():
    """Ratios 1, 2, 1/2 with advantages 1, 1, -1: gains 1, 1.28 (clipped), -0.8 (clipped); weights 0.5, 0.25, 0.25."""
    logprobs, old = torch.tensor([-1.0, -1.0, -1.0]).log_softmax(0), None
    old = logprobs - torch.tensor([1.0, 2.0, 0.5]).log()
    advantages, weights = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0.5, 0.25, 0.25])
    loss, metrics = grpo_loss(Tokens(logprobs, old, advantages, weights), Objective())
    assert loss.item() == pytest.approx(-(0.5 * 1 + 0.25 * 1.28 + 0.25 * -0.8))
    assert metrics.clipped == 2


def test_only_unclipped_tokens_have_a_gradient():
    """A ratio that already moved with its advantage beyond the clip is left alone; one that moved against it is not."""
    logprobs, old, advantages = tensors([-1.0, -1.0, -2.0], [-2.0, -2.0, -1.0], [1.0, -1.0, 1.0])
    logprobs.requires_grad_()
    loss, _ = grpo_loss(Tokens(logprobs, old, advantages, torch.ones(3)), Objective())
    loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad != 0).tolist() == [False, True, True]


def test_at_ratio_one_the_gradient_is_the_weighted_advantage():
    """On the sampling policy itself the step is plain policy gradient."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages, weights = torch.tensor([0.7, -1.5]), torch.tensor([0.25, 0.75])
    loss, _ = grpo_loss(Tokens(logprobs, logprobs.detach(), advantages, weights), Objective())
    loss.backward()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, -weights * advantages)


def test_gap_is_between_trainer_and_engine():
    """The metrics tell how far the trainer's logprobs are from the recorded ones."""
    _, metrics = grpo_loss(Tokens(*tensors([-1.0, -2.5], [-1.25, -2.0], [1, 1], [1, 1])), Objective())
    assert metrics.gap_mean == pytest.approx(0.375)
    assert metrics.gap_max == pytest.approx(0.5)


def test_pieces_add_up_to_the_batch():
    """Cutting a batch changes neither loss nor metrics."""
    rng = np.random.default_rng(1)
    columns = tensors(rng.uniform(-3, 0, 50), rng.uniform(-3, 0, 50), rng.normal(size=50), rng.uniform(size=50))
    _, whole = grpo_loss(Tokens(*columns), Objective())
    pieces = [grpo_loss(Tokens(*(c[part] for c in columns)), Objective())[1] for part in (slice(17), slice(17, 50))]
    added = total(pieces)
    assert added.loss == pytest.approx(whole.loss, rel=1e-5)
    assert added.gap_sum == pytest.approx(whole.gap_sum, rel=1e-5)
    assert (added.tokens, added.clipped, added.gap_max) == (whole.tokens, whole.clipped, whole.gap_max)


def test_no_tokens_are_no_loss():
    """Shares of nothing are zero, not an error."""
    _, metrics = grpo_loss(Tokens(*tensors([], [], [], [])), Objective())
    assert (metrics.loss, metrics.gap_mean, metrics.clip_share) == (0, 0, 0)
    assert total([]) == Metrics()
