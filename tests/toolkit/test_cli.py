"""What people type: output, exit codes and sentences."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from polar_toolkit.cli import app

polar_toolkit = CliRunner()


def invoke(*words):
    return polar_toolkit.invoke(app, [str(word) for word in words])


@pytest.fixture
def run(tmp_path, book):
    """Two sessions of one group, two turns each, and a title."""
    for name in ("one", "two"):
        columns = {"session_id": name, "group_id": "g"}
        book.call(f"{name}-a", [1, 2], [3], **columns)
        book.call(f"{name}-b", [1, 2, 3, 4], [5, 6], parent=f"{name}-a", rerender_shared=3, **columns)
    book.call("title", [9], [8, 8], kind="auxiliary", session_id="one", group_id="g")
    return book.write(tmp_path / "runs" / "first")


def test_merge_writes_and_accounts_and_says_how_to_give_rewards(run):
    """Without rewards, the exact next command is printed."""
    done = invoke("merge", run)
    assert done.exit_code == 0, done.output
    assert f"polar-toolkit reward {run} --session NAME VALUE" in done.output
    assert "re-render baseline: kept 2 of 2 edges / 100.0%" in done.output
    assert re.search(r"trained.*6.*75\.0%", done.output)
    report = json.loads((run / "merged" / "report.json").read_text())
    assert (report["tokens"]["sampled"], report["tokens"]["trained"]) == (8, 6)
    assert report["tokens"]["not_trained"] == {"auxiliary": 2}


def test_reward_then_merge_makes_a_batch(run):
    """The three commands of a GRPO batch."""
    assert invoke("reward", run, "--session", "one", "1").exit_code == 0
    assert invoke("reward", run, "--session", "two", "0").exit_code == 0
    done = invoke("merge", run.parent)
    assert done.exit_code == 0, done.output
    (row,) = pq.read_table(run.parent / "merged" / "batches").to_pylist()
    assert row["session_ids"] == ["one", "two"]
    assert {a for a, m in zip(row["advantages"], row["loss_mask"], strict=True) if m} == {1.0, -1.0}


def test_batch_is_the_second_half_of_merge(run, tmp_path):
    """Rewards given after the merge are taken up."""
    assert invoke("merge", run).exit_code == 0
    (tmp_path / "r.csv").write_text("session_id,reward\none,1\ntwo,0\n")
    assert "2 rewards added" in invoke("reward", run, "--from", tmp_path / "r.csv").output
    done = invoke("batch", run, "--max-tokens", 8)
    assert done.exit_code == 0, done.output
    assert len(pq.read_table(run / "merged" / "batches")) == 2


def test_out_names_the_merged_folder(run, tmp_path):
    """The runs stay untouched."""
    assert invoke("merge", run, "--out", tmp_path / "elsewhere").exit_code == 0
    assert (tmp_path / "elsewhere" / "report.json").exists()
    assert not (run / "merged").exists()


def test_below_min_trained_the_exit_code_is_3_and_the_work_is_done(run):
    """A threshold for pipelines."""
    done = invoke("merge", run, "--min-trained", "0.8")
    assert done.exit_code == 3
    assert "75.0% of sampled tokens are trained, below 80.0%" in done.stderr
    assert (run / "merged" / "report.json").exists()


def test_kinds_are_chosen_by_a_flag(run):
    """With auxiliary calls everything is trained."""
    assert invoke("merge", run, "--kinds", "agent,auxiliary", "--min-trained", "1").exit_code == 0


def test_zero_variance_can_be_dropped(run):
    """Then no batch is left, and the command says so."""
    for name in ("one", "two"):
        invoke("reward", run, "--session", name, "1")
    assert "all equal" in invoke("merge", run).output
    done = invoke("merge", run, "--drop-zero-variance")
    assert "no batch: none of the rewarded sessions has a token to train" in done.output
    assert not (run / "merged" / "batches").exists()


def damage_nothing(run):
    (run / "calls" / "w-000001.parquet").unlink()
    (run / "calls").rmdir()


def damage_truncated(run):
    path = run / "calls" / "w-000001.parquet"
    path.write_bytes(path.read_bytes()[:100])


def damage_foreign(run):
    pq.write_table(pa.table({"x": [1]}), run / "calls" / "w-000001.parquet")


@pytest.mark.parametrize("damage", [damage_nothing, damage_truncated, damage_foreign])
def test_bad_input_is_one_sentence_with_exit_code_2_and_nothing_overwritten(run, damage):
    """The earlier merge stays as it was."""
    assert invoke("merge", run).exit_code == 0
    before = (run / "merged" / "report.json").read_bytes()
    damage(run)
    done = invoke("merge", run)
    assert done.exit_code == 2
    (sentence,) = done.stderr.strip().splitlines()
    assert sentence.startswith(f"polar-toolkit: {run}")
    assert (run / "merged" / "report.json").read_bytes() == before


def test_a_foreign_merged_folder_is_refused(run):
    """Exit code 2, and the folder is named."""
    (run / "merged").mkdir()
    (run / "merged" / "mine").touch()
    done = invoke("merge", run)
    assert done.exit_code == 2
    assert "was not made by polar-toolkit merge" in done.stderr


@pytest.mark.parametrize("words", [[], ["1"], ["--session", "one"], ["--from", "x", "1"]])
def test_half_a_reward_is_refused(run, words):
    """Both forms are named."""
    done = invoke("reward", run, *words)
    assert done.exit_code == 2
    assert "--session NAME VALUE or --from FILE" in done.stderr


def test_a_negative_reward_can_be_given(run):
    """Behind `--`, as for any command line."""
    assert invoke("reward", run, "--session", "one", "--", "-1").exit_code == 0


def test_a_reward_for_an_unknown_session_is_refused(run):
    """Exit code 2, and the name is in the sentence."""
    done = invoke("reward", run, "--session", "typo", "1")
    assert done.exit_code == 2
    assert "'typo'" in done.stderr


def test_stats_writes_nothing(run):
    """The same accounting, as tables or as JSON."""
    assert "auxiliary" in invoke("stats", run).output
    assert json.loads(invoke("stats", run, "--json").stdout)["tokens"]["trained"] == 6
    assert not (run / "merged").exists()


def test_inspect_lists_sessions_and_shows_one_and_a_call(run):
    """The three levels."""
    assert "two" in invoke("inspect", run).output
    assert "one-b.0" in invoke("inspect", run, "one").output
    assert "-0.50000" in invoke("inspect", run, "two-b").output


def test_rescore_prints_differences_and_exits_with_3_above_the_tolerance(run, engine):
    """The run's engine is asked unless another is named."""
    rows = [[None, 1, None], [-1, 2, None], [-1, 3, None], [-1, 4, None], [-0.5, 5, None], [-0.52, 6, None]]
    engine.answers["/generate"] = {"meta_info": {"input_token_logprobs": rows}}
    done = invoke("rescore", run, "one-b", "--engine", engine.url)
    assert done.exit_code == 3, done.output
    assert "largest difference: 2.00e-02 over 2 tokens" in done.output
    assert invoke("rescore", run, "one-b", "--engine", engine.url, "--tolerance", "0.1").exit_code == 0
    assert "give --engine" in invoke("rescore", run, "one-b").stderr


def test_env_without_an_interceptor_is_refused(run):
    """Exit code 2, and how to start it."""
    done = invoke("env", run)
    assert done.exit_code == 2
    assert "mitmdump -s addons/polar.py" in done.stderr


def test_env_prints_exports_json_and_env_files(run, engine, tmp_path):
    """Three formats of the same variables."""
    (tmp_path / "ca.pem").write_text("ours\n")
    info = {
        "host": "127.0.0.1",
        "port": engine.server_address[1],
        "ca": str(tmp_path / "ca.pem"),
        "gateway": "",
        "pid": 1,
    }
    (run / "proxy.json").write_text(json.dumps(info))
    proxy = json.loads(invoke("env", run, "--session", "x", "--group", "g", "--format", "json").stdout)["HTTPS_PROXY"]
    assert proxy.startswith("http://x:")
    assert f"HTTPS_PROXY={proxy}\n" in invoke("env", run, "--session", "x", "--group", "g", "--format", "docker").stdout
    assert f"export HTTPS_PROXY={proxy}\n" in invoke("env", run, "--session", "x", "--group", "g").stdout


def test_doctor_exits_with_1_when_a_check_fails(run, tmp_path):
    """One line a check."""
    assert invoke("doctor", run).exit_code == 0
    done = invoke("doctor", tmp_path / "nowhere")
    assert done.exit_code == 1
    assert "fail  run folder" in done.output
