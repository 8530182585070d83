"""Which attempt begins when, what is tried again, what is enough, and what a stopped rollout leaves to do."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from polar_mitm import identity
from polar_toolkit import rewards
from polar_toolkit.errors import Refusal
from polar_toolkit.rollout import outcome
from polar_toolkit.rollout.board import Board
from polar_toolkit.rollout.options import Pools, attempts
from polar_toolkit.rollout.outcome import Status
from polar_toolkit.rollout.sandbox import Ended, SandboxError
from polar_toolkit.rollout.state import State
from tests.toolkit.rollout.acting import AGENT, Stage, options, runner, tasks, until, well


def events(run, kind):
    lines = (run / "rollout" / "events.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == kind]


def test_every_attempt_ends_as_one_row_with_its_reward(tmp_path):
    """Rows come back in order, stand in rollouts.parquet, and trained rewards in rewards.jsonl by session."""
    stage = Stage(tmp_path)
    rows = asyncio.run(runner(options(tmp_path, samples=2), tasks("a", "b"), stage).run())
    assert [row.attempt_id for row in rows] == ["a.1", "a.2", "b.1", "b.2"]
    assert {(row.status, row.reward, row.trained) for row in rows} == {(Status.COMPLETED, 1.0, True)}
    assert pq.read_table(tmp_path / outcome.FILE).column("session_id").to_pylist() == ["a.1", "a.2", "b.1", "b.2"]
    assert rewards.read(tmp_path) == {"a.1": 1.0, "a.2": 1.0, "b.1": 1.0, "b.2": 1.0}
    assert not stage.open


def test_no_stage_holds_more_than_its_pool(tmp_path):
    """Commands of each kind run as many at once as their pool says, and no more than `ready` are prepared ahead."""
    now, most = {"sh": 0, AGENT: 0, "ahead": 0}, {"sh": 0, AGENT: 0, "ahead": 0}

    def add(kind, count):
        now[kind] += count
        most[kind] = max(most[kind], now[kind])

    async def part(room, command):
        kind = command.argv[0]
        if room.judging or kind == "find":
            return await well(room, command)
        if kind == "sh":
            add("ahead", 1)
        else:
            add("ahead", -1)
        add(kind, 1)
        await asyncio.sleep(0.05 if kind == AGENT else 0.005)
        add(kind, -1)
        return await well(room, command)

    stage = Stage(tmp_path, part)
    asked = options(tmp_path, samples=8, pools=Pools(init=2, ready=4, run=3, post=2))
    asyncio.run(runner(asked, tasks("a", "b", "c"), stage).run())
    assert most == {"sh": 2, AGENT: 3, "ahead": 4}
    assert stage.most <= 4 + 2 * (2 * 3 + 2)


def test_memory_is_bounded_by_the_pools_and_not_by_the_task_list(tmp_path):
    """However many attempts there are, few of them exist at a time, as tasks of the event loop and as sandboxes."""
    counts = []

    async def part(room, command):
        counts.append(len(asyncio.all_tasks()))
        return await well(room, command)

    stage = Stage(tmp_path, part)
    asyncio.run(runner(options(tmp_path, samples=100), tasks("a", "b"), stage).run())
    assert max(counts) < 20
    assert stage.most < 12


def test_groups_are_worked_on_in_order(tmp_path):
    """The first group is done before the last one begins, so that it can be trained on early."""
    asyncio.run(runner(options(tmp_path, samples=4), tasks("a", "b", "c", "d"), Stage(tmp_path)).run())
    begins = min(row["time"] for row in events(tmp_path, "began") if row["session_id"].startswith("d"))
    first = [row["time"] for row in events(tmp_path, "ended") if row["outcome"]["group_id"] == "a"]
    assert len(first) == 4
    assert max(first) <= begins


def test_a_group_that_has_enough_is_finished(tmp_path):
    """The attempts that run or wait are cancelled, say why, and are not missing: a resume does not do them."""

    async def part(room, command):
        if command.argv[0] == AGENT and not room.plan.name.endswith(".1"):
            await asyncio.Event().wait()
        return await well(room, command)

    asked = options(tmp_path, samples=4, enough=1, pools=Pools(1, 4, 2, 2))  # the first one runs first
    stage = Stage(tmp_path, part)
    rows = asyncio.run(asyncio.wait_for(runner(asked, tasks("a"), stage).run(), 20))
    assert [row.status for row in rows] == [Status.COMPLETED, *[Status.CANCELLED] * 3]
    assert rows[1].note == rows[3].note == "its group had enough: 1 attempts with a reward"
    assert not stage.open
    again = Stage(tmp_path)
    assert [row.status for row in asyncio.run(runner(asked, tasks("a"), again).run())] == [row.status for row in rows]
    assert not again.did


def test_a_fault_of_the_machine_is_tried_again_in_another_session(tmp_path):
    """The row is the last try's, and says how many there were."""

    async def part(room, command):
        if room.plan.name == "a.1" and command.argv[0] == AGENT:
            raise SandboxError("the disk is gone")
        return await well(room, command)

    (row,) = asyncio.run(runner(options(tmp_path), tasks("a"), Stage(tmp_path, part)).run())
    assert (row.status, row.session_id, row.tries) == (Status.COMPLETED, "a.1.try2", 2)
    assert rewards.read(tmp_path) == {"a.1.try2": 1.0}
    assert [event["note"] for event in events(tmp_path, "again")] == ["the disk is gone"]


def test_tries_end(tmp_path):
    """What fails each time is a row of the last failure."""

    async def part(room, command):
        raise SandboxError(f"no room for {room.plan.name}")

    (row,) = asyncio.run(runner(options(tmp_path, tries=3), tasks("a"), Stage(tmp_path, part)).run())
    assert (row.status, row.tries, row.note) == (Status.SETUP_FAILED, 3, "no room for a.1.try3")


def test_a_harness_that_failed_while_the_interceptor_died_is_tried_again(tmp_path):
    """One that did not fail is judged: it never noticed."""
    stage = Stage(tmp_path)

    async def part(room, command):
        if command.argv[0] == AGENT and "try2" not in room.plan.name:
            stage.restarts += 1
            return Ended(int(room.plan.name == "a.1"), "itself", 0.0)
        return await well(room, command)

    stage.part = part
    rows = asyncio.run(runner(options(tmp_path), tasks("a", "b"), stage).run())
    assert [(row.session_id, row.status) for row in rows] == [
        ("a.1.try2", Status.COMPLETED),
        ("b.1", Status.COMPLETED),
    ]


def test_new_runs_wait_while_the_engine_is_saturated(tmp_path):
    """Nothing is started while half of the running calls wait for their first token; the board says why."""
    stage = Stage(tmp_path, waiting=4)
    asked, todo = options(tmp_path), tasks("a")
    board = Board(attempts(asked, todo))

    async def watched():
        work = asyncio.create_task(runner(asked, todo, stage, board).run())
        await until(lambda: bool(events(tmp_path, "hold")) if (tmp_path / "rollout").exists() else False)
        await until(lambda: any(event["stage"] == "ready" for event in events(tmp_path, "stage")))
        said = " ".join(board.lines())
        assert not any(what == AGENT for _, _, what in stage.did)
        stage.waiting = 0
        await work
        return said

    assert "the engine is saturated (4 of 8 calls wait)" in asyncio.run(asyncio.wait_for(watched(), 20))
    assert [event["reason"] for event in events(tmp_path, "hold")][-1] == ""


def stopped(run, todo, asked):
    """Stop a rollout while the harness of task b runs and task c is prepared."""

    async def part(room, command):
        if command.argv[0] == AGENT and room.plan.name == "b.1":
            await asyncio.Event().wait()
        return await well(room, command)

    async def body():
        stage = Stage(run, part)
        going = runner(asked, todo, stage)
        work = asyncio.create_task(going.run())
        await until(lambda: {("b.1", "run", AGENT), ("c.1", "run", "sh")} <= set(stage.did))
        going.stop()
        rows = await work
        assert not stage.open
        return rows

    return asyncio.run(asyncio.wait_for(body(), 20))


def test_a_stopped_rollout_has_a_row_of_each_attempt(tmp_path):
    """What is done keeps its row; what ran or waited is cancelled and says how to go on."""
    rows = stopped(tmp_path, tasks("a", "b", "c", "d"), options(tmp_path))
    assert [row.status for row in rows] == [Status.COMPLETED, *[Status.CANCELLED] * 3]
    assert "--resume" in rows[3].note
    assert pq.read_table(tmp_path / outcome.FILE).num_rows == 4


def test_a_resumed_rollout_does_exactly_what_is_missing(tmp_path):
    """In new sessions, where one was begun already; what a runner left is swept first."""
    asked, todo = options(tmp_path, pools=Pools(1, 1, 1, 1)), tasks("a", "b", "c", "d")
    stopped(tmp_path, todo, asked)
    stage = Stage(tmp_path)
    rows = asyncio.run(runner(asked, todo, stage).run())
    assert [(row.session_id, row.status, row.tries) for row in rows] == [
        ("a.1", Status.COMPLETED, 1),
        ("b.1.try2", Status.COMPLETED, 2),
        ("c.1.try2", Status.COMPLETED, 2),
        ("d.1", Status.COMPLETED, 1),
    ]
    assert {name.removesuffix(".eval") for name, _, _ in stage.did} == {"b.1.try2", "c.1.try2", "d.1"}
    assert stage.swept == 1
    assert set(rewards.read(tmp_path)) == {"a.1", "b.1.try2", "c.1.try2", "d.1"}


def test_a_reward_that_a_dead_runner_did_not_write_is_made_up_for(tmp_path):
    """It died between the row and the reward."""
    asked, todo = options(tmp_path), tasks("a")
    asyncio.run(runner(asked, todo, Stage(tmp_path)).run())
    (tmp_path / rewards.FILE).unlink()
    asyncio.run(runner(asked, todo, Stage(tmp_path)).run())
    assert rewards.read(tmp_path) == {"a.1": 1.0}


def test_the_sessions_of_a_dead_runner_are_sealed(tmp_path):
    """No call of what may still live somewhere is answered any more."""
    asked, todo = options(tmp_path), tasks("a")
    with State(tmp_path) as state:
        asyncio.run(state.began(attempts(asked, todo)[0]))
    secret = identity.register(tmp_path, "a.1", "a")
    asyncio.run(runner(asked, todo, Stage(tmp_path)).run())
    assert identity.Sessions(tmp_path).identify("a.1", secret).sealed


def test_two_runners_do_not_work_on_one_run(tmp_path):
    """The second is refused with the first one's process, and changes nothing."""
    with State(tmp_path), pytest.raises(Refusal, match="another runner works on"):
        asyncio.run(runner(options(tmp_path), tasks("a"), Stage(tmp_path)).run())


def test_failures_are_masked_unless_the_user_says_otherwise(tmp_path):
    """A harness error has no reward; named among the rewarded statuses, it has 0."""
    stage = Stage(tmp_path / "one", calls=lambda session: 0)
    (row,) = asyncio.run(runner(options(tmp_path / "one"), tasks("a"), stage).run())
    assert (row.status, row.reward, row.trained) == (Status.HARNESS_ERROR, None, False)
    asked = options(tmp_path / "two", rewarded=(Status.COMPLETED, Status.HARNESS_ERROR))
    (row,) = asyncio.run(runner(asked, tasks("a"), replace(stage, run=tmp_path / "two")).run())
    assert (row.reward, row.trained) == (0.0, True)


def test_a_rollout_whose_interceptor_is_lost_stops_with_its_sentence(tmp_path):
    """What was under way is missing still, and nothing is left open."""
    stage = Stage(tmp_path)

    def lost(session):
        raise Refusal("the interceptor does not come back")

    stage.calls = lost
    with pytest.raises(Refusal, match="does not come back"):
        asyncio.run(runner(options(tmp_path), tasks("a"), stage).run())
    assert not stage.open
    (row,) = asyncio.run(runner(options(tmp_path), tasks("a"), Stage(tmp_path)).run())
    assert (row.status, row.session_id) == (Status.COMPLETED, "a.1.try2")
