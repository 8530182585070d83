"""The baselines and their judge, on sessions small enough to check on paper."""

from __future__ import annotations

from itertools import count

import numpy as np

from tests.harness.baselines import Answer, Row, Verdict, judge, prefix_merging, rerender

END = 99
"""The end of a turn."""
_logprob = count(1)


def answer(name: str, prompt: list[int], output: list[int], parent: str | None = None) -> Answer:
    """A recorded call whose logprobs no other call has."""
    logprobs = np.array([-next(_logprob) / 4096 for _ in output], np.float32)
    return Answer(
        name, "s", np.array(prompt, np.int32), np.array(output, np.int32), logprobs, output[-1] == END, parent
    )


def test_an_unchanged_history_is_one_row_in_either_way():
    """Where the render repeats what was sampled, the splice is exact: 4 of 4 tokens, all in context."""
    one = answer("one", [1, 2], [10, END])
    two = answer("two", [1, 2, 10, END, 5], [11, END], "one")
    (row,) = prefix_merging([one, two])
    assert row.ids.tolist() == [1, 2, 10, END, 5, 11, END]
    assert row.mask.tolist() == [0, 0, 1, 1, 0, 1, 1]
    assert judge([one, two], [row]) == Verdict(sampled=4, trained=4, out_of_context=0, twice=0, rows=1, sessions=1)
    assert rerender([one, two]) == (2, 2)


def test_a_splice_over_a_reply_that_was_rendered_anew_is_out_of_context():
    """The model saw 20 where it had sampled 10: the second reply's two tokens stand behind what it never saw."""
    one = answer("one", [1, 2], [10, END])
    two = answer("two", [1, 2, 20, END, 5], [11, END], "one")
    (row,) = prefix_merging([one, two])
    assert row.ids.tolist() == [1, 2, 10, END, 5, 11, END]
    assert judge([one, two], [row]) == Verdict(sampled=4, trained=4, out_of_context=2, twice=0, rows=1, sessions=1)
    assert rerender([one, two]) == (2, 0)


def test_a_retry_ends_the_chain():
    """After a repeated prompt nothing can be spliced: of four calls one is trained, the attempt that was given up."""
    first = answer("first", [1, 2], [10, END])
    retry = answer("retry", [1, 2], [12, END])
    second = answer("second", [1, 2, 12, END, 5], [13, END], "retry")
    third = answer("third", [1, 2, 12, END, 5, 13, END, 6], [14, END], "second")
    (row,) = prefix_merging([first, retry, second, third])
    assert row.ids.tolist() == [1, 2, 10, END]
    found = judge([first, retry, second, third], [row])
    assert found == Verdict(sampled=8, trained=2, out_of_context=0, twice=0, rows=1, sessions=1)


def test_another_beginning_is_another_row():
    """A sub-agent's prompt is no continuation; interleaved, both keep their chains."""
    calls = [
        answer("main", [1, 2], [10, END]),
        answer("sub", [3, 4], [20, END]),
        answer("main again", [1, 2, 10, END, 5], [11, END], "main"),
        answer("sub again", [3, 4, 20, END, 6], [21, END], "sub"),
    ]
    rows = prefix_merging(calls)
    assert [row.ids.tolist() for row in rows] == [[1, 2, 10, END, 5, 11, END], [3, 4, 20, END, 6, 21, END]]
    assert judge(calls, rows) == Verdict(sampled=8, trained=8, out_of_context=0, twice=0, rows=2, sessions=1)


def test_a_cut_reply_is_closed_by_what_the_next_prompt_has():
    """A reply without its end of turn gets it from the next prompt, as context."""
    whole = answer("whole", [3], [30, END])
    cut = answer("cut", [1, 2], [10, 10])
    after = answer("after", [1, 2, 10, 10, END, 5], [11, END], "cut")
    row = prefix_merging([whole, cut, after])[1]
    assert row.ids.tolist() == [1, 2, 10, 10, END, 5, 11, END]
    assert row.mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_the_judge_sees_a_token_that_is_trained_twice():
    """Two rows with one prefix, both with its tokens on the mask: two places too many."""
    one = answer("one", [1, 2], [10, END])
    row = Row(
        np.array([1, 2, 10, END], np.int32),
        np.array([0, 0, 1, 1], np.uint8),
        np.concatenate([np.zeros(2, np.float32), one.logprobs]),
    )
    assert judge([one], [row, row]) == Verdict(sampled=2, trained=2, out_of_context=0, twice=2, rows=2, sessions=1)


def test_the_judge_sees_context_on_the_mask():
    """A masked place that holds no sampled token is out of context."""
    one = answer("one", [1, 2], [10, END])
    mask = np.array([0, 1, 1, 1], np.uint8)
    row = Row(np.array([1, 2, 10, END], np.int32), mask, np.array([0, 0, *one.logprobs], np.float32))
    assert judge([one], [row]).out_of_context == 1
