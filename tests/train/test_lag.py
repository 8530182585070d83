"""Lag: every token's age in weight versions, and what becomes of the old ones."""

from dataclasses import replace

import numpy as np
import pytest

from polar_train.data import Row, read_batches
from polar_train.errors import BadInput
from polar_train.lag import Lag, LagFigures, Versions, bound

BASE = Versions("v1")


@pytest.fixture
def row(write, draw) -> Row:
    """Ten tokens, of which the last four bear loss: sampled by v1, step-000002, step-000002 and step-000003."""
    (row,) = read_batches(write(draw(10)))
    mask_T = np.arange(10) >= 6
    codes_T = np.array([0] * 7 + [1, 1, 2], np.int32)
    weights_T = np.where(mask_T, np.float32(0.25), np.float32(0))
    names = ("v1", "step-000002", "step-000003")
    return replace(row, loss_mask_T=mask_T, loss_weight_T=weights_T, versions_T=codes_T, version_names=names)


def test_versions_are_the_first_name_and_then_one_a_step():
    """Names and numbers are each other's inverse; other names are nobody's."""
    assert [BASE.name(step) for step in (0, 1, 12)] == ["v1", "step-000001", "step-000012"]
    assert [BASE.step(BASE.name(step)) for step in (0, 1, 12, 1_234_567)] == [0, 1, 12, 1_234_567]
    assert [BASE.step(name) for name in ("default", "step-1", "step-000000", "")] == [None] * 4


def test_lag_is_how_many_versions_ago_a_token_was_sampled(row):
    """Of the trained tokens alone, by hand: 3, 1, 1 and 0 before step 3."""
    rows, figures = bound([row], BASE, 3, Lag())
    assert figures == LagFigures(mean=1.25, max=3, tokens_beyond=0)
    assert rows[0] is row


def test_a_token_beyond_the_bound_is_dropped_and_the_others_keep_their_weights(row):
    """Nothing is normalised anew."""
    (bounded,), figures = bound([row], BASE, 3, Lag(max=1))
    assert figures == LagFigures(mean=1.25, max=3, tokens_beyond=1)
    assert np.flatnonzero(bounded.loss_mask_T).tolist() == [7, 8, 9]
    assert bounded.loss_weight_T[6:].tolist() == [0, 0.25, 0.25, 0.25]


def test_a_token_beyond_the_bound_may_weigh_less_instead(row):
    """By the factor that was asked for; it still bears loss."""
    (bounded,), figures = bound([row], BASE, 3, Lag(max=0, beyond=0.5))
    assert figures.tokens_beyond == 3
    assert bounded.loss_mask_T.tolist() == row.loss_mask_T.tolist()
    assert bounded.loss_weight_T[6:].tolist() == [0.125, 0.125, 0.125, 0.25]


def test_a_batch_that_is_wholly_too_old_is_refused(row):
    """With its age, the bound and what to do."""
    with pytest.raises(BadInput, match=r"all 4 trained tokens .* more than 2 .* 'step-000009', the oldest 9 before: "):
        bound([row], BASE, 9, Lag(max=2))
    _, figures = bound([row], BASE, 9, Lag(max=2, beyond=0.1))
    assert figures.tokens_beyond == 4


def test_a_version_of_nobody_is_refused_by_name(row):
    """The trainer cannot know how old it is."""
    with pytest.raises(BadInput, match=r"weight version 'v1', which is neither 'default' nor 'step-NNNNNN'"):
        bound([row], Versions("default"), 3, Lag())


def test_a_version_that_is_still_to_come_is_refused(row):
    """It is of another run, or of checkpoints that are gone."""
    with pytest.raises(BadInput, match=r"weight version 'step-000003', and the model here is 'step-000002'"):
        bound([row], BASE, 2, Lag())


def test_the_versions_of_tokens_without_loss_do_not_matter(row):
    """Context has none."""
    named = replace(row, versions_T=np.where(row.loss_mask_T, row.versions_T, 3).astype(np.int32))
    _, figures = bound([replace(named, version_names=(*row.version_names, ""))], BASE, 3, Lag())
    assert figures.max == 3


def test_rows_without_loss_have_no_lag(row):
    """And are given back as they are."""
    silent = replace(row, loss_mask_T=np.zeros(10, np.bool_))
    assert bound([silent], BASE, 0, Lag(max=0)) == ([silent], LagFigures(0.0, 0, 0))
