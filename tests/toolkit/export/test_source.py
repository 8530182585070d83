"""The count of an export."""

from polar_toolkit.export import Tally


def test_a_count_is_told_in_one_line():
    """Rows, trained of sampled, and what is left out with its reason."""
    tally = Tally(rows=1, trained=3, sampled=4)
    assert str(tally) == "1 row, 3 of 4 sampled tokens trained / 75.0%"
    tally.leave_out("no_reward", 1)
    tally.leave_out("no_reward", 1000)
    assert str(tally).endswith("; left out: no_reward 1,001")


def test_nothing_sampled_is_no_share():
    """No division by zero."""
    assert str(Tally()) == "0 rows, 0 of 0 sampled tokens trained / 0.0%"
