"""The judge of benchmarks/merge.py sees each way in which training rows can be wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.stage.grading import Marks, Row, grade
from benchmarks.stage.scenarios import SCENARIOS, Scenario, Size, Turn, drifting, interleaved, linear, retried

SMALL = Size(first=40, sampled=8, observed=12)


def row(turns: Sequence[Turn], trained: Sequence[Turn] | None = None) -> Row:
    """The last turn's whole path, with the outputs of some turns on the mask."""
    ids = np.concatenate([turns[-1].prompt, turns[-1].output])
    mask, logprobs = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
    for turn in turns if trained is None else trained:
        here = slice(len(turn.prompt), len(turn.prompt) + len(turn.output))
        mask[here], logprobs[here] = True, turn.logprobs
    return Row(ids, mask, logprobs)


def test_a_session_that_only_grows_is_one_row_with_full_marks():
    """5 turns of 8 sampled tokens on one path: 40 kept, and nothing else."""
    scenario = linear(5, SMALL)
    marks = grade(scenario, [row(scenario.turns)])
    assert marks == Marks(samples=1, kept=40, twice=0, wrong=0, orphans=0)
    assert marks.full(scenario)


def test_a_row_for_each_turn_keeps_everything_and_is_not_full_marks():
    """Without merging there are more rows than there need be."""
    scenario = linear(5, SMALL)
    marks = grade(scenario, [row([turn]) for turn in scenario.turns])
    assert marks == Marks(samples=5, kept=40, twice=0, wrong=0, orphans=0)
    assert not marks.full(scenario)


def test_a_token_on_two_masks_is_counted_twice():
    """The first turn is trained on the whole path and once more by itself."""
    scenario = linear(5, SMALL)
    assert grade(scenario, [row(scenario.turns), row(scenario.turns[:1])]).twice == 8


def test_a_token_behind_other_tokens_is_wrong():
    """One changed token of the first prompt moves all 40 tokens out of their context."""
    scenario = linear(5, SMALL)
    whole = row(scenario.turns)
    whole.ids[3] += 1
    assert grade(scenario, [whole]) == Marks(samples=1, kept=0, twice=0, wrong=40, orphans=0)


def test_a_token_with_the_logprob_of_another_is_wrong():
    """Two exchanged log-probabilities are two wrong tokens."""
    scenario = linear(5, SMALL)
    whole = row(scenario.turns)
    start = len(scenario.turns[0].prompt)
    whole.logprobs[[start, start + 1]] = whole.logprobs[[start + 1, start]]
    assert grade(scenario, [whole]) == Marks(samples=1, kept=38, twice=0, wrong=2, orphans=0)


def test_a_drifted_tail_is_wrong_where_it_stands_in_for_what_was_sampled():
    """Turn 10 drifts: on the path of turn 11, its last 3 tokens were never sampled, and one of their places is gone."""
    scenario = drifting(11, SMALL)
    marks = grade(scenario, [row(scenario.turns)])
    assert (scenario.samples, marks.kept) == (2, 11 * 8 - 3 - 8 + 8)
    assert marks.wrong == 3


def test_an_answer_that_the_session_did_not_go_on_with_is_an_orphan():
    """Turn 5 is asked twice; its unused answer is trained by itself."""
    scenario = retried(7, SMALL)
    unused = [turn for turn in scenario.turns if not turn.wanted]
    marks = grade(scenario, [row([t for t in scenario.turns if t.wanted]), row(unused)])
    assert marks == Marks(samples=2, kept=56, twice=0, wrong=0, orphans=8)


def test_interleaved_agents_need_a_row_each():
    """Four agents of 2 turns: 4 rows hold all."""
    scenario = interleaved(8, SMALL)
    assert grade(scenario, [row(scenario.turns[i::4]) for i in range(4)]).full(scenario)


def test_every_turn_goes_on_from_the_turn_that_it_names():
    """`shared` leading tokens of a prompt are its parent's prompt + output, and the next one, if any, is not."""
    scenarios: list[Scenario] = [make(24, SMALL) for _, make in SCENARIOS]
    for turns in (scenario.turns for scenario in scenarios):
        for turn in (t for t in turns if t.parent >= 0):
            path = np.concatenate([turns[turn.parent].prompt, turns[turn.parent].output])
            assert np.array_equal(turn.prompt[: turn.shared], path[: turn.shared])
            assert turn.shared == len(path) or turn.prompt[turn.shared] != path[turn.shared]
