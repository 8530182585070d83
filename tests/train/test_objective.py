"""The GRPO loss, against numpy and on paper."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_toolkit import batches, merge, rewards
from polar_train.data import read_batches
from polar_train.objective import Metrics, Objective, Tokens, grpo_loss, total
from tests.toolkit.conftest import Book


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


# --- an independent reference, with its gradient ------------------------------------------------------------------

objectives = st.builds(
    Objective,
    clip_low=st.floats(0.0, 0.9),
    clip_high=st.floats(0.0, 2.0),
    importance_cap=st.none() | st.floats(0.5, 5.0),
    kl=st.floats(0.0, 1.0),
)


@dataclass
class Drawn:
    """T tokens over V symbols, float64."""

    logits_TV: np.ndarray
    ids_T: np.ndarray
    temperature_T: np.ndarray
    sampled_T: np.ndarray
    advantages_T: np.ndarray
    weights_T: np.ndarray
    proximal_T: np.ndarray | None
    reference_T: np.ndarray | None

    @classmethod
    def of(cls, seed, *, proximal, reference):
        """Both signs of advantage, ratios far on both sides of any clip, temperatures around 1."""
        rng, count, symbols = np.random.default_rng(seed), 40, 6
        drawn = cls(
            2 * rng.normal(size=(count, symbols)), rng.integers(0, symbols, count), rng.uniform(0.4, 1.6, count),
            np.zeros(count), rng.normal(size=count), rng.uniform(size=count) / count, None, None,
        )  # fmt: skip
        logprobs_T = drawn.logprobs()[np.arange(count), drawn.ids_T]
        drawn.sampled_T = logprobs_T + rng.normal(0, 0.6, count)
        drawn.proximal_T = logprobs_T + rng.normal(0, 0.6, count) if proximal else None
        drawn.reference_T = logprobs_T + rng.normal(0, 0.6, count) if reference else None
        return drawn

    def logprobs(self):
        """log_softmax(logits / temperature) [T, V]."""
        scaled_TV = self.logits_TV / self.temperature_T[:, None]
        return scaled_TV - np.log(np.exp(scaled_TV).sum(1, keepdims=True))


def by_hand(drawn, objective):
    """Loss, its gradient by the logits [T, V], and (ratio, k3, entropy) means: one token after the other."""
    loss, gradient_TV, sums = 0.0, np.zeros_like(drawn.logits_TV), np.zeros(3)
    for t, logprobs_V in enumerate(drawn.logprobs()):
        own, advantage = logprobs_V[drawn.ids_T[t]], drawn.advantages_T[t]
        old, importance = drawn.sampled_T[t], 1.0
        if objective.importance_cap is not None:
            old = own if drawn.proximal_T is None else drawn.proximal_T[t]
            importance = min(np.exp(old - drawn.sampled_T[t]), objective.importance_cap)
        ratio = np.exp(own - old)
        free = ratio <= 1 + objective.clip_high if advantage >= 0 else ratio >= 1 - objective.clip_low
        held = ratio if free else (1 + objective.clip_high if advantage >= 0 else 1 - objective.clip_low)
        ahead = 0.0 if drawn.reference_T is None else drawn.reference_T[t] - own
        k3 = np.exp(ahead) - ahead - 1
        slope = -importance * advantage * ratio * free + objective.kl * (1 - np.exp(ahead))  # by the logprob
        loss += drawn.weights_T[t] * (objective.kl * k3 - importance * held * advantage)
        one_hot_V = np.eye(len(logprobs_V))[drawn.ids_T[t]]
        gradient_TV[t] = drawn.weights_T[t] * slope * (one_hot_V - np.exp(logprobs_V)) / drawn.temperature_T[t]
        sums += ratio, k3, -(np.exp(logprobs_V) * logprobs_V).sum()
    return loss, gradient_TV, sums / len(drawn.ids_T)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), objectives, st.booleans(), st.booleans())
def test_loss_figures_and_gradient_are_those_of_the_reference(seed, objective, proximal, reference):
    """Any clip, cap and KL weight, with and without proximal and reference policy, each token at its temperature."""
    drawn = Drawn.of(seed, proximal=proximal, reference=reference)
    wanted, gradient_TV, means = by_hand(drawn, objective)
    logits_TV = torch.from_numpy(drawn.logits_TV).requires_grad_()
    logprobs_TV = (logits_TV / torch.from_numpy(drawn.temperature_T)[:, None]).log_softmax(-1)
    told = [drawn.sampled_T, drawn.advantages_T, drawn.weights_T, drawn.proximal_T, drawn.reference_T]
    tokens = Tokens(
        logprobs_TV.gather(1, torch.from_numpy(drawn.ids_T)[:, None])[:, 0],
        *(None if column is None else torch.from_numpy(column) for column in told),
        -(logprobs_TV.exp() * logprobs_TV).sum(-1).detach(),
    )
    loss, metrics = grpo_loss(tokens, objective)
    loss.backward()
    assert loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert np.allclose(logits_TV.grad.numpy(), gradient_TV, rtol=1e-9, atol=1e-12)
    assert (metrics.ratio_mean, metrics.kl_mean, metrics.entropy_mean) == pytest.approx(tuple(means), rel=1e-9)


@pytest.mark.parametrize(
    ("advantage", "ratio", "gain"),
    [(1, 1.5, 1.28), (1, 0.5, 0.5), (-1, 1.5, -1.5), (-1, 0.5, -0.8)],
    ids=["up, held above", "up, let fall", "down, let rise", "down, held below"],
)
def test_the_clip_holds_back_only_what_went_with_the_advantage(advantage, ratio, gain):
    """Four cases on paper, at 0.2 and 0.28: a token that moved the wrong way is never held back."""
    sampled = torch.tensor([-2.0])
    tokens = Tokens(sampled + np.log(ratio), sampled, *tensors([advantage], [1]))
    assert -grpo_loss(tokens, Objective())[0].item() == pytest.approx(gain)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_clip_of_zero_lets_the_first_update_pass(advantage):
    """At ratio 1 nothing is held back: the gradient is the whole advantage."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, metrics = grpo_loss(Tokens(logprobs, *tensors([-1.0], [advantage], [1])), Objective(0.0, 0.0))
    loss.backward()
    assert (logprobs.grad.item(), metrics.clipped) == (-advantage, 0)


def test_opposite_advantages_of_one_token_are_two_terms():
    """Two sessions sampled it, one was better, one worse: at ratio 2 the first is held at 1.28, the second is not."""
    old, ratio = torch.tensor([-2.0, -2.0]), np.log(2)
    loss, _ = grpo_loss(Tokens(old + ratio, old, *tensors([1, -1], [0.5, 0.5])), Objective())
    assert loss.item() == pytest.approx(-(0.5 * 1.28 - 0.5 * 2))


def test_one_summed_advantage_would_be_another_loss():
    """Negative control: their sum is 0, and so would be the loss."""
    old, ratio = torch.tensor([-2.0]), np.log(2)
    loss, _ = grpo_loss(Tokens(old + ratio, old, *tensors([0.5 * 1 + 0.5 * -1], [1])), Objective())
    assert loss.item() == 0


# --- from calls and rewards ---------------------------------------------------------------------------------------

SESSIONS = {"one": ([[3, 4], [6]], 1.0), "two": ([[7, 8, 9, 10]], 0.0), "three": ([[11, 12, 13]], 0.0)}
"""What each session's calls sampled, and its reward: the mean is 1/3, the deviation sqrt(2)/3."""
RATIOS = {"one": 2.0, "two": 2.0, "three": 0.5}
HELD = {"one": 1.28, "two": 2.0, "three": 0.8}
"""The ratios under the clip: the first session's advantage is positive, the others' negative."""
ROOM = 16
"""Tokens of a row."""


@pytest.mark.parametrize(
    ("weighting", "advantage", "advantages", "weights"),
    [
        ("token", "grpo", (2**0.5, -(0.5**0.5), -(0.5**0.5)), (1 / 10, 1 / 10, 1 / 10)),
        ("session", "grpo", (2**0.5, -(0.5**0.5), -(0.5**0.5)), (1 / 9, 1 / 12, 1 / 9)),
        ("token", "rloo", (1, -1 / 2, -1 / 2), (1 / 10, 1 / 10, 1 / 10)),
        ("constant", "dr-grpo", (2 / 3, -1 / 3, -1 / 3), (1 / 48, 1 / 48, 1 / 48)),
    ],
)
def test_the_loss_by_hand_from_calls_and_rewards(weighting, advantage, advantages, weights, tmp_path):
    """Every sampled token once: 10 of them by token, a third a session, or 1 / (16 x 3 sessions) as in Dr. GRPO."""
    by_hand = -sum(
        weight * held * gain * sum(map(len, sampled))
        for (sampled, _), held, gain, weight in zip(SESSIONS.values(), HELD.values(), advantages, weights, strict=True)
    )
    options = batches.Options(max_tokens=ROOM, weighting=weighting, advantage=advantage)
    rows = batch_of(SESSIONS, tmp_path, options)
    loss = sum(grpo_loss(with_ratios(row, RATIOS), Objective())[0].item() for row in rows)
    assert loss == pytest.approx(by_hand, rel=1e-5)


def batch_of(sessions, folder, options):
    """The rows that the toolkit makes of a group's calls and rewards."""
    book = Book()
    for name, (sampled, _) in sessions.items():
        prompt, parent = [1, 2], None
        for number, output in enumerate(sampled):
            parent = book.call(f"{name}{number}", prompt, output, parent=parent, session_id=name, group_id="g")
            prompt = [*prompt, *output, 5]
    run = book.write(folder / "run")
    rewards.append(run, {name: reward for name, (_, reward) in sessions.items()})
    merge.merge(run, folder / "merged", merge.Options(batch=options, workers=1), lambda *_: None)
    return read_batches(folder / "merged" / "batches")


def with_ratios(row, ratios):
    """The trained tokens of a row as a policy sees them that has moved by a ratio in each session."""
    at = row.loss_mask_T
    moved_T = np.repeat([np.log(ratios[name]) for name in row.session_ids], row.lengths)
    old, gains, weights = (column[at] for column in (row.old_logprobs_T, row.advantages_T, row.loss_weight_T))
    return Tokens(*map(torch.from_numpy, (old + moved_T[at].astype(np.float32), old, gains, weights)))
