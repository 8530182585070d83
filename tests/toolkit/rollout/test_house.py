"""How the two sandboxes of an attempt are made: what the harness's has, and what the evaluation's has not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from polar_toolkit.rollout.harnesses.programs import Found
from polar_toolkit.rollout.options import attempts
from polar_toolkit.rollout.sandbox import USUAL_PATH, Mount
from polar_toolkit.rollout.task import Environment
from tests.toolkit.rollout.acting import Stage, tasks
from tests.toolkit.rollout.test_stages import house

PROGRAMS = Found((Mount(Path("/opt/agent"), "/opt/agent"),), "/opt/agent/bin:/usr/bin")


def plans(place, task, secret="s3cret"):
    """The harness's and the evaluation's."""
    (attempt,) = attempts(place.options, [task])

    async def go():
        harness = await place.make(attempt, place.network(attempt, secret))
        return harness.plan, (await place.make(attempt, None)).plan

    return asyncio.run(go())


def test_the_evaluation_has_neither_network_nor_harness(tmp_path):
    """And no variable that leads anywhere; both have the attempt's seed."""
    place = replace(house(Stage(tmp_path)), programs=PROGRAMS)
    harness, evaluation = plans(place, replace(tasks("a")[0], allow_hosts=("example.org",)))
    assert harness.network
    assert harness.network.names == ("api.openai.com", "example.org")
    assert (harness.mounts, harness.variables["PATH"]) == (PROGRAMS.mounts, PROGRAMS.path)
    assert (evaluation.network, evaluation.mounts, list(evaluation.variables)) == (None, (), ["POLAR_SEED"])
    assert harness.variables["POLAR_SEED"] == evaluation.variables["POLAR_SEED"]
    assert evaluation.name == "a.1.eval"


def test_a_tasks_own_path_stands_before_the_usual_folders(tmp_path):
    """The harness's programs are found first, then what the task means by `python`."""
    programs = replace(PROGRAMS, path=f"/opt/agent/bin:{USUAL_PATH}")
    task = replace(tasks("a")[0], environment=Environment(variables={"PATH": "/testbed/bin"}))
    harness, _ = plans(replace(house(Stage(tmp_path)), programs=programs), task)
    assert harness.variables["PATH"] == f"/opt/agent/bin:/testbed/bin:{USUAL_PATH}"


def test_no_variable_holds_the_secret(tmp_path):
    """It is the switchboard's alone."""
    harness, _ = plans(house(Stage(tmp_path)), tasks("a")[0])
    assert not [name for name, value in harness.variables.items() if "s3cret" in value]


def test_the_harnesss_own_image_serves_tasks_that_name_none(tmp_path):
    """Nothing is mounted into it; a task's own image gets the host's programs."""
    place = replace(house(Stage(tmp_path)), programs=PROGRAMS, image="polar-mitm/agent:1.0")
    task = tasks("a")[0]
    for plan in plans(place, task):
        assert (plan.environment.image, plan.mounts) == ("polar-mitm/agent:1.0", ())
    harness, evaluation = plans(place, replace(task, environment=Environment(image="theirs")))
    assert (harness.environment.image, harness.mounts) == ("theirs", PROGRAMS.mounts)
    assert (evaluation.environment.image, evaluation.mounts) == ("theirs", ())
