"""All calls of a run as one table."""

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polar_mitm.journal import (
    Journal,
    UnreadableRun,
    read_calls,
    read_row_groups,
    recover,
    row_groups,
    sealed_sessions,
    settle,
)
from polar_mitm.rows import SCHEMA


def ids(run: Path) -> list[str]:
    return read_calls(run)["call_id"].to_pylist()


def test_a_live_journal_is_read_while_its_writer_appends(journal: Journal, run: Path, record: Callable[..., Any]):
    """Finished calls of a living writer are in the table, unfinished ones are not lost yet."""
    journal.begin({"call_id": "in flight"})
    record(journal, "a", "b")
    assert ids(run) == ["a", "b"]


def test_every_acknowledged_call_is_read_once_during_rotation(run: Path, record: Callable[..., Any]):
    """A reader that races with appends, rotation and sealing sees what was acknowledged before it began, once."""
    journal = Journal.open(run, rotate_bytes=3000)
    acknowledged: list[str] = []

    def write() -> None:
        for number in range(60):
            acknowledged.extend(row["call_id"] for row in record(journal, f"{number:03d}"))

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        before = list(acknowledged)
        seen = ids(run)
        assert seen[: len(before)] == before
        assert seen == sorted(set(seen))
    writer.join()
    journal.close_sync()
    assert ids(run) == acknowledged
    assert len(list((run / "calls").iterdir())) > 5


def test_a_call_that_spans_a_rotation_is_one_row_in_order(run: Path, completed: Callable[..., Any], record: Any):
    """A call finished in a later part keeps the place of its begin record, and no part calls it lost."""
    journal = Journal.open(run, rotate_bytes=1)
    long = journal.begin({"call_id": "long"})
    record(journal, "a", "b", "c")
    asyncio.run(journal.finish([completed(long)]))
    journal.begin({"call_id": "unfinished"})
    record(journal, "d", "e")
    journal.close_sync()
    assert read_calls(run).select(["call_id", "status"]).to_pylist() == [
        {"call_id": "long", "status": "completed"},
        {"call_id": "a", "status": "completed"},
        {"call_id": "b", "status": "completed"},
        {"call_id": "c", "status": "completed"},
        {"call_id": "unfinished", "status": "lost"},
        {"call_id": "d", "status": "completed"},
        {"call_id": "e", "status": "completed"},
    ]
    parts = [pq.read_table(path)["call_id"].to_pylist() for path in sorted((run / "calls").iterdir())]
    assert [part.count("long") for part in parts].count(1) == 1
    assert len(parts) > 1


def test_a_journal_left_beside_its_sealed_file_counts_once(
    run: Path, tmp_path: Path, record: Callable[..., Any], orphan: Callable[..., Path]
):
    """After a crash between rename and removal, rows are read once, and recovery leaves one file."""
    journal = Journal.open(run)
    journal.begin({"call_id": "unfinished"})
    record(journal, "a", "b")
    leftover = orphan(run, tmp_path / "copy")
    journal.close_sync()
    shutil.copy(leftover, run / "journal")
    assert ids(run) == ["unfinished", "a", "b"]
    assert recover(run) == 1
    assert ids(run) == ["unfinished", "a", "b"]
    assert [len(list((run / folder).iterdir())) for folder in ("calls", "journal")] == [1, 0]


def test_choices_are_rows_of_their_own(journal: Journal, run: Path, completed: Callable[..., Any]):
    """n > 1 gives one row a choice."""
    row = completed(journal.begin({"call_id": "a"}))
    asyncio.run(journal.finish([row, row | {"choice": 1}]))
    assert read_calls(run).select(["call_id", "choice", "status"]).to_pylist() == [
        {"call_id": "a", "choice": 0, "status": "completed"},
        {"call_id": "a", "choice": 1, "status": "completed"},
    ]


def test_the_last_row_of_a_choice_counts(run: Path, completed: Callable[..., Any], record: Callable[..., Any]):
    """A later record replaces the earlier one, also across parts."""
    journal = Journal.open(run, rotate_bytes=1)
    row = completed(journal.begin({"call_id": "a"})) | {"client_delivered": False}
    asyncio.run(journal.finish([row]))
    record(journal, "b")
    asyncio.run(journal.finish([row | {"client_delivered": True}]))
    journal.close_sync()
    assert read_calls(run).select(["call_id", "client_delivered"]).to_pylist() == [
        {"call_id": "a", "client_delivered": True},
        {"call_id": "b", "client_delivered": None},
    ]


def test_calls_of_a_restarted_proxy_follow_those_of_the_first(run: Path, record: Callable[..., Any]):
    for name in "abcdef":
        journal = Journal.open(run)
        record(journal, name)
        journal.close_sync()
    assert ids(run) == list("abcdef")


def test_a_run_without_calls_is_an_empty_table(journal: Journal, run: Path):
    """An empty run has the schema and no rows."""
    assert read_calls(run) == SCHEMA.empty_table()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    """Nothing at all is one clear sentence."""
    with pytest.raises(UnreadableRun, match="is no run folder"):
        read_calls(tmp_path)


def test_a_truncated_parquet_file_is_refused(run: Path, record: Callable[..., Any]):
    """The sentence names the file."""
    journal = Journal.open(run)
    record(journal, "a")
    journal.close_sync()
    (path,) = (run / "calls").iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UnreadableRun, match=path.name):
        read_calls(run)


def test_a_damaged_page_is_refused(run: Path, record: Callable[..., Any]):
    """A Parquet file whose end is whole and whose middle is not gives the same sentence."""
    journal = Journal.open(run)
    record(journal, "a")
    journal.close_sync()
    (path,) = (run / "calls").iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:4] + bytes(1500) + data[1504:])
    with pytest.raises(UnreadableRun, match=path.name):
        read_calls(run)


def test_a_foreign_parquet_file_is_refused(run: Path):
    """Someone else's table is named, not merged."""
    (run / "calls").mkdir(parents=True)
    pq.write_table(pa.table({"x": [1]}), run / "calls" / "theirs.parquet")
    with pytest.raises(UnreadableRun, match=r"theirs\.parquet is not a table of polar-mitm's calls"):
        read_calls(run)


def test_a_parquet_file_of_an_earlier_version_is_readable(run: Path):
    """Columns that it did not have are null."""
    values = {"call_id": ["old"], "writer": ["w"], "sequence": [0], "choice": pa.array([0], pa.int32())}
    table = pa.table(values).replace_schema_metadata({"schema_version": "0"})
    (run / "calls").mkdir(parents=True)
    pq.write_table(table, run / "calls" / "w-000001.parquet")
    calls = read_calls(run)
    assert calls.schema == SCHEMA
    assert calls["call_id"].to_pylist() == ["old"]


def in_sessions(run: Path, completed: Callable[..., Any], *sessions: str) -> None:
    """Calls of these sessions in a sealed part each, named by their place."""
    for number, session in enumerate(sessions):
        journal = Journal.open(run)
        begun = journal.begin({"call_id": str(number), "session_id": session})
        asyncio.run(journal.finish([completed(begun)]))
        journal.close_sync()


def test_the_calls_of_one_session_are_read_alone(run: Path, completed: Callable[..., Any]):
    """From sealed and from live journals, in order; columns that were not asked for are null."""
    in_sessions(run, completed, "s", "t", "s")
    live = Journal.open(run)
    asyncio.run(live.finish([completed(live.begin({"call_id": str(n), "session_id": "st"[n % 2]})) for n in (3, 4)]))
    table = read_calls(run, "s", ["output_ids"])
    live.close_sync()
    assert table["call_id"].to_pylist() == ["0", "2", "4"]
    assert table.schema.equals(SCHEMA)
    assert [len(ids) for ids in table["output_ids"].to_pylist()] == [3, 3, 3]
    assert table.slice(0, 2)["logprobs"].null_count == 2
    assert read_calls(run, "nobody").num_rows == 0


def test_the_sessions_of_earlier_processes_are_named(run: Path, completed: Callable[..., Any]):
    """Without those of the living writer, which holds its own in memory."""
    in_sessions(run, completed, "s", "t", "s")
    live = Journal.open(run)
    asyncio.run(live.finish([completed(live.begin({"call_id": "9", "session_id": "live"}))]))
    assert sealed_sessions(run) == {"s", "t"}
    live.close_sync()


def read_settled(run: Path, scratch: Path, *sessions: str) -> list[str]:
    """The calls of some sessions, by way of all row groups of all settled files."""
    scratch.mkdir()
    paths = settle(run, scratch, ["output_ids"])
    places = [(path, group) for path in paths for group in range(len(row_groups(path, ["session_id"])))]
    return read_row_groups(places, sessions, ["output_ids"])["call_id"].to_pylist()


def test_a_settled_run_is_read_in_parts(run: Path, tmp_path: Path, completed: Callable[..., Any]):
    """Sealed and live calls of the sessions that are asked for, in order; the run folder is as it was."""
    in_sessions(run, completed, "s", "t", "u", "s")
    live = Journal.open(run)
    asyncio.run(live.finish([completed(live.begin({"call_id": "9", "session_id": "s"}))]))
    before = sorted(run.rglob("*"))
    assert read_settled(run, tmp_path / "one", "s", "u") == ["0", "2", "3", "9"]
    assert read_settled(run, tmp_path / "none", "nobody") == []
    assert sorted(run.rglob("*")) == before
    live.close_sync()


def test_what_is_sealed_behind_a_settled_run_does_not_change_it(run: Path, tmp_path: Path, record: Callable[..., Any]):
    """The files that were named stay readable, with what they held."""
    journal = Journal.open(run)
    record(journal, "a", "b")
    (tmp_path / "scratch").mkdir()
    paths = settle(run, tmp_path / "scratch", ["output_ids"])
    record(journal, "c")
    journal.close_sync()
    assert [table["call_id"].to_pylist() for path in paths for table, _ in row_groups(path, ["call_id"])] == [
        ["a", "b"]
    ]


def test_the_last_row_of_a_choice_counts_in_a_settled_run(
    run: Path, tmp_path: Path, completed: Callable[..., Any], record: Callable[..., Any]
):
    """Also when the rows are in different files."""
    journal = Journal.open(run, rotate_bytes=1)
    row = completed(journal.begin({"call_id": "a", "session_id": "s"}))
    asyncio.run(journal.finish([row | {"client_delivered": False}]))
    record(journal, "b")
    asyncio.run(journal.finish([row | {"client_delivered": True}]))
    journal.close_sync()
    (tmp_path / "scratch").mkdir()
    places = [(path, 0) for path in settle(run, tmp_path / "scratch", [])]
    assert len(places) > 1
    assert read_row_groups(places, {"s"}, ["client_delivered"])["client_delivered"].to_pylist() == [True]


def test_row_groups_tell_how_many_elements_their_lists_have(run: Path, tmp_path: Path, record: Callable[..., Any]):
    """From the file's footer, without reading a token."""
    journal = Journal.open(run)
    record(journal, "a", "b")
    journal.close_sync()
    (path,) = settle(run, tmp_path, [])
    ((rows, elements),) = row_groups(path, ["call_id", "prompt_len"])
    assert rows.column_names == ["call_id", "prompt_len"]
    assert elements["output_ids"] == 6
