"""The calls of a session with what was said in them."""

import pytest

from polar_toolkit import calls
from polar_toolkit.export import Source
from polar_toolkit.export.conversations import sessions


@pytest.fixture
def source(run):
    """The run of the fixtures."""
    return Source(calls.find_runs(run), run / "merged")


def test_a_session_has_its_turns_in_order_and_its_reward(source):
    """Each with the messages that it added."""
    one, two, three = sessions(source)
    assert [turn.name for turn in one.turns] == ["a.0", "b.0", "c.0", "d.0"]
    assert [len(turn.messages) for turn in one.turns] == [2, 1, 1, 1]
    assert [session.reward for session in (one, two, three)] == [1.0, 0.0, None]


def test_a_path_leads_from_the_root(source):
    """Along the stored parents."""
    one = next(sessions(source))
    assert (one.path(1), one.path(2), one.path(3)) == ([0, 1], [0, 2], [3])


def test_leaves_are_what_no_other_of_them_continues(source):
    """Only those that are asked about count."""
    one = next(sessions(source))
    assert one.leaves([0, 1, 2, 3]) == [1, 2, 3]
    assert one.leaves([0, 3]) == [0, 3]


def test_a_call_has_the_tools_of_its_root(source):
    """A row stores them once."""
    one = next(sessions(source))
    assert [[tool.name for tool in turn.tools] for turn in one.turns] == [["task"]] * 4


def test_records_without_text_are_left_out_and_counted(tmp_path, book):
    """Imported calls have only tokens."""
    book.call("a", [1], [2, 3])
    run = book.write(tmp_path / "r")
    source = Source([run], run / "merged")
    assert list(sessions(source)) == []
    assert (source.tally.sampled, source.tally.left_out) == (2, {"no_text": 2})


def test_more_sessions_than_are_read_at_a_time_all_come(tmp_path, book):
    """In the order in which they began."""
    for number in range(40):
        book.call(f"c{number}", [1], [2], session_id=f"s{number}", reply='[{"kind": "text", "text": "Yes."}]')
    run = book.write(tmp_path / "r")
    assert [s.key[1] for s in sessions(Source([run], run))] == [f"s{number}" for number in range(40)]
