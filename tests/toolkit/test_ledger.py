"""The accounting: counts from forests and trajectories."""

import json
from dataclasses import replace

import numpy as np
import pytest

from polar_toolkit import calls, trajectories
from polar_toolkit.ledger import Ledger
from polar_toolkit.tree import grow


@pytest.fixture
def ledger(book, tmp_path):
    """A session with a retry, a title, an abort, an edited history, and re-renders of which one drifted."""
    book.call("a", [1, 2], [3, 4])
    book.call(
        "b", [1, 2, 3, 4, 5], [6], parent="a", rerender_shared=5, versions=[{"start": 0, "end": 1, "version": "v1"}]
    )
    book.call("orphan", [1, 2, 3, 4, 5, 6, 7], [8, 8, 8], parent="b", rerender_shared=7)
    book.call("c", [1, 2, 3, 4, 5, 6, 7], [9], parent="b", rerender_shared=2, drift=json.dumps({"class": "arguments"}))
    book.call(
        "d", [1, 2, 3, 4, 5, 6, 7, 9, 7], [1], parent="c", rerender_shared=2, drift=json.dumps({"class": "reasoning"})
    )
    book.call("title", [50], [51, 52], kind="auxiliary")
    book.call("cut", [60], [61], status="aborted")
    book.call("gone", [70], [], status="lost")
    book.call("e", [1, 99], [5], root_reason="edited_history", root_window=json.dumps({"class": "removed"}))
    run = book.write(tmp_path / "r", family="qwen3")
    ledger = Ledger()
    for session in calls.by_session(calls.read(run)).values():
        forest = grow(session)
        ledger.add(forest, trajectories.build(forest))
    return ledger


@pytest.fixture
def report(ledger, tmp_path):
    """Its report."""
    return ledger.report([tmp_path / "r"])


def test_sampled_tokens_are_trained_or_listed_with_a_reason(report):
    """sampled = trained + the sum of the reasons."""
    tokens = report["tokens"]
    assert tokens["not_trained"] == {"aborted": 1, "auxiliary": 2, "superseded": 3}
    assert (tokens["sampled"], tokens["trained"]) == (12, 6)
    assert tokens["share"] == 0.5


def test_calls_are_counted_by_status_and_kind(report):
    """Lost calls count, although they have no tokens."""
    assert report["calls"] == {
        "total": 9,
        "by_status": {"aborted": 1, "completed": 7, "lost": 1},
        "by_kind": {"agent": 8, "auxiliary": 1},
    }
    assert report["calls_not_trained"] == {"aborted": 1, "auxiliary": 1, "lost": 1, "superseded": 1}


def test_edges_and_recorded_root_reasons_are_counted(report):
    """Edges by kind, and why calls were roots when they were made."""
    assert report["edges"] == {"exact": 4, "inside": 0, "root": 5}
    assert report["root_classes"] == {"removed": 1}
    assert report["root_reasons"] == {"edited_history": 1, "first": 4}


def test_the_re_render_baseline_counts_each_parent_once(report):
    """A re-render keeps b behind a, loses d behind c; b's own tokens stay, because one of two children keeps them."""
    assert report["rerender"] == {"edges": 4, "kept": 2, "tokens": 4, "tokens_kept": 3}


def test_weight_versions_and_bytes_are_counted(report, tmp_path):
    """Tokens by version, and what a sampled token costs on disk."""
    assert report["weight_versions"] == {"v0": 11, "v1": 1}
    size = (tmp_path / "r" / "calls" / "w-000001.parquet").stat().st_size
    assert report["disk"] == {"bytes": size, "per_sampled_token": size / 12}


def test_tokens_behind_a_stop_string_are_listed(book):
    """They were sampled and are not trained, whatever becomes of the call."""
    book.call("a", [1, 2], [3, 4, 5], kept_len=1)
    book.call("b", [8], [9, 9, 9], kept_len=1, status="aborted")
    ledger = Ledger()
    forest = grow(book.calls())
    ledger.add(forest, trajectories.build(forest))
    tokens = ledger.report([])["tokens"]
    assert (tokens["sampled"], tokens["trained"]) == (6, 1)
    assert tokens["not_trained"] == {"aborted": 1, "after_stop": 4}


def test_drift_is_counted_by_family_class_and_loss(report):
    """Two of four prompts that were rendered anew differ; what a re-render loses is counted from the parent's end."""
    assert report["drift"]["by_family"] == {"qwen3": {"audited": 4, "differing": 2}}
    assert report["drift"]["classes"] == {"arguments": 1, "reasoning": 1}
    assert report["drift"]["tokens_lost"] == {"0": 2, "<=16": 2, "<=128": 0, "<=1024": 0, "<=8192": 0, ">8192": 0}


def test_a_session_has_a_row_of_its_own(ledger):
    """Sampled, trained and each reason, trajectories and versions."""
    (row,) = ledger.sessions().to_pylist()
    assert (row["session_id"], row["calls"], row["sampled"], row["trained"], row["two_owners"]) == ("s", 9, 12, 6, 0)
    assert dict(row["not_trained"]) == {"aborted": 1, "auxiliary": 2, "superseded": 3}
    assert (row["trajectories"], row["versions"]) == (2, ["v0", "v1"])


def test_trajectories_and_versions_of_a_session_are_summed_up(report):
    """How many trajectories a session has, and how many sessions were sampled by how many versions."""
    assert report["trajectories"]["by_session"] == {"least": 2, "mean": 2.0, "most": 2}
    assert report["versions_by_session"] == {"2": 1}


def test_a_token_on_two_masks_is_seen(book):
    """The count is taken from the masks: a wrong assignment of owners would show."""
    book.call("a", [1], [2, 3])
    book.call("b", [1, 2, 3, 4], [5], parent="a")
    book.call("c", [1, 2, 3, 6], [7], parent="a")
    forest = grow(book.calls())
    one, other = trajectories.build(forest)
    wrong = replace(other, loss_mask=np.array([0, 1, 1, 0, 1], np.uint8))
    right, bad = Ledger(), Ledger()
    right.add(forest, [one, other])
    bad.add(forest, [one, wrong])
    assert right.report([])["tokens"]["two_owners"] == 0
    assert bad.report([])["tokens"]["two_owners"] == 2


def test_ledgers_add_up_in_order(new_book):
    """What several workers counted is what one would have counted."""
    parts, whole = [], Ledger()
    for name in ("one", "two"):
        book = new_book(name)
        book.call("a", [1], [2])
        forest = grow(book.calls())
        parts.append(Ledger())
        for ledger in (parts[-1], whole):
            ledger.add(forest, trajectories.build(forest))
    parts[0].absorb(parts[1])
    assert parts[0].report([]) == whole.report([])
    assert parts[0].sessions().equals(whole.sessions())
