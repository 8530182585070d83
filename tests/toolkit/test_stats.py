"""The accounting as tables."""

import io

from rich.console import Console

from polar_toolkit import stats, trajectories
from polar_toolkit.ledger import Ledger
from polar_toolkit.tree import grow


def shown(*tables):
    """What a person sees."""
    console = Console(width=160, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.file.getvalue()


def ledger_of(book):
    """The ledger of a book's one session."""
    ledger, forest = Ledger(), grow(book.calls())
    ledger.add(forest, trajectories.build(forest))
    return ledger


def test_without_re_renders_the_line_says_so(book):
    """Nothing is claimed about what was not measured."""
    book.call("a", [1], [2])
    assert "no call with a parent was re-rendered" in stats.rerender_line(ledger_of(book).report([]))


def test_the_line_says_what_a_re_render_keeps(book):
    """Edges, and the share of sampled tokens."""
    book.call("a", [1], [2, 3, 4])
    book.call("b", [1, 2, 3, 4, 5], [6], parent="a", rerender_shared=5)
    book.call("c", [1, 2, 3, 4, 5, 6, 7], [8], parent="b", rerender_shared=2)
    line = stats.rerender_line(ledger_of(book).report([]))
    assert line == "re-render baseline: kept 1 of 2 edges / 75.0% of sampled tokens would stay in an exact prefix"


def test_tables_show_every_reason_and_the_drift(book):
    """What is not trained is on the screen, with its share; so is how a re-render differs."""
    book.call("a", [1], [2])
    book.call("b", [1, 2, 5], [6], parent="a", rerender_shared=1, drift='{"class": "arguments"}')
    book.call("title", [50], [51, 52], kind="auxiliary")
    text = shown(*stats.tables(ledger_of(book).report([])))
    for words in ("auxiliary", "50.0%", "arguments 1", "1 of 1 differ (100.0%)", "must be 0"):
        assert words in text


def test_the_table_of_sessions_has_a_line_for_each(book):
    """With the reason of what is not trained."""
    book.call("a", [1], [2, 3])
    book.call("title", [50], [51, 52], kind="auxiliary", session_id="t")
    ledger = Ledger()
    for session in ("s", "t"):
        forest = grow([call for call in book.calls() if call.session_id == session])
        ledger.add(forest, trajectories.build(forest))
    text = shown(stats.session_table(ledger.sessions()))
    assert "auxiliary 2" in text
    assert text.count("run") == 3  # the head, and a line for each
