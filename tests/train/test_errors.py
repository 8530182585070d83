"""The errors of the training commands."""

import pytest

from polar_train.errors import BadInput, Disagreement, NothingLearned, PushFailed, TrainError


@pytest.mark.parametrize(("error", "code"), [(BadInput, 2), (NothingLearned, 3), (PushFailed, 3), (Disagreement, 3)])
def test_exit_code_says_which_kind_of_error_it_was(error, code):
    """Unusable input exits with 2, a result that does not hold with 3."""
    assert issubclass(error, TrainError)
    assert error.exit_code == code
