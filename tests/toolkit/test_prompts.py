"""Rebuilding and verifying prompts."""

import time
import tracemalloc

import numpy as np
import pytest

from polar_toolkit.prompts import path_ids, resolve


def prompt(resolved, index):
    return path_ids(resolved, index, resolved.calls[index].prompt_len).tolist()


def test_a_prompt_is_the_parents_prompt_and_output_and_its_own_suffix(book):
    """A stored suffix is put behind the parent's tokens."""
    book.call("a", [1, 2], [3, 4])
    book.call("b", [1, 2, 3, 4, 5], [6], parent="a")
    book.call("c", [1, 2, 3, 4, 5, 6, 7], [8], parent="b")
    resolved = resolve(book.calls())
    assert resolved.faults == [None, None, None]
    assert [prompt(resolved, i) for i in range(3)] == [[1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]]


def test_a_prompt_that_leaves_the_parents_output_shares_only_what_it_takes(book):
    """A call may share a part of the parent's output."""
    book.call("a", [1, 2], [3, 4, 5])
    book.call("b", [1, 2, 3, 9], [6], parent="a")
    resolved = resolve(book.calls())
    assert (resolved.ropes[1].parent, resolved.ropes[1].shared) == (0, 3)
    assert prompt(resolved, 1) == [1, 2, 3, 9]


def test_a_stored_parent_that_gives_no_sampled_token_is_replaced_by_the_ancestor_that_does(book):
    """Sharing only what the parent took from further up makes the call a child of further up."""
    book.call("a", [1, 2], [3, 4])
    book.call("b", [1, 2, 3, 4, 5, 6], [7], parent="a")
    book.call("c", [1, 2, 3, 4, 5, 9], [8], parent="b")
    resolved = resolve(book.calls())
    assert (resolved.ropes[2].parent, resolved.ropes[2].shared) == (0, 4)
    assert prompt(resolved, 2) == [1, 2, 3, 4, 5, 9]
    assert resolved.faults == [None, None, None]


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"prompt_hash": bytes(16)}, "prompt_hash"),
        ({"prompt_len": 3}, "prompt_length"),
        ({"logprobs": np.array([-0.5], np.float32)}, "logprobs_length"),
        ({"logprobs": np.array([-0.5, np.nan], np.float32)}, "logprobs_range"),
        ({"logprobs": np.array([-0.5, -np.inf], np.float32)}, "logprobs_range"),
        ({"logprobs": np.array([-0.5, 0.1], np.float32)}, "logprobs_range"),
        ({"output_ids": np.array([-1, 4], np.int32)}, "negative_id"),
        ({"temperature": 0.0}, "temperature"),
        ({"parent_call_id": "nobody"}, "unresolved_parent"),
        ({"parent_call_id": "a"}, "unresolved_parent"),
    ],
)
def test_a_row_that_breaks_an_invariant_is_quarantined_with_a_reason(book, columns, fault):
    """Each broken invariant of a row has a name."""
    book.call("a", [1, 2], [3, 4], **columns)
    assert resolve(book.calls()).faults == [fault]


def test_a_call_behind_a_corrupt_prompt_is_quarantined_too(book):
    """What cannot be rebuilt cannot be context."""
    book.call("a", [1, 2], [3, 4], prompt_hash=bytes(16))
    book.call("b", [1, 2, 3, 4, 5], [6], parent="a")
    assert resolve(book.calls()).faults == ["prompt_hash", "unresolved_parent"]


def test_bad_logprobs_do_not_spoil_the_calls_behind(book):
    """Tokens with unusable logprobs are still verified context."""
    book.call("a", [1, 2], [3, 4], logprobs=np.array([np.nan, -1], np.float32))
    book.call("b", [1, 2, 3, 4, 5], [6], parent="a")
    assert resolve(book.calls()).faults == ["logprobs_range", None]


def test_a_row_that_comes_twice_counts_once(book):
    """The second row of one (call, choice) is quarantined."""
    book.call("a", [1], [2])
    book.call("a", [1], [2])
    assert resolve(book.calls()).faults == [None, "duplicate_call"]


def test_a_chain_of_5000_turns_is_resolved_in_linear_memory_and_seconds(book):
    """No prompt is materialised: 5,000 turns of 30 tokens would be 1.5 GB as full prompts."""
    book.chain(5000)
    calls = book.calls()
    tracemalloc.start()
    started = time.monotonic()
    resolved = resolve(calls)
    took, (_, peak) = time.monotonic() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert set(resolved.faults) == {None}
    assert peak < 30e6, f"{peak / 1e6:.0f} MB"
    assert took < 5, f"{took:.1f} s"
