"""The cases in which mergers of agent calls lose tokens, train them twice or train them out of context, each with the
right tokens and masks written out.

Their like that merging does not decide stands elsewhere: replies spelled anew by the harness, reminders, concurrent
calls of one parent and cut tool calls in tests/mitm/test_acceptance.py; reasoning that a template drops, under both
policies, in tests/mitm/test_prompting.py; disconnects in tests/mitm/test_turn.py; lost calls in
tests/harness/test_durability.py; streams that add up to plain answers, fed to the SDKs byte by byte, in
tests/judges/test_streams.py; error shapes and overflow in tests/judges/test_errors.py; count_tokens, which generates
nothing, in tests/judges/test_side_routes.py and tests/mitm/test_gateway.py; export to trainers in
tests/toolkit/export.
"""

import itertools
import tracemalloc

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from polar_toolkit import merge, rewards, trajectories
from polar_toolkit.cli import app
from polar_toolkit.tree import grow

FULL = {"prompt_hash": None, "root_reason": "unknown_history"}
"""Columns of a plain record of others: a whole prompt, no parent, no hash."""


def built(book, order=None):
    """(tokens, mask) of each trajectory."""
    return [(t.input_ids.tolist(), t.loss_mask.tolist()) for t in trajectories.build(grow(book.calls(order)))]


def fates(book, order=None):
    """(edge, reason) of each call."""
    forest = grow(book.calls(order))
    return {f"{n.call.call_id}.{n.call.choice}": (n.edge, n.reason) for n in forest.nodes}


def quiet(run, done, total):
    """Progress that nobody watches."""


def test_four_interleaved_agents_of_25_turns_are_four_trajectories(book):
    """As plain records in turn: 100 calls, 4 rows, all 200 sampled tokens trained once, each behind its own agent's."""
    prompts = {agent: [100 + agent, 7] for agent in range(4)}
    for turn in range(25):
        for agent in range(4):
            output = [1000 + turn, 2000 + agent]
            book.call(f"{agent}-{turn}", prompts[agent], output, **FULL)
            prompts[agent] = [*prompts[agent], *output, 7]
    turns = [[token for turn in range(25) for token in (1000 + turn, 2000 + agent, 7)][:-1] for agent in range(4)]
    assert built(book) == [
        ([100 + agent, 7, *turns[agent]], [0, 0, *([1, 1, 0] * 25)[:-1]]) for agent in range(4)
    ]  # fmt: skip


def test_turns_that_two_leaves_share_are_trained_once(book):
    """Two leaves behind two common turns: the four common tokens are trained in the first, context in the second."""
    book.call("a", [1], [2, 3])
    book.call("b", [1, 2, 3, 4], [5, 6], parent="a")
    book.call("c", [1, 2, 3, 4, 5, 6, 7], [8], parent="b")
    book.call("d", [1, 2, 3, 4, 5, 6, 9], [10], parent="b")
    assert built(book) == [
        ([1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 1, 0, 1, 1, 0, 1]),
        ([1, 2, 3, 4, 5, 6, 9, 10], [0, 0, 0, 0, 0, 0, 0, 1]),
    ]


def test_drift_in_the_tail_of_the_last_output_branches_there(book):
    """The next prompt replaces the last of three sampled tokens: it is trained where it was sampled, the two before
    it are context of what follows, and nothing is dropped."""
    book.call("a", [1], [2, 3, 4], **FULL)
    book.call("b", [1, 2, 3, 9, 5], [6], **FULL)
    assert fates(book) == {"a.0": ("root(unknown_history)", None), "b.0": ("inside(1)", None)}
    assert built(book) == [
        ([1, 2, 3, 4], [0, 1, 1, 1]),
        ([1, 2, 3, 9, 5, 6], [0, 0, 0, 0, 0, 1]),
    ]


def test_drift_before_all_that_was_sampled_is_a_root_with_its_reason(book):
    """A changed first message: two rows, each in its own context."""
    book.call("a", [1, 2], [3])
    book.call("b", [1, 9, 3, 4], [5], root_reason="edited_history")
    assert fates(book)["b.0"] == ("root(edited_history)", None)
    assert built(book) == [([1, 2, 3], [0, 0, 1]), ([1, 9, 3, 4, 5], [0, 0, 0, 0, 1])]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("first", ["orphan", "used"])
def test_a_retrys_orphan_is_not_trained_whatever_the_order_of_rows(book, order, first):
    """The used answer is trained also when it was made first, and when its row comes last."""
    outputs = {"orphan": [3, 3], "used": [4]}
    for name in sorted(outputs, key=lambda name: name != first):
        book.call(name, [1, 2], outputs[name])
    book.call("next", [1, 2, 4, 5], [6], parent="used")
    assert fates(book, order)["orphan.0"] == ("root(first)", "superseded")
    assert built(book, order) == [([1, 2, 4, 5, 6], [0, 0, 1, 0, 1])]


@pytest.mark.parametrize("stored", [True, False])
def test_of_three_choices_the_parent_is_the_one_that_was_continued(book, stored):
    """n = 3: the second was continued, by pointer or by tokens; the others are samples of their own."""
    for choice in range(3):
        book.call("a", [1, 2], [3, 10 + choice], choice=choice)
    book.call("b", [1, 2, 3, 11, 9], [5], **({"parent": ("a", 1)} if stored else FULL))
    assert [node.parent for node in grow(book.calls()).nodes] == [-1, -1, -1, 1]
    assert built(book) == [
        ([1, 2, 3, 10], [0, 0, 1, 1]),
        ([1, 2, 3, 12], [0, 0, 1, 1]),
        ([1, 2, 3, 11, 9, 5], [0, 0, 1, 1, 0, 1]),
    ]


def test_a_chain_of_5000_turns_takes_memory_linear_in_its_tokens(new_book):
    """150,000 tokens: no recursion, and twice the turns take twice the memory."""
    peaks = []
    for turns in (2500, 5000):
        book = new_book()
        book.chain(turns)
        rows = book.calls()
        tracemalloc.start()
        (path,) = trajectories.build(grow(rows))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (len(path.input_ids), int(path.loss_mask.sum())) == (turns * 30, turns * 10)
    assert peaks[1] < 2.5 * peaks[0], peaks
    assert peaks[1] < 30e6, peaks


def test_corrupt_rows_are_quarantined_with_their_reasons(book):
    """Each is listed; the good ones are trained as if the others were not there."""
    book.call("good", [1, 2], [3])
    book.call("short", [1, 2], [4, 4], logprobs=np.array([-0.5], np.float32), thread_id="b")
    book.call("nan", [1, 2], [5], logprobs=np.array([np.nan], np.float32), thread_id="c")
    book.call("certain", [1, 2], [6], logprobs=np.array([0.5], np.float32), thread_id="d")
    book.call("hash", [1, 2], [7], prompt_hash=bytes(16), thread_id="e")
    book.call("length", [1, 2], [8], prompt_len=3, thread_id="f")
    book.call("orphan", [1, 2], [9], parent_call_id="nobody", parent_choice=0, thread_id="g")
    book.call("good", [1, 2], [3])
    reasons = [(node.call.call_id, node.reason) for node in grow(book.calls()).nodes]
    assert reasons == [
        ("good", None),
        ("short", "quarantined_logprobs_length"),
        ("nan", "quarantined_logprobs_range"),
        ("certain", "quarantined_logprobs_range"),
        ("hash", "quarantined_prompt_hash"),
        ("length", "quarantined_prompt_length"),
        ("orphan", "quarantined_unresolved_parent"),
        ("good", "quarantined_duplicate_call"),
    ]
    assert built(book) == [([1, 2, 3], [0, 0, 1])]


def test_quarantined_tokens_fail_a_merge_that_asks_for_more(tmp_path, book):
    """Exit code 3 when less than the asked share is trained: here 1 of 3 sampled tokens."""
    book.call("good", [1, 2], [3])
    book.call("bad", [1, 9], [4, 4], prompt_hash=bytes(16))
    run = book.write(tmp_path / "run")
    assert CliRunner().invoke(app, ["merge", str(run), "--min-trained", "0.3"]).exit_code == 0
    assert CliRunner().invoke(app, ["merge", str(run), "--min-trained", "0.4"]).exit_code == 3


def test_a_baseline_is_over_sessions_and_not_over_rows(tmp_path, book):
    """Rows with rewards [1, 1, 1, 0] of which three are one session: mean 1/2 and advantages +1 and -1, where a mean
    over rows would be 3/4."""
    for part in range(3):
        book.call(f"won{part}", [10 + part], [5], session_id="won", group_id="g", thread_id=str(part))
    book.call("lost", [1], [6], session_id="lost", group_id="g")
    run = book.write(tmp_path / "run")
    rewards.append(run, {"won": 1.0, "lost": 0.0})
    report = merge.merge(run, run / "merged", merge.Options(), quiet)
    assert len(pq.read_table(run / "merged" / "trajectories")) == 4
    trained = [
        (token, advantage)
        for row in pq.read_table(run / "merged" / "batches").to_pylist()
        for token, advantage, on in zip(row["input_ids"], row["advantages"], row["loss_mask"], strict=True)
        if on
    ]
    assert sorted(trained) == [(5, 1.0), (5, 1.0), (5, 1.0), (6, -1.0)]
    assert [(g["sessions"], g["mean"], g["std"]) for g in report["batch"]["groups"]] == [(2, 0.5, 0.5)]


def test_a_retry_does_not_destroy_the_chain_behind_it(book):
    """[r1, retry, c2, c3], where a merge by prompts alone keeps r1: three calls are kept, the discarded one is not."""
    book.call("r1", [1, 2], [3], **FULL)
    book.call("retry", [1, 2], [4], **FULL)
    book.call("c2", [1, 2, 4, 5], [6], **FULL)
    book.call("c3", [1, 2, 4, 5, 6, 7], [8], **FULL)
    assert fates(book) == {
        "r1.0": ("root(unknown_history)", "superseded"),
        "retry.0": ("root(unknown_history)", None),
        "c2.0": ("exact", None),
        "c3.0": ("exact", None),
    }
    assert built(book) == [([1, 2, 4, 5, 6, 7, 8], [0, 0, 1, 0, 1, 0, 1])]


def test_an_edited_turn_is_trained_in_the_context_that_the_model_saw(book):
    """The harness rewrote what was sampled, [3, 4] to [3, 9]: the sampled 4 does not stand before what follows."""
    book.call("a", [1, 2], [3, 4], **FULL)
    book.call("b", [1, 2, 3, 9, 5], [6], **FULL)
    book.call("c", [1, 2, 3, 9, 5, 6, 7], [8], **FULL)
    assert built(book) == [
        ([1, 2, 3, 4], [0, 0, 1, 1]),
        ([1, 2, 3, 9, 5, 6, 7, 8], [0, 0, 0, 0, 0, 1, 0, 1]),
    ]


def test_text_and_tool_call_rendered_as_two_items_duplicate_nothing(book):
    """Sampled: text 10, tool call 20, end 99. Rendered again as two messages, with two ends: the tool call stands once
    in each row, on the mask where it was sampled, and the second row is the prompt that was sent."""
    book.call("a", [1, 2], [10, 20, 99], **FULL)
    book.call("b", [1, 2, 10, 99, 20, 99, 7], [8, 99], **FULL)
    assert fates(book)["b.0"] == ("inside(2)", None)
    assert built(book) == [
        ([1, 2, 10, 20, 99], [0, 0, 1, 1, 1]),
        ([1, 2, 10, 99, 20, 99, 7, 8, 99], [0, 0, 0, 0, 0, 0, 0, 1, 1]),
    ]


def test_what_comes_behind_a_break_is_kept_as_a_trajectory(book):
    """After a compaction two more turns: five calls, all trained but the compaction itself, in two rows."""
    book.call("a", [1, 2], [3], **FULL)
    book.call("b", [1, 2, 3, 4], [5], **FULL)
    book.call("sum", [1, 2, 3, 4, 5, 88], [77], kind="compaction", **FULL)
    book.call("c", [1, 77, 6], [7], prompt_hash=None, root_reason="first")
    book.call("d", [1, 77, 6, 7, 8], [9], **FULL)
    assert fates(book)["sum.0"] == ("exact", "compaction")
    assert built(book) == [
        ([1, 2, 3, 4, 5], [0, 0, 1, 0, 1]),
        ([1, 77, 6, 7, 8, 9], [0, 0, 0, 1, 0, 1]),
    ]
