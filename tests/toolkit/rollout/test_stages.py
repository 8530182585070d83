"""What one try at an attempt becomes: its status, its sentence, and what is left of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from polar_mitm import identity
from polar_toolkit.rollout.harnesses.programs import Found
from polar_toolkit.rollout.house import Failed, House
from polar_toolkit.rollout.interceptor import Figures, SessionFigures
from polar_toolkit.rollout.options import Keep, attempts
from polar_toolkit.rollout.outcome import Status
from polar_toolkit.rollout.recipe import Way
from polar_toolkit.rollout.sandbox import HOME, Ended, SandboxError
from polar_toolkit.rollout.stages import Trial
from polar_toolkit.rollout.task import Budget
from tests.toolkit.rollout.acting import AGENT, Stage, options, recipe, tasks, well


def house(stage, **changes):
    asked, harness = options(stage.run, **changes), recipe()
    return House(asked, harness, harness.way(), Found((), ""), "", stage, stage, lambda kind: stage)


def gone_through(stage, budget=None, **changes):
    """All stages of one try, as the runner goes through them."""
    (attempt,) = attempts(options(stage.run, **changes), [replace(tasks("a")[0], budget=budget or Budget())])
    trial = Trial(house(stage, **changes), attempt)

    async def go():
        status, note = Status.CANCELLED, ""
        try:
            await trial.prepare()
            status, note = await trial.run()
            await trial.judge()
        except Failed as failed:
            status, note = failed.status, failed.note
        await trial.close(status)
        return trial.outcome(status, note)

    row = asyncio.run(go())
    assert not stage.open, "a sandbox was left"
    return row


def acting(ended):
    """The harness ends like this; everything else works."""

    async def part(room, command):
        return ended if command.argv[0] == AGENT else await well(room, command)

    return part


@pytest.mark.parametrize(
    ("ended", "calls", "status", "words"),
    [
        (Ended(0, "itself", 1), 1, Status.COMPLETED, ""),
        (Ended(1, "itself", 1), 1, Status.COMPLETED, ""),
        (Ended(0, "itself", 1), 0, Status.HARNESS_ERROR, "without a completed model call (exit status 0)"),
        (Ended(137, "deadline", 1), 1, Status.TIMEOUT, "ended by its deadline of 1800 s"),
        (Ended(137, "deadline", 1), 0, Status.HARNESS_ERROR, "ended by its deadline of 1800 s without a completed"),
        (Ended(137, "disk", 1), 1, Status.HARNESS_ERROR, "used more than the 4096 MB of disk"),
        (Ended(137, "memory", 1), 1, Status.HARNESS_ERROR, "used more than the 4096 MB of memory"),
        (Ended(137, "killed", 1), 1, Status.HARNESS_ERROR, "killed from outside"),
    ],
)
def test_the_status_comes_from_the_calls_and_the_end(tmp_path, ended, calls, status, words):
    """Never from the exit status; a timeout with a trace is judged, a broken limit is not."""
    row = gone_through(Stage(tmp_path, acting(ended), calls=lambda session: calls))
    assert row.status is status
    assert words in row.note
    assert (row.reward is not None) == (status in (Status.COMPLETED, Status.TIMEOUT))
    assert (row.exit_code, row.calls) == (ended.status, calls)


@pytest.mark.parametrize(
    ("budget", "used", "status"),
    [
        (Budget(turns=3), SessionFigures(calls=4, turns=3, refused=1), Status.TIMEOUT),
        (Budget(turns=3), SessionFigures(calls=3, turns=3), Status.COMPLETED),
        (Budget(turns=3), SessionFigures(calls=3, turns=2, refused=1), Status.COMPLETED),
        (Budget(tokens=50), SessionFigures(calls=2, sampled=50), Status.TIMEOUT),
        (Budget(tokens=50), SessionFigures(calls=2, sampled=49), Status.COMPLETED),
    ],
)
def test_a_used_up_budget_is_a_timeout(tmp_path, budget, used, status):
    """One that was reached and not asked beyond is none: the harness ended by itself."""

    class Used(Stage):
        async def figures(self, sessions=()):
            return Figures(sessions=dict.fromkeys(sessions, used))

    assert gone_through(Used(tmp_path), budget).status is status


def test_the_session_is_sealed_and_the_harness_dead_before_anything_is_judged(tmp_path):
    """When the evaluator looks, no call of the session is answered any more."""
    stage = Stage(tmp_path)
    seen = []

    def look(bench):
        secret = identity.register(tmp_path, "a.1", "a")
        seen.append(identity.Sessions(tmp_path).identify("a.1", secret).sealed)
        return 1.0

    stage.reward = look
    gone_through(stage)
    assert seen == [True]
    order = [(what, with_what) for name, what, with_what in stage.did if name == "a.1"]
    assert order.index(("kill", "")) < order.index(("take", "/workspace"))


def test_budgets_and_hosts_stand_in_the_registration(tmp_path):
    """The gateway enforces them: what is registered is the attempt's."""
    stage = Stage(tmp_path)
    gone_through(stage, Budget(turns=4, tokens=99))
    session = identity.Sessions(tmp_path).identify("a.1", identity.register(tmp_path, "a.1", "a"))
    assert (session.turns, session.tokens, session.group_id) == (4, 99, "a")


def test_a_preparation_that_hangs_ends_with_its_budget(tmp_path):
    """As a row of its own status, which says what to do."""

    async def hang(room, command):
        await asyncio.Event().wait()
        return Ended(0, "itself", 0)

    row = gone_through(Stage(tmp_path, hang), Budget(init_s=0.05))
    assert (row.status, row.reward) == (Status.SETUP_FAILED, None)
    assert "not prepared within 0.05 s" in row.note


def test_a_prepare_command_that_fails_is_named(tmp_path):
    """With its status and the file that says why."""

    async def fail(room, command):
        return Ended(3, "itself", 0)

    row = gone_through(Stage(tmp_path, fail))
    assert row.status is Status.SETUP_FAILED
    assert row.note == (
        "prepare command 'prepare' ended with status 3 (itself); see rollout/attempts/a.1/prepare/1.err"
    )


def test_a_sandbox_that_cannot_be_made_leaves_a_sealed_session(tmp_path):
    """Its secret opens nothing afterwards."""

    class Full(Stage):
        async def create(self, plan):
            raise SandboxError("no space left")

    row = gone_through(Full(tmp_path))
    assert (row.status, row.note) == (Status.SETUP_FAILED, "no space left")
    assert identity.Sessions(tmp_path).identify("a.1", identity.register(tmp_path, "a.1", "a")).sealed


@pytest.mark.parametrize(
    ("keep", "calls", "kept"),
    [(Keep.ALL, 1, True), (Keep.NONE, 0, False), (Keep.FAILED, 1, False), (Keep.FAILED, 0, True)],
)
def test_workspaces_are_kept_for_a_look_as_asked(tmp_path, keep, calls, kept):
    """Of attempts that did not complete, unless the user says otherwise; the row names the folder."""
    row = gone_through(Stage(tmp_path, calls=lambda session: calls), keep=keep)
    assert (tmp_path / "rollout" / "attempts" / "a.1" / "workspace").exists() == kept
    assert ("workspace" in row.artifacts) == kept


def test_the_recipes_files_are_put_into_the_home_folder(tmp_path):
    """Before the harness starts."""
    stage = Stage(tmp_path)
    (attempt,) = attempts(options(tmp_path), tasks("a"))
    way = Way("only", "api.openai.com", "openai-chat", (AGENT, "{task}"), files={".agent/config.json": "{}"})

    async def go():
        trial = Trial(replace(house(stage), way=way), attempt)
        await trial.prepare()
        await trial.close(Status.CANCELLED)

    asyncio.run(go())
    assert ("a.1", "put", HOME) in stage.did
