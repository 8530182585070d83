"""Plain records become a run folder; merging it finds parents by tokens."""

import json
import re
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from polar_toolkit import calls, importing, merge, rewards, trajectories
from polar_toolkit.cli import app
from polar_toolkit.errors import Refusal
from polar_toolkit.tree import grow


def record(prompt, output, **columns):
    return {"prompt_ids": prompt, "output_ids": output, "logprobs": [-0.5] * len(output), **columns}


def written(path, *records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def imported(tmp_path, *records):
    file = written(tmp_path / "r.jsonl", *records)
    importing.import_records([file], tmp_path / "run", temperature=1.0)
    return tmp_path / "run"


def quiet(run, done, total):
    """Progress that nobody watches."""


def test_full_prompts_become_trajectories_that_merge_reads(tmp_path):
    """Two turns of a session: one chain, whose edge is shown by tokens."""
    run = imported(
        tmp_path,
        record([1, 2], [3], session_id="s", weight_version="7", temperature=0.5),
        record([1, 2, 3, 4], [5, 6], session_id="s", weight_version="8", temperature=0.5),
    )
    forest = grow(calls.read(run))
    assert [(node.edge, node.evidence) for node in forest.nodes] == [
        ("root(unknown_history)", None),
        ("exact", "tokens"),
    ]
    (path,) = trajectories.build(forest)
    assert path.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert path.loss_mask.tolist() == [0, 0, 1, 0, 1, 1]
    assert [path.version_names[code] for code in path.versions] == ["", "", "7", "", "8", "8"]
    assert path.temperature.tolist() == [1, 1, 0.5, 1, 0.5, 0.5]


def test_interleaved_records_of_one_file_are_parted_by_their_tokens(tmp_path):
    """Two agents in turn, without any name: two trajectories."""
    run = imported(
        tmp_path, record([1], [2]), record([7], [8]), record([1, 2, 3], [4]), record([7, 8, 9], [9])
    )  # fmt: skip
    built = trajectories.build(grow(calls.read(run)))
    assert [t.input_ids.tolist() for t in built] == [[1, 2, 3, 4], [7, 8, 9, 9]]
    assert {t.session[1] for t in built} == {"r"}


def test_rewards_and_groups_come_along(tmp_path):
    """A session's reward is that of its last record that has one; a batch can be made at once."""
    run = imported(
        tmp_path,
        record([1], [2], rollout_id=1, group_index=5, reward=0.0),
        record([1, 2, 3], [4], rollout_id=1, group_index=5, reward=1.0),
        record([1], [9], rollout_id=2, group_index=5, reward=0.0),
    )
    assert rewards.read(run) == {"1": 1.0, "2": 0.0}
    merge.merge(run, run / "merged", merge.Options(), quiet)
    batch = pq.read_table(run / "merged" / "batches")
    assert sorted(name for row in batch["session_ids"].to_pylist() for name in row) == ["1", "2"]


def test_order_decides_which_reward_is_the_last(tmp_path):
    """Not the order of lines, where records say when they were made."""
    run = imported(
        tmp_path, record([1, 2, 3], [4], reward=1.0, timestamp=2.5), record([1], [2], reward=0.0, timestamp=1.5)
    )
    assert rewards.read(run) == {"r": 1.0}
    assert [call.sequence for call in calls.read(run)] == [1_500_000_000, 2_500_000_000]


def test_bad_records_are_set_aside_with_their_place_and_reason(tmp_path):
    """What can be taken is taken, and nothing is dropped in silence."""
    file = written(tmp_path / "r.jsonl", record([1], [2]), record([1, 2, 3], [-4]), record([], [1]), record([9], [9]))
    summary = importing.import_records([file], tmp_path / "run", temperature=1.0)
    assert (summary.taken, summary.bad, summary.bad_share) == (2, 2, 0.5)
    assert summary.first_bad == [
        "r.jsonl:2: output_ids holds an id outside 0 .. 2147483647",
        "r.jsonl:3: the prompt is empty",
    ]
    listed = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [f"{one['where']}: {one['reason']}" for one in listed] == summary.first_bad


def test_a_call_that_comes_twice_is_bad_the_second_time(tmp_path):
    """Its choices are calls of their own."""
    file = written(
        tmp_path / "r.jsonl",
        record([1], [2], call_id="a"),
        record([1], [3], call_id="a", choice=1),
        record([1], [2], call_id="a"),
    )
    summary = importing.import_records([file], tmp_path / "run", temperature=1.0)
    assert (summary.taken, summary.first_bad) == (2, ["r.jsonl:3: call 'a', choice 0, was there before"])


def test_nothing_is_overwritten(tmp_path):
    """An existing folder is refused, whatever it holds."""
    file = written(tmp_path / "r.jsonl", record([1], [2]))
    (tmp_path / "run").mkdir()
    with pytest.raises(Refusal, match="run exists"):
        importing.import_records([file], tmp_path / "run", temperature=1.0)
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(("text", "sentence"), [("", "none of 0 records"), ("{}\n", r"because of r\.jsonl:1: no prom")])
def test_without_one_good_record_nothing_is_written(tmp_path, text, sentence):
    """The sentence gives the first reason."""
    (tmp_path / "r.jsonl").write_text(text)
    with pytest.raises(Refusal, match=sentence):
        importing.import_records([tmp_path / "r.jsonl"], tmp_path / "run", temperature=1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def test_two_imports_of_the_same_records_are_known_as_copies(tmp_path):
    """Merging both would train their tokens twice."""
    file = written(tmp_path / "r.jsonl", record([1], [2]))
    for name in ("one", "two"):
        importing.import_records([file], tmp_path / "runs" / name, temperature=1.0)
    with pytest.raises(Refusal, match="one is a copy"):
        merge.merge(tmp_path / "runs", tmp_path / "merged", merge.Options(), quiet)


def test_the_folder_is_its_owners_only(tmp_path):
    """As any run folder: prompts are data."""
    run = imported(tmp_path, record([1], [2], reward=1.0))
    assert run.stat().st_mode & 0o077 == 0
    assert {path.stat().st_mode & 0o777 for path in run.rglob("*") if path.is_file()} == {0o600}


def test_large_parquet_is_streamed(tmp_path):
    """200 full prompts of 100,000 tokens, 80 MB, within 60 MB of Python's memory."""
    with pq.ParquetWriter(tmp_path / "r.parquet", _table(0).schema) as writer:
        for turn in range(200):
            writer.write_table(_table(turn))
    tracemalloc.start()
    summary = importing.import_records([tmp_path / "r.parquet"], tmp_path / "run", temperature=1.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (summary.taken, summary.sampled, summary.bad) == (200, 2000, 0)
    assert peak < 60e6, f"{peak / 1e6:.0f} MB"
    assert len(calls.read(tmp_path / "run")) == 200


def _table(turn):
    return pa.table(
        {
            "prompt_ids": pa.array([np.full(100_000, turn, np.int32)]),
            "completion_ids": pa.array([np.arange(10, dtype=np.int32)]),
            "logprobs": pa.array([np.full(10, -1, np.float32)]),
        }
    )


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_command_says_what_it_took_and_merge_goes_on_from_there(tmp_path):
    """Two lines to a batch."""
    file = written(tmp_path / "r.jsonl", record([1], [2], reward=1), record([1, 2, 3], [4, 5]))
    done = invoke("import", file, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "2 calls of 1 sessions with 3 sampled tokens and 1 rewards" in done.output
    assert re.search(r"trained.*3.*100\.0%", invoke("merge", tmp_path / "run").output)


def test_above_max_bad_the_exit_code_is_3_and_the_work_is_done(tmp_path):
    """A threshold for pipelines; any bad record is above the default."""
    file = written(tmp_path / "r.jsonl", record([1], [2]), record([1], [-2]))
    done = invoke("import", file, "--out", tmp_path / "one")
    assert done.exit_code == 3
    assert "r.jsonl:2: output_ids holds an id outside" in done.output
    assert "50.0% of records are bad, above 0.0%" in done.stderr
    assert (tmp_path / "one" / "calls").is_dir()
    assert invoke("import", file, "--out", tmp_path / "two", "--max-bad", "0.5").exit_code == 0
