"""Runs cut into shards."""

import pytest

from polar_toolkit import calls, shards


@pytest.fixture
def interleaved(book, tmp_path):
    """Three sessions of two calls, begun as b, a, c, and going on in turn; 4 stored tokens a call."""
    for turn in range(2):
        for name in "bac":
            spans = [{"start": 0, "end": 1, "version": str(10 - turn)}]
            parent = f"{name}0" if turn else None
            prompt = [1, 2, 3, 9, 4, 5, 6] if turn else [1, 2, 3]
            book.call(f"{name}{turn}", prompt, [9], parent=parent, session_id=name, versions=spans)
    return book.write(tmp_path / "r")


def plan(run, tmp_path, **bounds):
    (tmp_path / "scratch").mkdir()
    return shards.plan([run], tmp_path / "scratch", **bounds)


def test_sessions_are_cut_in_order_of_their_first_call(interleaved, tmp_path):
    """Each session has 8 stored tokens: two fit into 16."""
    cut = plan(interleaved, tmp_path, tokens=16)
    assert [[name for _, name in shard.sessions] for shard in cut.shards] == [["b", "a"], ["c"]]
    assert cut.sessions_of("r") == 3


def test_a_session_that_is_larger_than_a_shard_is_one(interleaved, tmp_path):
    """Sessions are never split."""
    assert [len(shard.sessions) for shard in plan(interleaved, tmp_path, tokens=1).shards] == [1, 1, 1]


def test_the_rows_of_a_shard_are_bounded_too(interleaved, tmp_path):
    """Many short calls cost memory, too."""
    assert [len(shard.sessions) for shard in plan(interleaved, tmp_path, rows=4).shards] == [2, 1]


def test_shards_read_together_what_the_run_holds(interleaved, tmp_path):
    """Every call once, in order."""
    read = [shard.read() for shard in plan(interleaved, tmp_path, tokens=1).shards]
    found = [call.key for sessions in read for session in sessions.values() for call in session]
    assert sorted(found) == sorted(call.key for call in calls.read(interleaved))
    assert [call.call_id for call in read[0]["run", "b"]] == ["b0", "b1"]


def test_versions_that_are_numbers_sort_by_value(interleaved, tmp_path):
    """10 came first, and is the later one."""
    assert plan(interleaved, tmp_path).versions == ("9", "10")


def test_other_versions_sort_by_their_first_call(book, tmp_path):
    """Names say nothing of age."""
    for name in ("z", "a", "z", "m"):
        book.call(f"{len(book.rows)}", [len(book.rows)], [9], versions=[{"start": 0, "end": 1, "version": name}])
    assert plan(book.write(tmp_path / "r"), tmp_path).versions == ("z", "a", "m")
