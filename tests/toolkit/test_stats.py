"""The accounting."""

import io

import pytest
from rich.console import Console

from polar_toolkit import calls, stats, trajectories
from polar_toolkit.tree import grow


@pytest.fixture
def report(book, tmp_path):
    """A session with a retry, a title, an abort, an edited history, and re-renders of which one drifted."""
    book.call("a", [1, 2], [3, 4])
    book.call(
        "b", [1, 2, 3, 4, 5], [6], parent="a", rerender_shared=5, versions=[{"start": 0, "end": 1, "version": "v1"}]
    )
    book.call("orphan", [1, 2, 3, 4, 5, 6, 7], [8, 8, 8], parent="b", rerender_shared=7)
    book.call("c", [1, 2, 3, 4, 5, 6, 7], [9], parent="b", rerender_shared=2)
    book.call("d", [1, 2, 3, 4, 5, 6, 7, 9, 7], [1], parent="c", rerender_shared=2)
    book.call("title", [50], [51, 52], kind="auxiliary")
    book.call("cut", [60], [61], status="aborted")
    book.call("gone", [70], [], status="lost")
    book.call("e", [1, 99], [5], root_reason="edited_history")
    run = book.write(tmp_path / "r")
    ledger = stats.Ledger()
    for session in calls.by_session(calls.read(run)).values():
        forest = grow(session)
        ledger.add(forest, trajectories.build(forest))
    return ledger.report([run])


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
    assert report["edges"] == {"exact": 4, "inside": 0, "root": 5, "found_by_tokens": 0}
    assert report["root_reasons"] == {"edited_history": 1, "first": 4}


def test_the_re_render_baseline_counts_each_parent_once(report):
    """A re-render keeps b behind a, loses d behind c; b's own tokens stay, because one of two children keeps them."""
    assert report["rerender"] == {"edges": 4, "kept": 2, "tokens": 4, "tokens_kept": 3}
    assert stats.rerender_line(report).startswith("re-render baseline: kept 2 of 4 edges / 75.0% of sampled tokens")


def test_without_re_renders_the_line_says_so(book):
    """Nothing is claimed about what was not measured."""
    book.call("a", [1], [2])
    ledger = stats.Ledger()
    ledger.add(grow(book.calls()), [])
    assert "no call with a parent was re-rendered" in stats.rerender_line(ledger.report([]))


def test_weight_versions_and_bytes_are_counted(report, tmp_path):
    """Tokens by version, and what a sampled token costs on disk."""
    assert report["weight_versions"] == {"v0": 11, "v1": 1}
    size = (tmp_path / "r" / "calls" / "w-000001.parquet").stat().st_size
    assert report["disk"] == {"bytes": size, "per_sampled_token": size / 12}


def test_tables_show_every_reason(report):
    """What is not trained is on the screen, with its share."""
    console = Console(width=120, file=io.StringIO())
    for table in stats.tables(report):
        console.print(table)
    text = console.file.getvalue()
    for reason in ("superseded", "auxiliary", "aborted", "edited_history"):
        assert reason in text
    assert "50.0%" in text


def test_tokens_behind_a_stop_string_are_listed(book):
    """They were sampled and are not trained, whatever becomes of the call."""
    book.call("a", [1, 2], [3, 4, 5], kept_len=1)
    book.call("b", [8], [9, 9, 9], kept_len=1, status="aborted")
    ledger = stats.Ledger()
    forest = grow(book.calls())
    ledger.add(forest, trajectories.build(forest))
    tokens = ledger.report([])["tokens"]
    assert (tokens["sampled"], tokens["trained"]) == (6, 1)
    assert tokens["not_trained"] == {"aborted": 1, "after_stop": 4}
