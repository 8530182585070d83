"""How work reaches the sandbox that it is judged in, and what becomes of an evaluation that fails."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from polar_toolkit.rollout.evaluators import EvaluatorError
from polar_toolkit.rollout.house import Failed
from polar_toolkit.rollout.judging import Evaluation
from polar_toolkit.rollout.options import attempts
from polar_toolkit.rollout.outcome import Status
from polar_toolkit.rollout.sandbox import Ended, SandboxError
from polar_toolkit.rollout.task import TESTS, Budget, Check, Environment
from tests.toolkit.rollout.acting import Stage, options, tasks, well
from tests.toolkit.rollout.test_stages import house

COMMIT = "0123456789abcdef"


def judged(stage, **changes):
    """The verdict on a task's work, after the sandbox of the evaluation was prepared beforehand."""
    (attempt,) = attempts(options(stage.run), [replace(tasks("a")[0], **changes)])
    place = house(stage)
    place.folder(attempt).mkdir(parents=True)

    async def go():
        work = await place.make(attempt, place.network(attempt, "secret"))
        evaluation = Evaluation(place, attempt)
        evaluation.prepare()
        try:
            return await evaluation.judge(work)
        finally:
            await evaluation.close()
            await work.close()

    try:
        return asyncio.run(go())
    finally:
        assert not stage.open


def test_the_whole_workspace_takes_the_place_of_the_prepared_one(tmp_path):
    """What the harness deleted does not come back: the prepared files go first. The tests come last of all."""
    stage = Stage(tmp_path)
    judged(stage, check=Check("command", tests=Path("tests")), environment=Environment(prepare=("make",)))
    evaluation = [(what, with_what) for name, what, with_what in stage.did if name == "a.1.eval"]
    assert evaluation == [
        ("run", "sh"), ("run", "find"), ("put", "/workspace"), ("put", TESTS), ("evaluate", ""),
    ]  # fmt: skip


def test_a_patch_is_applied_to_the_base_and_the_workspace_stays_behind(tmp_path):
    """Nothing but the difference crosses over."""
    stage = Stage(tmp_path)
    check = Check("command", carry="patch")
    judged(stage, check=check, environment=Environment(base_commit=COMMIT))
    assert ("a.1", "take", "/workspace") not in stage.did
    assert ("a.1.eval", "put", "/tmp/polar.patch") in stage.did
    assert (tmp_path / "rollout" / "attempts" / "a.1" / "patch.diff").read_text() == "words"


def test_a_repository_that_the_harness_broke_is_judged_without_its_work(tmp_path):
    """Else an agent could choose not to be judged."""

    async def broken(room, command):
        return Ended(0 if room.judging else 128, "itself", 0)

    stage = Stage(tmp_path, broken)
    judged(stage, check=Check("command", carry="patch"), environment=Environment(base_commit=COMMIT))
    assert (tmp_path / "rollout" / "attempts" / "a.1" / "patch.diff").read_text() == ""
    assert ("a.1.eval", "evaluate", "") in stage.did


def refuse(bench):
    raise EvaluatorError("the tests do not start")


@pytest.mark.parametrize(
    ("reward", "words"), [(refuse, "the tests do not start"), (lambda bench: math.nan, "gave the reward nan")]
)
def test_what_cannot_be_judged_has_no_reward(tmp_path, reward, words):
    """It is the evaluator's failure, with its sentence, and another try would not help."""
    with pytest.raises(Failed, match=words) as failed:
        judged(Stage(tmp_path, reward=reward))
    assert (failed.value.status, failed.value.again) == (Status.EVALUATOR_FAILED, False)


def test_an_evaluator_that_hangs_ends_with_its_budget(tmp_path):
    """And its sandbox with it."""

    class Hanging(Stage):
        async def evaluate(self, bench):
            await asyncio.Event().wait()

    with pytest.raises(Failed, match=r"not judged within 0\.05 s"):
        judged(Hanging(tmp_path), budget=Budget(post_s=0.05))


def test_a_sandbox_that_breaks_is_replaced_and_the_work_judged_all_the_same(tmp_path):
    """The harness is not run again for it."""
    broken = ["the engine of the containers is gone"]

    async def part(room, command):
        if room.judging and broken:
            raise SandboxError(broken.pop())
        return await well(room, command)

    assert judged(Stage(tmp_path, part)).reward == 1.0


def test_work_that_cannot_be_taken_out_is_worth_another_try(tmp_path):
    """It is lost with its sandbox, by no fault of the harness's."""

    async def gone(room, command):
        if not room.judging:
            raise SandboxError("the container is gone")
        return await well(room, command)

    with pytest.raises(Failed, match="the container is gone") as failed:
        judged(Stage(tmp_path, gone), environment=Environment(base_commit=COMMIT))
    assert failed.value.again
