"""Rebuilding and verifying prompts."""

import time
import tracemalloc

import numpy as np
import pytest

from polar_toolkit.prompts import begins_with, ending, path_ids, resolve, same_prompts


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


def test_a_prompt_that_is_stored_in_one_piece_is_not_copied(book):
    """Its tokens are a view of the row's buffer."""
    book.call("a", [1, 2, 3], [4])
    resolved = resolve(book.calls())
    assert np.shares_memory(path_ids(resolved, 0, 2), resolved.calls[0].prompt_suffix)
    assert path_ids(resolved, 0, 4).tolist() == [1, 2, 3, 4]
    assert path_ids(resolved, 0, 0).tolist() == []


def test_a_prompt_without_a_recorded_hash_is_taken_as_it_is(book):
    """Also between calls that have one: these are still checked."""
    book.call("a", [1, 2], [3], prompt_hash=None)
    book.call("b", [1, 2, 3, 4], [5], parent="a")
    book.call("c", [1, 2, 3, 4, 5, 6], [7], parent="b", prompt_hash=bytes(16))
    resolved = resolve(book.calls())
    assert resolved.faults == [None, None, "prompt_hash"]
    assert resolved.intact == [True, True, False]


def test_a_prompt_inside_a_parents_output_is_checked_against_its_hash(book):
    """Of the parent's output only what is taken counts."""
    book.call("a", [1, 2], [3, 4, 5])
    book.call("b", [1, 2, 3, 9], [6], parent="a")
    book.call("c", [1, 2, 3, 8], [6], parent="a", prompt_hash=bytes(16))
    assert resolve(book.calls()).faults == [None, None, "prompt_hash"]


def test_equal_prompts_are_one_group_however_they_are_stored(book):
    """Whole, behind a parent, or behind another one; with and without hashes."""
    book.call("a", [1, 2], [3])
    book.call("b", [1, 2], [3], prompt_hash=None)
    book.call("c", [1, 2, 3, 4], [5], parent="a")
    book.call("d", [1, 2, 3, 4], [6], parent="b")
    book.call("e", [1, 2, 3, 4], [7], prompt_hash=None)
    book.call("f", [1, 9, 3, 4], [8])
    book.call("silent", [1, 2], [])
    assert same_prompts(resolve(book.calls())) == [[0, 1], [2, 3, 4], [5]]


def test_prompts_that_end_alike_are_told_apart(book):
    """By all of their tokens, with hashes and without."""
    tail = list(range(30))
    for first in (1, 2, 1):
        book.call(f"h{len(book.rows)}", [first, *tail], [3])
    assert same_prompts(resolve(book.calls())) == [[0, 2], [1]]
    for row in book.rows:
        row["prompt_hash"] = None
    assert same_prompts(resolve(book.calls())) == [[0, 2], [1]]


def test_whether_tokens_begin_with_a_prompt_is_told_piece_by_piece(book):
    """A difference anywhere counts, and a prompt that is longer is no beginning."""
    book.call("a", [1, *[2] * 20], [3])
    book.call("b", [1, *[2] * 20, 3, 4], [5], parent="a")
    resolved = resolve(book.calls())
    whole = np.array([1, *[2] * 20, 3, 4, 9], np.int32)
    changed = whole.copy()
    changed[0] = 7
    assert begins_with(whole, resolved, 1)
    assert begins_with(whole[:-1], resolved, 1)
    assert not begins_with(whole[:-2], resolved, 1)
    assert not begins_with(changed, resolved, 1)


def test_an_ending_reaches_over_as_many_pieces_as_it_takes(book):
    """Sixteen tokens, or the whole of a shorter prompt."""
    book.call("a", [1, 2], [3])
    book.call("b", [1, 2, 3, 4], [5] * 20, parent="a")
    book.call("c", [1, 2, 3, 4, *[5] * 20, 6], [7], parent="b")
    resolved = resolve(book.calls())
    ends = [np.frombuffer(ending(resolved, index), np.int32).tolist() for index in range(3)]
    assert ends == [[1, 2], [1, 2, 3, 4], [*[5] * 15, 6]]


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"prompt_hash": bytes(16)}, "prompt_hash"),
        ({"prompt_len": 3}, "prompt_length"),
        ({"prompt_len": 1, "prompt_shared": -1}, "prompt_length"),
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


def test_one_broken_row_does_not_put_others_under_suspicion(book):
    """All outputs are looked at once; where something is wrong, each by itself."""
    book.call("a", [1], [2])
    book.call("b", [1], [3], logprobs=np.array([np.nan], np.float32))
    book.call("c", [1], [4])
    assert resolve(book.calls()).faults == [None, "logprobs_range", None]


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
