"""The prompt of a call: whether it fits, how much of it a re-render shares, and when that is looked at."""

from __future__ import annotations

import numpy as np
import pytest

from polar_mitm.engine import Description
from polar_mitm.errors import ContextOverflow
from polar_mitm.prompting import check_fits, is_audited, shared_prefix


def test_a_prompt_must_leave_room_for_a_token() -> None:
    """And for the position that SGLang keeps free: two tokens short of the context is the longest prompt."""
    described = Description("m", 10, "v")
    check_fits(np.zeros(8, np.int32), described)
    with pytest.raises(ContextOverflow, match="9 tokens"):
        check_fits(np.zeros(9, np.int32), described)


@pytest.mark.parametrize(("b", "shared"), [([1, 2, 3], 3), ([1, 2], 2), ([1, 9, 3], 1), ([], 0), ([1, 2, 3, 4], 3)])
def test_the_shared_prefix_is_counted_in_tokens(b: list[int], shared: int) -> None:
    """Up to the first difference, or the end of the shorter."""
    assert shared_prefix(np.array([1, 2, 3], np.int32), np.array(b, np.int32)) == shared


def test_every_call_of_a_short_session_is_audited() -> None:
    """Whatever the length of its prompts, and every short prompt of a long session."""
    assert all(is_audited(f"call{i}", i, 100_000) for i in range(8))
    assert all(is_audited(f"call{i}", 1000, 1024) for i in range(100))


@pytest.mark.parametrize("length", [8_192, 32_768])
def test_the_audit_of_later_calls_costs_the_same_whatever_their_length(length: int) -> None:
    """On average the render of 1,024 tokens a call."""
    audited = sum(is_audited(f"call{i}", 50, length) for i in range(4_000))
    assert audited * length / 4_000 == pytest.approx(1_024, rel=0.25)
