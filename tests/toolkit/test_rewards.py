"""Rewards of sessions on disk."""

import json
import math

import pytest

from polar_toolkit import rewards
from polar_toolkit.errors import Refusal, UnreadableFile


@pytest.fixture
def run(tmp_path, book):
    """A run whose session `s` made a call and whose session `idle` is only registered."""
    book.call("a", [1], [2])
    run = book.write(tmp_path / "r")
    (run / "sessions.jsonl").write_text(json.dumps({"session_id": "idle", "secret": "x", "group_id": None}) + "\n")
    return run


def test_the_last_reward_of_a_session_wins(run):
    """A session may be scored again."""
    rewards.append(run, {"s": 0.0})
    rewards.append(run, {"s": 1.0, "idle": 0.5})
    assert rewards.read(run) == {"s": 1.0, "idle": 0.5}


def test_earlier_lines_stay(run):
    """The file is only ever appended to."""
    rewards.append(run, {"s": 0.0})
    before = (run / rewards.FILE).read_text()
    rewards.append(run, {"s": 1.0})
    assert (run / rewards.FILE).read_text().startswith(before)


def test_a_run_without_rewards_has_none(run):
    """No file is no reward."""
    assert rewards.read(run) == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(run, value):
    """The sentence names the session."""
    with pytest.raises(Refusal, match="'s' is"):
        rewards.append(run, {"s": value})
    assert not (run / rewards.FILE).exists()


def test_an_unknown_session_is_refused_and_nothing_is_written(run):
    """A typing error in a name must not become a lost reward."""
    with pytest.raises(Refusal, match="no session 'typo'"):
        rewards.append(run, {"s": 1.0, "typo": 1.0})
    assert not (run / rewards.FILE).exists()


@pytest.mark.parametrize("line", ["{", "[]", '{"session_id": "s"}', '{"reward": 1}', '{"session_id":"s","reward":"x"}'])
def test_a_malformed_line_is_refused_by_number(run, line):
    """The error names file and line."""
    (run / rewards.FILE).write_text('{"session_id": "s", "reward": 1}\n' + line + "\n")
    with pytest.raises(UnreadableFile, match=r"rewards\.jsonl:2"):
        rewards.read(run)


def test_rewards_come_from_csv_and_jsonl(tmp_path):
    """Both formats have the fields session_id and reward."""
    (tmp_path / "r.csv").write_text("session_id,reward,note\na,1,x\nb,0.5,y\n")
    (tmp_path / "r.jsonl").write_text('{"session_id": "a", "reward": 1, "checks": 3}\n')
    assert rewards.from_file(tmp_path / "r.csv") == {"a": 1.0, "b": 0.5}
    assert rewards.from_file(tmp_path / "r.jsonl") == {"a": 1.0}


@pytest.mark.parametrize("name", ["missing.csv", "r.txt"])
def test_another_file_is_refused(tmp_path, name):
    """The sentence says which files are read."""
    (tmp_path / "r.txt").write_text("")
    with pytest.raises(Refusal, match=r"\.jsonl"):
        rewards.from_file(tmp_path / name)
