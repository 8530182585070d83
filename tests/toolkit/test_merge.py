"""From runs on disk to a merged folder."""

import asyncio

import pyarrow.parquet as pq
import pytest

from polar_mitm.journal import Journal
from polar_toolkit import batches, calls, merge, rewards
from polar_toolkit.errors import Refusal
from polar_toolkit.tree import Policy


def quiet(run, done, total):
    """Progress that nobody watches."""


def sessions(book, group="g"):
    """Two sessions of a group, of two turns each."""
    for name in ("one", "two"):
        columns = {"session_id": name, "group_id": group}
        book.call(f"{name}-a", [1, 2], [3], **columns)
        book.call(f"{name}-b", [1, 2, 3, 4], [5, 6], parent=f"{name}-a", **columns)
    return book


def test_a_run_becomes_trajectories_and_a_batch(tmp_path, book):
    """Files, report and batch agree."""
    run = sessions(book).write(tmp_path / "r")
    rewards.append(run, {"one": 1.0, "two": 0.0})
    report = merge.merge(run, run / "merged", merge.Options(), quiet)
    table = pq.read_table(run / "merged" / "trajectories")
    assert table["trajectory_id"].to_pylist() == ["one-b.0", "two-b.0"]
    assert table["reward"].to_pylist() == [1.0, 0.0]
    assert len(pq.read_table(run / "merged" / "batches")) == 1
    assert report["batch"]["trained"] == report["tokens"]["trained"] == 6


def test_without_rewards_there_are_trajectories_and_no_batch(tmp_path, book):
    """The batch waits for rewards."""
    run = sessions(book).write(tmp_path / "r")
    report = merge.merge(run, run / "merged", merge.Options(), quiet)
    assert report["batch"] is None
    assert not (run / "merged" / "batches").exists()


def test_a_batch_made_later_equals_one_made_at_once(tmp_path, book):
    """`batch` is the second half of `merge`."""
    run = sessions(book).write(tmp_path / "r")
    merge.merge(run, run / "merged", merge.Options(), quiet)
    rewards.append(run, {"one": 1.0, "two": 0.0})
    later = merge.rebatch(run, run / "merged", batches.Options())
    late = pq.read_table(run / "merged" / "batches")
    assert merge.merge(run, run / "merged", merge.Options(), quiet) == later
    assert pq.read_table(run / "merged" / "batches").equals(late)


def test_runs_are_merged_together_and_groups_span_them(tmp_path, new_book):
    """Two runs with one session of a group each make one group of two."""
    for name, reward in (("x", 1.0), ("y", 0.0)):
        book = new_book(run_id=name)
        book.call(f"{name}1", [1], [2], group_id="g")
        rewards.append(book.write(tmp_path / name), {"s": reward})
    report = merge.merge(tmp_path, tmp_path / "merged", merge.Options(), quiet)
    assert report["runs"] == ["x", "y"]
    assert [(g["group_id"], g["sessions"], g["mean"]) for g in report["batch"]["groups"]] == [("g", 2, 0.5)]


def test_a_copied_run_is_refused(tmp_path, book):
    """Merging a run with its copy would train its tokens twice."""
    book.call("a", [1], [2])
    book.write(tmp_path / "one")
    book.write(tmp_path / "two")
    with pytest.raises(Refusal, match="one is a copy"):
        merge.merge(tmp_path, tmp_path / "merged", merge.Options(), quiet)
    assert not (tmp_path / "merged").exists()


def test_a_run_without_calls_is_refused(tmp_path):
    """The sentence says what to do."""
    (tmp_path / "r" / "journal").mkdir(parents=True)
    with pytest.raises(Refusal, match="has no calls yet"):
        merge.merge(tmp_path / "r", tmp_path / "merged", merge.Options(), quiet)


def test_a_run_without_calls_does_not_hold_back_the_others(tmp_path, book):
    """An interceptor that has just started is no error."""
    sessions(book).write(tmp_path / "old")
    (tmp_path / "new" / "journal").mkdir(parents=True)
    assert merge.merge(tmp_path, tmp_path / "merged", merge.Options(), quiet)["sessions"] == 2


def test_the_run_id_of_rewards_is_taken_from_the_calls_when_run_json_is_gone(tmp_path, book):
    """Rewards still meet their sessions."""
    run = sessions(book).write(tmp_path / "r")
    (run / "run.json").unlink()
    rewards.append(run, {"one": 1.0})
    assert merge.read_rewards(calls.find_runs(run)) == {("run", "one"): 1.0}


def test_progress_counts_sessions(tmp_path, book):
    """Each run reports how far it is."""
    run = sessions(book).write(tmp_path / "r")
    seen = []
    merge.account(run, Policy(), lambda *args: seen.append(args))
    assert seen == [("r", 0, 2), ("r", 1, 2), ("r", 2, 2)]


def test_live_and_sealed_journals_are_read_alike(tmp_path, book):
    """A merge while the interceptor runs gives what a merge after it gives."""
    sessions(book)
    run = tmp_path / "r"
    writer = Journal.open(run)
    stamped = [writer.begin({k: v for k, v in row.items() if k != "sequence"}) for row in book.rows]
    done = [
        old | {"writer": new["writer"], "sequence": new["sequence"]}
        for old, new in zip(book.rows, stamped, strict=True)
    ]
    asyncio.run(writer.finish(done))
    live = merge.merge(run, run / "merged", merge.Options(), quiet)
    writer.close_sync()
    sealed = merge.merge(run, run / "merged", merge.Options(), quiet)
    assert live["tokens"] == sealed["tokens"] == {"sampled": 6, "trained": 6, "share": 1.0, "not_trained": {}}
    assert not list((run / "journal").glob("*.journal"))
