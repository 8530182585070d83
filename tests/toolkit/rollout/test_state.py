"""What of a rollout is on disk, and what can be told from it after a death at any moment."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from polar_toolkit.errors import Refusal, UnreadableFile
from polar_toolkit.rollout import state
from polar_toolkit.rollout.options import attempts
from polar_toolkit.rollout.outcome import Outcome, Status
from polar_toolkit.rollout.state import Plan, State, digest_of, read_plan, write_plan
from tests.toolkit.rollout.acting import options, tasks


def outcome(name, session, status=Status.COMPLETED):
    return Outcome(name, session, "a", "a", 1, 1, 7, status, reward_parts={"x": 0.5}, metadata={"k": [1]})


def plan(run):
    return Plan("id", Path("tasks"), ("a", "b"), digest_of(tasks("a", "b")), options(run), {"harness": "acted 1.0"})


def test_a_plan_is_read_as_it_was_written(tmp_path):
    """Options, tasks and versions; the run folder is where it is found, should it have been moved."""
    write_plan(plan(tmp_path / "run"))
    assert read_plan(tmp_path / "run") == plan(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    (tmp_path / "run").rename(tmp_path / "moved")
    assert read_plan(tmp_path / "moved").options.run == tmp_path / "moved"


def test_a_run_folder_holds_one_rollout(tmp_path):
    """The second is refused, with the way to go on with the first."""
    write_plan(plan(tmp_path))
    with pytest.raises(Refusal, match=f"--resume {tmp_path}"):
        write_plan(replace(plan(tmp_path), run_id="another"))
    assert read_plan(tmp_path).run_id == "id"


def test_a_rollout_that_died_while_it_wrote_its_plan_can_begin_again(tmp_path, monkeypatch):
    """There is no plan yet, so nothing has to be resumed; a half-written one would be neither."""

    def cut(row, file, **_):
        file.write('{"run_id": ')
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(state.json, "dump", cut)
        with pytest.raises(KeyboardInterrupt):
            write_plan(plan(tmp_path))
    assert not (tmp_path / "rollout" / "plan.json").exists()
    write_plan(plan(tmp_path))
    assert read_plan(tmp_path).run_id == "id"


def test_the_digest_changes_with_any_task():
    """A resumed rollout is told when its tasks are others."""
    some = tasks("a", "b")
    assert digest_of(some) == digest_of(tasks("a", "b"))
    assert digest_of(some) != digest_of([some[0], replace(some[1], instruction="else")])


def test_a_broken_plan_is_named(tmp_path):
    """With its file."""
    write_plan(plan(tmp_path))
    (tmp_path / "rollout" / "plan.json").write_text("{")
    with pytest.raises(UnreadableFile, match=r"plan\.json is malformed"):
        read_plan(tmp_path)


def test_the_past_tells_what_is_done_what_was_tried_and_what_is_open(tmp_path):
    """An attempt that was stopped is missing; its session is not open any more."""
    (one,) = attempts(options(tmp_path), tasks("a"))
    two = replace(one, sample=2)
    with State(tmp_path) as writing:
        asyncio.run(writing.began(one))
        writing.note("again", session_id="a.1", note="")
        asyncio.run(writing.began(replace(one, tried=2)))
        asyncio.run(writing.ended(outcome("a.1", "a.1.try2"), missing=False))
        asyncio.run(writing.began(two))
        asyncio.run(writing.ended(outcome("a.2", "a.2", Status.CANCELLED), missing=True))
        asyncio.run(writing.began(replace(two, tried=2)))
    with State(tmp_path) as reading:
        assert reading.past.outcomes == {"a.1": outcome("a.1", "a.1.try2")}
        assert reading.past.tried == {"a.1": 2, "a.2": 2}
        assert reading.past.open == {"a.2.try2"}


def test_the_beginning_of_a_line_is_cut_off(tmp_path):
    """A dying machine leaves one at most; what comes next stands on a line of its own."""
    with State(tmp_path) as writing:
        asyncio.run(writing.ended(outcome("a.1", "a.1"), missing=False))
    events = tmp_path / "rollout" / "events.jsonl"
    whole = events.read_bytes()
    events.write_bytes(whole + b'{"event": "ended", "outc')
    with State(tmp_path) as reading:
        assert list(reading.past.outcomes) == ["a.1"]
    assert events.read_bytes() == whole


def test_a_line_that_is_no_event_is_named(tmp_path):
    """With its file and number: somebody edited it."""
    with State(tmp_path) as writing:
        writing.note("started")
    (tmp_path / "rollout" / "events.jsonl").write_text('{"event": "started"}\nhello\n')
    with pytest.raises(UnreadableFile, match=r"events\.jsonl:2 is no event"), State(tmp_path):
        pass


def test_the_lock_goes_with_its_process(tmp_path):
    """Whoever died holds nothing; whoever lives is named."""
    with State(tmp_path), pytest.raises(Refusal, match=f"process {os.getpid()}"), State(tmp_path):
        pass
    with State(tmp_path):
        assert (tmp_path / state.FOLDER / "lock").read_text() == str(os.getpid())
