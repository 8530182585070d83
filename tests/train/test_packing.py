"""Layouts of a row: equal gradients, and the silent mistakes that are not."""

import numpy as np
import pytest
import torch

from polar_train.data import read_batches
from polar_train.model import load, token_logprobs
from polar_train.objective import grpo_loss
from polar_train.packing import split, to_pass

CPU = torch.device("cpu")


@pytest.fixture
def model(tiny_model):
    return load(tiny_model, CPU)


@pytest.fixture
def packed_row(write, draw):
    """Four trajectories in one row, one of them a single sampled token after one prompt token."""
    return read_batches(write(draw(60, 2, 41, 33)))[0]


def gradient(model, passes, logprobs=None) -> torch.Tensor:
    """The whole gradient as one vector, after a backward pass over each pass."""
    model.zero_grad(set_to_none=True)
    for one in passes:
        forward = logprobs or token_logprobs
        got = forward(model, one.input_ids_T, one.position_ids_T, one.loss_mask_T, one.temperature_T)
        grpo_loss(got, one.old_logprobs_L, one.advantages_L, one.weights_L, clip_low=9, clip_high=9e9)[0].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def error(got: torch.Tensor, true: torch.Tensor) -> float:
    """Frobenius error relative to the true gradient."""
    return ((got - true).norm() / true.norm()).item()


def test_a_split_row_is_its_trajectories(packed_row):
    """Splitting keeps every token, in order, and makes each position start at 0."""
    parts = list(split(packed_row))
    assert [len(part.input_ids_T) for part in parts] == [60, 2, 41, 33]
    assert np.array_equal(np.concatenate([part.input_ids_T for part in parts]), packed_row.input_ids_T)
    assert all(part.position_ids_T[0] == 0 and part.lengths.tolist() == [len(part.input_ids_T)] for part in parts)
    assert [part.trajectory_ids for part in parts] == [("t0",), ("t1",), ("t2",), ("t3",)]


def test_packed_and_separate_rows_give_the_same_logprobs(model, packed_row):
    """No token of a packed row sees another trajectory."""

    def logprobs(row):
        one = to_pass(row, CPU)
        with torch.no_grad():
            return token_logprobs(model, one.input_ids_T, one.position_ids_T, one.loss_mask_T, one.temperature_T)

    separate = torch.cat([logprobs(part) for part in split(packed_row)])
    assert torch.allclose(logprobs(packed_row), separate, atol=1e-5)


def test_packed_and_separate_rows_give_the_same_gradient(model, packed_row):
    """Frobenius error below 1e-5 in float32."""
    separate = gradient(model, [to_pass(part, CPU) for part in split(packed_row)])
    assert error(gradient(model, [to_pass(packed_row, CPU)]), separate) < 1e-5


def _full(model, ids, positions, mask, temperature, **extra):
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **extra).logits[0]
    at = mask.nonzero()[:, 0]
    return (logits[at - 1] / temperature[at, None]).log_softmax(-1).gather(1, ids[at, None])[:, 0]


def mask_of_ones(model, ids, positions, mask, temperature):
    return _full(model, ids, positions, mask, temperature, attention_mask=torch.ones_like(ids)[None])


def positions_that_run_on(model, ids, positions, mask, temperature):
    return _full(model, ids, torch.arange(len(ids)), mask, temperature)


def logits_of_the_token_itself(model, ids, positions, mask, temperature):
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    at = mask.nonzero()[:, 0]
    return (logits[at] / temperature[at, None]).log_softmax(-1).gather(1, ids[at, None])[:, 0]


def test_the_plain_form_of_the_controls_is_right(model, packed_row):
    """The controls below are wrong by their one mistake, not by how they are written."""
    one = to_pass(packed_row, CPU)
    assert error(gradient(model, [one], _full), gradient(model, [one])) < 1e-5


@pytest.mark.parametrize("mistake", [mask_of_ones, positions_that_run_on, logits_of_the_token_itself])
def test_silent_mistakes_change_the_gradient(model, packed_row, mistake):
    """Negative controls: none of these raises, each would train on something else."""
    one = to_pass(packed_row, CPU)
    assert error(gradient(model, [one], mistake), gradient(model, [one])) > 0.05


def test_a_pass_without_advantage_teaches_nothing(write, draw):
    """Equal rewards in a group leave only the forward pass."""
    drawn = draw(30)
    assert to_pass(read_batches(write(drawn))[0], CPU).learns
    drawn[0].advantage = 0.0
    assert not to_pass(read_batches(write(drawn))[0], CPU).learns
