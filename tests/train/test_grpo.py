"""The step: what it learns, what does not change it, and when it refuses."""

import json

import numpy as np
import pytest
import torch

from polar_train import passes
from polar_train.data import read_batches
from polar_train.errors import BadInput, NothingLearned
from polar_train.forest import Layout
from polar_train.grpo import Settings, backward, train, update
from polar_train.model import load, token_logprobs
from polar_train.objective import Objective, Tokens, grpo_loss

CPU = torch.device("cpu")


def silent(_done: int, _planned: int) -> None:
    """Progress for tests."""


@pytest.fixture
def on_policy(tiny_model, draw):
    """Trajectories whose old logprobs are the tiny model's own, as an exact engine would record them."""
    model = load(tiny_model, CPU)

    def make(*lengths, temperature=1.0):
        drawn = draw(*lengths, temperature=temperature)
        for one in drawn:
            with torch.no_grad():
                got = token_logprobs(
                    model, torch.tensor(one.ids).long(), torch.arange(len(one.ids)), torch.tensor(one.mask).bool(),
                    torch.full((len(one.ids),), temperature),
                )  # fmt: skip
            one.old[one.mask == 1] = got.numpy()
        return drawn

    return make


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gap_to_the_sampling_policy_is_rounding(tiny_model, write, on_policy, temperature):
    """On the policy that sampled, trainer and engine logprobs agree and nothing is clipped, at any temperature."""
    rows = read_batches(write(on_policy(40, 25, temperature=temperature)))
    (first,) = update(load(tiny_model, CPU), rows, Settings(), advance=silent)
    assert first.gap_max < 1e-4
    assert first.clip_share == 0


def test_a_step_moves_logprobs_with_their_advantage(tiny_model, write, on_policy):
    """After one step the trained tokens of the good trajectory are likelier, those of the bad one less so."""
    good, bad = on_policy(40, 40)
    good.advantage, bad.advantage = 1.0, -1.0
    rows = read_batches(write([good], [bad]))
    model = load(tiny_model, CPU)
    update(model, rows, Settings(lr=1e-4), advance=silent)
    change = []
    for one in (good, bad):
        trained = torch.tensor(one.mask).bool()
        with torch.no_grad():
            new = token_logprobs(
                model, torch.tensor(one.ids).long(), torch.arange(len(one.ids)), trained, torch.ones(len(one.ids))
            )
        change.append((new - torch.tensor(one.old)[trained]).sum().item())
    assert change[0] > 0 > change[1]


def test_how_a_batch_is_packed_changes_nothing(tiny_model, write, draw):
    """One row of three trajectories and three rows of one give the same loss and gradient norm."""
    drawn = draw(60, 31, 18)
    packed = read_batches(write(drawn, folder="packed"))
    separate = read_batches(write(*[[one] for one in drawn], folder="separate"))
    ours = [update(load(tiny_model, CPU), rows, Settings(), advance=silent)[0] for rows in (packed, separate)]
    assert ours[0].loss == pytest.approx(ours[1].loss, rel=1e-5)
    assert ours[0].grad_norm == pytest.approx(ours[1].grad_norm, rel=1e-5)


def test_later_steps_see_the_ratio_of_the_first(tiny_model, write, on_policy):
    """With two steps the second starts away from the sampling policy."""
    rows = read_batches(write(on_policy(40, 25)))
    first, second = update(load(tiny_model, CPU), rows, Settings(lr=1e-4, steps=2), advance=silent)
    assert first.gap_mean < 1e-4 < second.gap_mean
    assert second.loss < first.loss


def test_steps_beyond_the_clip_are_an_error(tiny_model, write, on_policy):
    """When a step was so large that every token is clipped, the sentence says so."""
    rows = read_batches(write(on_policy(40, 25)))
    with pytest.raises(NothingLearned, match="the clip holds back 24 of 24 tokens"):
        update(load(tiny_model, CPU), rows, Settings(lr=1e-3, steps=2), advance=silent)


def test_the_layout_changes_nothing(tiny_model, write, draw):
    """Every layout gives the same loss and gradient norm, also where a trajectory is longer than a node."""
    rows = read_batches(write(draw(1200, 60, 31)))
    ways = [Settings(layout=layout, pass_tokens=tokens) for layout in Layout for tokens in (500, 2048)]
    seen = [update(load(tiny_model, CPU), rows, way, advance=silent)[0] for way in ways]
    assert [one.tokens for one in seen] == [seen[0].tokens] * 6
    assert [one.loss for one in seen] == pytest.approx([seen[0].loss] * 6, rel=1e-5)
    assert [one.grad_norm for one in seen] == pytest.approx([seen[0].grad_norm] * 6, rel=1e-5)


def test_a_model_that_cannot_be_cut_is_not(sliding_model, write, draw):
    """With a sliding window each trajectory is one pass, however long; beyond a length activations are made anew."""
    rows = read_batches(write(draw(308), draw(60)))
    model = load(sliding_model, CPU).train()
    (forest,) = passes.grow(rows, model, Layout.TREE, 65536)
    assert len(forest.nodes(len(forest))) == 2
    backward(model, forest, Settings(pass_tokens=300))
    recomputed = [parameter.grad.clone() for parameter in model.parameters()]
    assert model.is_activation_checkpointing
    model.zero_grad()
    for row in rows:
        one = torch.tensor(row.input_ids_T).long()
        got = token_logprobs(
            model, one, torch.arange(len(one)), torch.tensor(row.loss_mask_T), torch.tensor(row.temperature_T)
        )
        on = row.loss_mask_T
        columns = (torch.tensor(c[on]) for c in (row.old_logprobs_T, row.advantages_T, row.loss_weight_T))
        grpo_loss(Tokens(got, *columns), Objective())[0].backward()
    assert all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(recomputed, model.parameters(), strict=True))


def test_truncated_importance_holds_back_what_the_engine_made_unlikely(tiny_model, write, on_policy):
    """Tokens that the engine gave less than the trainer weigh at most the cap; the ratio starts at 1."""
    drawn = on_policy(40)
    drawn[0].old[drawn[0].mask == 1] -= 5.0
    rows = read_batches(write(drawn))
    capped, against = (
        update(load(tiny_model, CPU), rows, Settings(objective=objective), advance=silent)[0]
        for objective in (Objective(importance_cap=2.0), Objective(clip_high=1e9))
    )
    assert capped.ratio_mean == pytest.approx(1)
    assert against.ratio_mean == pytest.approx(np.exp(5.0), rel=1e-3)
    assert capped.loss == pytest.approx(against.loss * 2.0 / np.exp(5.0), rel=1e-3)


def test_the_second_update_is_against_the_policy_before_the_first(tiny_model, write, on_policy):
    """With an importance cap, later updates are clipped against the proximal policy, not against the engine's."""
    drawn = on_policy(40, 30)
    for one in drawn:
        one.old[one.mask == 1] -= 3.0
    rows = read_batches(write(drawn))
    settings = Settings(lr=1e-5, steps=2, objective=Objective(importance_cap=2.0))
    first, second = update(load(tiny_model, CPU), rows, settings, advance=silent)
    assert first.ratio_mean == pytest.approx(1)
    assert 0 < abs(second.ratio_mean - 1) < 0.1


def test_kl_to_a_reference_is_reported_and_pulls(tiny_model, write, on_policy):
    """At the reference itself it is 0; away from it, it is positive and part of the loss."""
    rows = read_batches(write(on_policy(40, 30)))
    reference, settings = load(tiny_model, CPU).eval(), Settings(lr=1e-3, steps=2, objective=Objective(kl=0.1))
    first, second = update(load(tiny_model, CPU), rows, settings, advance=silent, reference=reference)
    assert first.kl_mean == pytest.approx(0, abs=1e-6)
    assert second.kl_mean > 1e-4


def test_the_reference_pulls_at_tokens_without_advantage(tiny_model, write, draw):
    """The gradient at advantage 0 is the limit of that at small ones, though without a KL there would be none."""
    reference, norms = load(tiny_model, CPU).eval(), []
    with torch.no_grad():
        for weight in reference.parameters():
            weight.mul_(0.9)
    for advantage in (0.0, 1e-9):
        drawn = draw(40, 30)
        drawn[0].advantage, drawn[1].advantage = 1e-3, advantage
        rows = read_batches(write([drawn[0]], [drawn[1]], folder=str(advantage)))
        settings = Settings(objective=Objective(kl=1.0), layout=Layout.PACKED)
        norms.append(update(load(tiny_model, CPU), rows, settings, advance=silent, reference=reference)[0].grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_kl_without_a_reference_is_refused(tiny_model, write, draw, tmp_path):
    """And a reference without a weight, too: one of them was forgotten."""
    batches = write(draw(40))
    with pytest.raises(BadInput, match="give both or neither"):
        train(batches, tiny_model, tmp_path / "a", Settings(objective=Objective(kl=0.1)), advance=silent)
    with pytest.raises(BadInput, match="give both or neither"):
        train(batches, tiny_model, tmp_path / "a", Settings(), advance=silent, reference=tiny_model)


def test_trajectories_without_advantage_count_but_have_no_gradient(tiny_model, write, draw):
    """Skipping their backward pass leaves the gradient as it was, and their tokens in the figures."""
    drawn = draw(40, 30)
    drawn[1].advantage = 0.0
    rows = read_batches(write([drawn[0]], [drawn[1]]))
    (seen,) = update(load(tiny_model, CPU), rows, Settings(), advance=silent)
    assert seen.tokens == sum(int(one.mask.sum()) for one in drawn)
    assert seen.grad_norm > 0


def test_progress_counts_every_forest(tiny_model, write, draw):
    """The caller sees done and planned forests over all steps."""
    seen = []
    rows = read_batches(write(draw(40, 30)))
    settings = Settings(steps=2, row_tokens=40)
    update(load(tiny_model, CPU), rows, settings, advance=lambda done, planned: seen.append((done, planned)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_train_writes_its_figures_beside_the_weights(tiny_model, write, draw, tmp_path):
    """train.json holds the settings, the versions that sampled, and the figures of each update."""
    report = train(write(draw(40, 30)), tiny_model, tmp_path / "new", Settings(), advance=silent)
    written = json.loads((tmp_path / "new" / "train.json").read_text())
    assert written == json.loads(json.dumps(report.as_dict()))
    assert written["versions"] == ["v1"]
    assert written["updates"][0]["grad_norm"] > 0
    assert written["trajectories"] == 2


def test_no_trainable_token_is_an_error(tiny_model, write, draw, tmp_path):
    """A batch whose mask is empty writes no checkpoint."""
    drawn = draw(40)
    drawn[0].mask[:] = 0
    with pytest.raises(NothingLearned, match="no trainable token"):
        train(write(drawn), tiny_model, tmp_path / "new", Settings(), advance=silent)
    assert not (tmp_path / "new").exists()


def test_a_zero_gradient_is_an_error(tiny_model, write, draw, tmp_path):
    """Equal rewards in every group write no checkpoint."""
    drawn = draw(40, 30)
    for one in drawn:
        one.advantage = 0.0
    with pytest.raises(NothingLearned, match="gradient norm is 0"):
        train(write(drawn), tiny_model, tmp_path / "new", Settings(), advance=silent)
    assert not (tmp_path / "new").exists()


def test_a_loss_that_is_not_finite_is_an_error(tiny_model, write, draw, tmp_path):
    """A ratio that overflows names the gap that made it."""
    drawn = draw(40)
    drawn[0].old[:] = -1000.0
    drawn[0].advantage = -1.0
    with pytest.raises(NothingLearned, match="is not finite: the largest gap"):
        train(write(drawn), tiny_model, tmp_path / "new", Settings(), advance=silent)


def test_ids_beyond_the_vocabulary_are_refused(tiny_model, write, draw, tmp_path):
    """A batch of another model is told by its ids."""
    drawn = draw(40)
    drawn[0].ids[3] = 5000
    with pytest.raises(BadInput, match=r"token id 5000, the vocabulary of the model at .* has 320"):
        train(write(drawn), tiny_model, tmp_path / "new", Settings(), advance=silent)


def test_an_existing_checkpoint_is_refused_before_any_work(tiny_model, tmp_path):
    """Not even the batch is read."""
    (tmp_path / "new").mkdir()
    with pytest.raises(BadInput, match="exists and is not overwritten"):
        train(tmp_path / "nowhere", tiny_model, tmp_path / "new", Settings(), advance=silent)
