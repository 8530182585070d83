"""Which call a prompt continues, by tokens alone, whatever else was sampled behind the same prompt."""

import time

import numpy as np
import pytest

from polar_toolkit.openings import Openings
from polar_toolkit.prompts import resolve, same_prompts
from polar_toolkit.tree import grow


def parent_of(book, name):
    """(call, shared tokens) that a call continues; None for a root. No row names a parent."""
    resolved = resolve(book.calls())
    index = next(i for i, call in enumerate(resolved.calls) if call.call_id == name)
    rope = Openings.of(resolved, same_prompts(resolved)).parent_of(index)
    return rope and (resolved.calls[rope.parent].call_id, rope.shared)


def test_of_many_samples_of_one_prompt_the_one_that_was_continued_is_found(book):
    """300 samples with one beginning, each continued: every continuation finds its own."""
    for i in range(300):
        book.call(f"s{i}", [1, 2], [7, 7, i])
    for i in range(300):
        book.call(f"n{i}", [1, 2, 7, 7, i, 9], [1])
    forest = grow(book.calls())
    assert [node.parent for node in forest.nodes[300:]] == list(range(300))
    assert {node.edge for node in forest.nodes[300:]} == {"exact"}
    assert not any(node.reason for node in forest.nodes)


def test_the_output_that_shares_most_wins(book):
    """Neither the first nor the longest output, but the one that the prompt follows furthest."""
    book.call("short", [1], [5])
    book.call("far", [1], [5, 6, 7, 8])
    book.call("other", [1], [5, 6, 9, 9, 9, 9])
    book.call("next", [1, 5, 6, 7, 3], [4])
    assert parent_of(book, "next") == ("far", 4)


def test_among_equals_a_whole_output_comes_first(book):
    """[5, 6] whole is a better parent than [5, 6, 7] cut, for a prompt that goes on otherwise."""
    book.call("cut", [1], [5, 6, 7])
    book.call("whole", [1], [5, 6])
    book.call("next", [1, 5, 6, 3], [4])
    assert parent_of(book, "next") == ("whole", 3)


@pytest.mark.parametrize(
    ("one", "two", "found"),
    [
        ({"thread_id": "x"}, {"thread_id": "t"}, "two"),
        ({"client_delivered": False}, {}, "two"),
        ({"thread_id": "t", "client_delivered": False}, {"thread_id": "x"}, "one"),
        ({}, {}, "one"),
    ],
)
def test_among_equal_outputs_the_same_thread_then_the_delivered_then_the_earlier_one(book, one, two, found):
    """The same tokens were sampled twice: what is known of the calls decides."""
    book.call("one", [1], [5, 6], **one)
    book.call("two", [1], [5, 6], **two)
    book.call("next", [1, 5, 6, 3], [4], thread_id="t")
    assert parent_of(book, "next") == (found, 3)


def test_prompts_of_one_length_and_one_ending_are_told_apart(book):
    """Four agents whose prompts end alike: each continuation finds its own, though an index sees no difference."""
    tail = list(range(20))
    for agent in range(4):
        book.call(f"a{agent}", [100 + agent, *tail], [5])
    for agent in range(4):
        book.call(f"n{agent}", [100 + agent, *tail, 5, 6], [7])
    assert [parent_of(book, f"n{agent}") for agent in range(4)] == [(f"a{agent}", 22) for agent in range(4)]


def test_a_parent_whose_prompt_is_stored_in_pieces_is_found(book):
    """A plain record may continue a call that is stored as parent + suffix, however short the suffixes are."""
    prompt = [1, 2, 3]
    for turn in range(40):
        book.call(f"c{turn}", prompt, [turn], parent=f"c{turn - 1}" if turn else None)
        prompt = [*prompt, turn, 50]
    book.call("next", [*prompt[:-1], 60], [1])
    book.call("early", [*prompt[: 3 + 2 * 10 + 1], 70], [1])
    assert parent_of(book, "next") == ("c39", len(prompt) - 1)
    assert parent_of(book, "early") == ("c10", 3 + 2 * 10 + 1)


def test_nothing_sampled_no_edge(book):
    """A prompt that only repeats another one, or leaves it before the first sampled token, continues nothing."""
    book.call("a", [1, 2], [5])
    book.call("b", [1, 2], [6])
    book.call("c", [1, 2, 9], [5])
    assert [parent_of(book, name) for name in "abc"] == [None, None, None]


def test_ten_thousand_equal_retries_take_seconds(book):
    """Neither telling them apart nor finding the one that was used is quadratic."""
    prompt = np.arange(500)
    for i in range(10_000):
        book.call(f"r{i}", prompt, [7, 8], prompt_hash=None)
    book.call("next", [*prompt, 7, 8, 9], [1])
    rows = book.calls()
    started = time.process_time()
    forest = grow(rows)
    took = time.process_time() - started
    assert sum(node.reason == "superseded" for node in forest.nodes) == 9_999
    assert (forest.nodes[-1].parent, forest.nodes[-1].edge) == (0, "exact")
    assert took < 5, f"{took:.1f} s"


def test_thousands_of_unrelated_prompts_take_seconds(book):
    """As in a file of records without sessions: 3,000 prompts of as many lengths, which only begin alike."""
    for i in range(3000):
        book.call(f"c{i}", [*range(50), *([1000 + i] * i), 7, 8], [9], prompt_hash=None)
    rows = book.calls()
    started = time.process_time()
    forest = grow(rows)
    took = time.process_time() - started
    assert {node.parent for node in forest.nodes} == {-1}
    assert took < 5, f"{took:.1f} s"
