"""Edges, retries and reasons, by small forests whose values are written out."""

import itertools
import time

import numpy as np
import pytest

from polar_toolkit import trajectories
from polar_toolkit.tree import Policy, grow


def edges(forest):
    return {f"{node.call.call_id}.{node.call.choice}": node.edge for node in forest.nodes}


def reasons(forest):
    return {node.call.call_id: node.reason for node in forest.nodes}


def stored_as_root(book, name, prompt, output, **columns):
    """A call whose row names no parent."""
    return book.call(name, prompt, output, root_reason="unknown_history", **columns)


def test_a_linear_session_is_a_chain_of_exact_edges(book):
    """Each prompt extends the call before it."""
    book.call("a", [1, 2], [3])
    book.call("b", [1, 2, 3, 4], [5], parent="a")
    book.call("c", [1, 2, 3, 4, 5, 6], [7], parent="b")
    assert edges(grow(book.calls())) == {"a.0": "root(first)", "b.0": "exact", "c.0": "exact"}


def test_a_parent_that_was_not_stored_is_found_by_its_tokens(book):
    """The longest prompt + output that a prompt begins with is its parent."""
    book.call("a", [1, 2], [3])
    stored_as_root(book, "b", [1, 2, 3, 4], [5])
    stored_as_root(book, "c", [1, 2, 3, 4, 5, 6], [7])
    forest = grow(book.calls())
    assert [(node.edge, node.parent, node.evidence) for node in forest.nodes] == [
        ("root(first)", -1, None),
        ("exact", 0, "tokens"),
        ("exact", 1, "tokens"),
    ]


def test_a_prompt_that_leaves_the_output_early_hangs_inside_it(book):
    """inside(n): the prompt leaves the parent's output n tokens before its end."""
    book.call("a", [1, 2], [3, 4, 5])
    stored_as_root(book, "b", [1, 2, 3, 9], [6])
    assert edges(grow(book.calls())) == {"a.0": "root(first)", "b.0": "inside(2)"}


def test_drift_in_the_last_output_is_seen_through_a_longer_chain(book):
    """The deepest output that a prompt enters is its parent, not the last one that it contains whole."""
    book.call("a", [1], [2, 3])
    book.call("b", [1, 2, 3, 4], [5, 6, 7], parent="a")
    stored_as_root(book, "c", [1, 2, 3, 4, 5, 9], [8])
    forest = grow(book.calls())
    assert (forest.nodes[2].edge, forest.nodes[2].parent) == ("inside(2)", 1)


def test_a_prompt_that_shares_only_context_is_a_root(book):
    """A common beginning without a sampled token is no edge."""
    book.call("a", [1, 2], [3])
    book.call("b", [1, 9], [4], root_reason="edited_history")
    assert edges(grow(book.calls())) == {"a.0": "root(first)", "b.0": "root(edited_history)"}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_order_of_rows_is_irrelevant(book, order):
    """Whatever order rows come in, the forest is the same."""
    book.call("a", [1, 2], [3])
    stored_as_root(book, "b", [1, 2, 3, 4], [5])
    stored_as_root(book, "c", [1, 2, 3, 6], [7, 7])
    stored_as_root(book, "d", [1, 2, 3, 6, 7, 7, 8], [9])
    forest = grow(book.calls(order))
    assert [(node.call.call_id, node.parent) for node in forest.nodes] == [("a", -1), ("b", 0), ("c", 0), ("d", 2)]


@pytest.mark.parametrize("first", ["orphan", "consumed"])
def test_of_two_answers_to_one_prompt_the_one_that_was_used_is_kept(book, first):
    """A retry's orphan is superseded whether it was stored first or last."""
    outputs = {"orphan": [3, 3], "consumed": [4]}
    for name in sorted(outputs, key=lambda name: name != first):
        book.call(name, [1, 2], outputs[name])
    book.call("next", [1, 2, 4, 5], [6], parent="consumed")
    assert reasons(grow(book.calls())) == {"orphan": "superseded", "consumed": None, "next": None}


def test_of_two_unused_answers_the_delivered_one_is_kept(book):
    """When the session ended there, what the harness received counts."""
    book.call("received", [1, 2], [3])
    book.call("cut", [1, 2], [4], client_delivered=False)
    assert reasons(grow(book.calls())) == {"received": None, "cut": "superseded"}


def test_an_undelivered_answer_alone_is_kept(book):
    """Nothing replaced it, so it is trained."""
    book.call("cut", [1, 2], [4], client_delivered=False)
    assert reasons(grow(book.calls())) == {"cut": None}


def test_an_aborted_attempt_is_listed_as_aborted_and_its_retry_is_kept(book):
    """What already has a reason does not become superseded."""
    book.call("cut", [1, 2], [4], status="aborted", trainable=False, untrainable_reason="aborted")
    book.call("again", [1, 2], [5])
    assert reasons(grow(book.calls())) == {"cut": "aborted", "again": None}


def test_two_answers_that_were_both_used_are_both_kept(book):
    """Parallel samples of one prompt are legitimate."""
    book.call("a", [1, 2], [3])
    book.call("b", [1, 2], [4])
    book.call("c", [1, 2, 3, 9], [5], parent="a")
    book.call("d", [1, 2, 4, 9], [6], parent="b")
    assert set(reasons(grow(book.calls())).values()) == {None}


def test_choices_of_one_call_are_no_retries(book):
    """n > 1: all choices are kept, and the parent names the choice that was used."""
    for choice in range(3):
        book.call("a", [1, 2], [3 + choice], choice=choice)
    book.call("b", [1, 2, 4, 9], [5], parent=("a", 1))
    forest = grow(book.calls())
    assert [node.reason for node in forest.nodes] == [None] * 4
    assert forest.nodes[3].parent == 1


def test_equal_prompts_of_two_threads_are_no_retries(book):
    """Two sub-agents may be given the same words."""
    book.call("a", [1, 2], [3], thread_id="x")
    book.call("b", [1, 2], [4], thread_id="y")
    assert reasons(grow(book.calls())) == {"a": None, "b": None}


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"trainable": False, "untrainable_reason": "grammar"}, "grammar"),
        ({"trainable": False, "untrainable_reason": "greedy", "temperature": 0.0}, "greedy"),
        ({"status": "aborted"}, "aborted"),
        ({"status": "lost", "trainable": False, "untrainable_reason": "lost"}, "lost"),
        ({"status": "failed"}, "failed"),
        ({"status": "refused"}, "refused"),
        ({"kind": "auxiliary"}, "auxiliary"),
        ({"kind": "compaction"}, "compaction"),
        ({"kind": "foreign", "trainable": False, "untrainable_reason": "foreign"}, "foreign"),
        ({"prompt_hash": bytes(16)}, "quarantined_prompt_hash"),
    ],
)
def test_what_is_not_trained_has_one_reason(book, columns, reason):
    """An unfinished call's status first, then a broken row, then the row's own reason, then the policy of kinds."""
    book.call("a", [1, 2], [3], **columns)
    assert reasons(grow(book.calls())) == {"a": reason}


def test_kinds_are_a_policy(book):
    """Compactions are trained when they are asked for."""
    book.call("a", [1, 2], [3], kind="compaction")
    assert reasons(grow(book.calls(), Policy(kinds=("compaction",)))) == {"a": None}


def test_interleaved_subagents_are_trees_of_their_own(book):
    """Calls attach to their own chain however they alternate."""
    last = {}
    prompts = {agent: [100 + agent] for agent in range(4)}
    for turn in range(25):
        for agent in range(4):
            output = [turn, agent]
            last[agent] = book.call(f"{agent}-{turn}", prompts[agent], output, parent=last.get(agent))
            prompts[agent] = [*prompts[agent], *output, 7]
    forest = grow(book.calls())
    assert sum(node.parent < 0 for node in forest.nodes) == 4
    assert sum(node.edge == "exact" for node in forest.nodes) == 96
    assert all(node.call.call_id[0] == forest.nodes[node.parent].call.call_id[0] for node in forest.nodes[4:])


def test_evidence_is_the_recorded_one_or_tokens(book):
    """pointer and history as stored; what no row says is shown by tokens; a root has none."""
    book.call("a", [1, 2], [3])
    book.call("b", [1, 2, 3, 4], [5], parent="a", parent_evidence="pointer")
    book.call("c", [1, 2, 3, 4, 5, 6], [7], parent="b", parent_evidence="history")
    stored_as_root(book, "d", [1, 2, 3, 4, 5, 6, 7, 8], [9])
    assert [node.evidence for node in grow(book.calls()).nodes] == [None, "pointer", "history", "tokens"]


def test_undelivered_answers_can_be_left_out(book):
    """They stay context for what goes on from them."""
    book.call("a", [1, 2], [3], client_delivered=False)
    book.call("b", [1, 2, 3, 4], [5], parent="a")
    assert reasons(grow(book.calls(), Policy(delivered_only=True))) == {"a": "undelivered", "b": None}


def test_calls_of_old_weights_can_be_left_out(book):
    """By their oldest span: one version before the last is allowed here, of four."""
    spans = {"a": ["v1", "v4"], "b": ["v3", "v4"], "c": ["v4"], "d": ["v2"], "e": ["lost"]}
    for name, versions in spans.items():
        named = [{"start": i, "end": i + 1, "version": version} for i, version in enumerate(versions)]
        book.call(name, [1], [2] * len(versions), versions=named, thread_id=name)
    policy = Policy(max_lag=1, versions=("v1", "v2", "v3", "v4"))
    assert reasons(grow(book.calls(), policy)) == {"a": "stale", "b": None, "c": None, "d": "stale", "e": "stale"}


def test_a_session_of_10000_turns_takes_seconds(book):
    """Neither recursion nor quadratic time."""
    book.chain(10_000)
    rows = book.calls()
    started = time.process_time()
    forest = grow(rows)
    took = time.process_time() - started
    assert [node.parent for node in forest.nodes] == list(range(-1, 9_999))
    assert took < 5, f"{took:.1f} s"


def test_a_hundred_turns_of_full_prompts_are_compared_at_memory_speed(book):
    """4.5 million tokens without parents or hashes: one chain, in far less than a second."""
    prompt = np.arange(8000)
    for turn in range(100):
        stored_as_root(book, f"c{turn}", prompt, np.full(250, turn), prompt_hash=None)
        prompt = np.concatenate([prompt, np.full(250, turn), np.full(500, 1000 + turn)])
    rows = book.calls()
    started = time.process_time()
    (path,) = trajectories.build(grow(rows))
    took = time.process_time() - started
    assert (len(path.input_ids), int(path.loss_mask.sum())) == (len(prompt) - 500, 25_000)
    assert took < 0.2, f"{took * 1e3:.0f} ms"
