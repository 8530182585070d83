"""From runs on disk to a merged folder."""

import asyncio
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from polar_mitm.journal import Journal
from polar_toolkit import batches, calls, merge, rewards, shards
from polar_toolkit.errors import Refusal
from polar_toolkit.locations import location
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
    """Each run reports how far it is, a shard at a time."""
    run = sessions(book).write(tmp_path / "r")
    seen = []
    merge.account(run, merge.Options(), lambda *args: seen.append(args))
    assert seen == [("r", 0, 2), ("r", 2, 2)]


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
    assert live["tokens"] == sealed["tokens"]
    assert (live["tokens"]["sampled"], live["tokens"]["trained"]) == (6, 6)
    assert not list((run / "journal").glob("*.journal"))


def test_sessions_stand_in_the_order_of_their_first_calls(tmp_path, book):
    """Whatever they are called."""
    for name in ("z", "a", "m"):
        book.call(name, [1], [2], session_id=name)
    run = book.write(tmp_path / "r")
    merge.merge(run, run / "merged", merge.Options(), quiet)
    assert pq.read_table(run / "merged" / "trajectories")["session_id"].to_pylist() == ["z", "a", "m"]


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_output_and_report_do_not_depend_on_the_number_of_workers(tmp_path, book):
    """Three sessions of eight million stored tokens each are three shards: the same bytes with one process and two."""
    zeros = np.zeros(shards.SHARD_TOKENS, np.int32)
    for name in ("one", "two", "three"):
        book.call(f"{name}-a", [1], [3], session_id=name, group_id="g")
        book.call(f"{name}-b", zeros, [], session_id=name, group_id="g", status="lost")
    run = book.write(tmp_path / "r")
    rewards.append(run, {"one": 1.0, "two": 0.0})
    merge.merge(run, tmp_path / "alone", merge.Options(workers=1), quiet)
    merge.merge(run, tmp_path / "both", merge.Options(workers=2), quiet)
    assert len(list((tmp_path / "both" / "trajectories").iterdir())) == 3
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "both")


def test_calls_that_are_too_old_or_cut_off_are_left_out_by_a_policy(tmp_path, book):
    """Versions 9, 10 and 11, at most one behind the last: 9 is stale, though it sorts last as a word."""
    for version in ("9", "10", "11"):
        spans = [{"start": 0, "end": 1, "version": version}]
        book.call(f"c{version}", [int(version)], [2], versions=spans, client_delivered=version != "10")
    run = book.write(tmp_path / "r")
    policy = Policy(delivered_only=True, max_lag=1)
    report = merge.merge(run, run / "merged", merge.Options(policy), quiet)
    assert report["tokens"]["not_trained"] == {"stale": 1, "undelivered": 1}
    assert report["options"] == {"kinds": ["agent", "subagent"], "delivered_only": True, "max_lag": 1}


def test_a_batch_of_so_many_groups_is_a_file(tmp_path, book):
    """Each file says what its loss weights add up to."""
    for i in range(4):
        book.call(f"c{i}", [1], [2], session_id=f"s{i}", group_id=f"g{i // 2}")
    run = book.write(tmp_path / "r")
    rewards.append(run, {f"s{i}": float(i % 2) for i in range(4)})
    options = merge.Options(batch=batches.Options(max_tokens=10, weighting="constant", groups=1))
    report = merge.merge(run, run / "merged", options, quiet)
    files = sorted((run / "merged" / "batches").iterdir())
    assert [path.name for path in files] == ["batch-00000.parquet", "batch-00001.parquet"]
    assert [float(pq.read_schema(path).metadata[b"loss_weight_sum"]) for path in files] == [0.1, 0.1]
    assert [one["groups"] for one in report["batch"]["files"]] == [1, 1]


@pytest.mark.parametrize("root", ["memory://bucket/runs", "file://{folder}/runs"])
def test_runs_and_the_merged_folder_may_be_urls(tmp_path, book, root):
    """What is written there is what is written to a local folder."""
    run = sessions(book).write(tmp_path / "r")
    rewards.append(run, {"one": 1.0, "two": 0.0})
    merge.merge(run, tmp_path / "local", merge.Options(), quiet)
    there = location(root.format(folder=tmp_path)) / "r"
    copy_to(there, run)
    for _ in range(2):  # the second replaces the first
        merge.merge(there, there / "merged", merge.Options(workers=2), quiet)
    local = files_of(tmp_path / "local")
    assert {name: (there / "merged" / name).read_bytes() for name in local} == local
    merge.rebatch(there, there / "merged", batches.Options())
    assert (there / "merged" / "report.json").read_bytes() == local[Path("report.json")]
    assert [path.name for path in there.iterdir() if path.name.startswith(".")] == []
    assert merge.account(there, merge.Options(), quiet)[1]["tokens"]["trained"] == 6


def copy_to(there, run):
    for path in run.rglob("*"):
        if path.is_file():
            target = there.joinpath(*path.relative_to(run).parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


def test_a_live_journal_behind_a_url_is_refused(book):
    """A lock is where the journal is written."""
    there = location("memory://live/r")
    (there / "journal").mkdir(parents=True)
    (there / "journal" / "w-000001.journal").write_bytes(b"polarj2\n")
    with pytest.raises(Refusal, match="a journal is locked where it is written"):
        merge.merge(there, there / "merged", merge.Options(), quiet)
    assert not (there / "merged").exists()


def test_a_failing_worker_leaves_the_earlier_merged_folder_and_nothing_else(tmp_path, book):
    """A shard that cannot be read: one sentence, no half of a folder, no copies, no processes."""
    zeros = np.zeros(shards.SHARD_TOKENS, np.int32)
    for name in ("one", "two"):
        book.call(name, zeros, [3], session_id=name)
    run = book.write(tmp_path / "r")
    merge.merge(run, tmp_path / "merged", merge.Options(workers=1), quiet)
    before = files_of(tmp_path / "merged")
    path = run / "calls" / "w-000001.parquet"
    column = pq.read_metadata(path).row_group(0).column(pq.read_schema(path).get_field_index("prompt_suffix"))
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + 20 : column.data_page_offset + 200] = bytes(180)  # plans read no tokens
    path.write_bytes(data)
    with pytest.raises(Refusal, match=path.name):
        merge.merge(run, tmp_path / "merged", merge.Options(workers=2), quiet)
    assert files_of(tmp_path / "merged") == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["merged", "r"]
    assert multiprocessing.active_children() == []


def test_what_became_of_each_session_is_a_table(tmp_path, book):
    """sessions.parquet has a row a session, and stays when the batches are made again."""
    sessions(book)
    run = book.write(tmp_path / "r")
    merge.merge(run, run / "merged", merge.Options(), quiet)
    first = pq.read_table(run / "merged" / "sessions.parquet")
    assert first["session_id"].to_pylist() == ["one", "two"]
    merge.rebatch(run, run / "merged", batches.Options())
    assert pq.read_table(run / "merged" / "sessions.parquet").equals(first)


def said(batch: Path) -> dict:
    """What a batch's file says it was made of."""
    return json.loads(pq.read_metadata(batch).metadata[b"polar_batch"])


def test_a_batch_says_what_it_was_made_of(tmp_path, book):
    """Sessions, groups, how many of them are dead, the mean reward, and the tokenizer that the run recorded."""
    for name in ("one", "two"):
        book.call(f"d-{name}", [1], [2], session_id=f"d-{name}", group_id="dead")
    run = sessions(book).write(tmp_path / "r", tokenizer_fingerprint="257-ab")
    rewards.append(run, {"one": 1.0, "two": 0.0, "d-one": 1.0, "d-two": 1.0})
    merge.merge(run, run / "merged", merge.Options(), quiet)
    made = {"sessions": 4, "groups": 2, "dead_groups": 1, "reward_mean": 0.75, "tokenizer": "257-ab"}
    assert said(run / "merged" / "batches" / "batch-00000.parquet") == made
    merge.rebatch(run, run / "merged", batches.Options())
    assert said(run / "merged" / "batches" / "batch-00000.parquet") == made


def test_a_run_that_records_no_tokenizer_says_none(tmp_path, book):
    """An imported one: its batch can be trained, and not be compared."""
    run = sessions(book).write(tmp_path / "r")
    rewards.append(run, {"one": 1.0, "two": 0.0})
    merge.merge(run, run / "merged", merge.Options(), quiet)
    assert said(run / "merged" / "batches" / "batch-00000.parquet")["tokenizer"] is None


def test_a_batch_of_two_tokenizers_is_refused(tmp_path, new_book):
    """One id would mean two things; what was there stays."""
    for name, reward in (("x", 1.0), ("y", 0.0)):
        book = new_book(run_id=name)
        book.call(f"{name}1", [1], [2], group_id="g")
        rewards.append(book.write(tmp_path / name, tokenizer_fingerprint=f"257-{name}"), {"s": reward})
    with pytest.raises(Refusal, match=r"several tokenizers: 257-x \(run x\), 257-y \(run y\); merge the runs of each"):
        merge.merge(tmp_path, tmp_path / "merged", merge.Options(), quiet)
    assert not (tmp_path / "merged").exists()
