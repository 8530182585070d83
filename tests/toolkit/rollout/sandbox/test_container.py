"""What the engine is told about a container."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from docker import APIClient

from polar_toolkit.rollout.sandbox import USUAL_PATH, Mount, Plan
from polar_toolkit.rollout.sandbox.container import arguments, is_below, places, variables, wrapped
from polar_toolkit.rollout.sandbox.container_images import Image
from polar_toolkit.rollout.task import Environment, Limits

OF_THE_MACHINE = Image("polar-base:1", "polar-base:1@sha256:1", is_base=True)
OF_THE_TASK = Image("polar-fitted:1", "task:1@sha256:1", is_base=False)


def plan(environment: Environment = Environment(), **more) -> Plan:  # noqa: B008  # frozen
    return Plan("one", Path("folder"), environment, **more)


def told(image: Image, volumes: dict[str, str], *files: Mount) -> dict:
    limits = Limits(memory_mb=100, cpus=0.5, pids=7, disk_mb=40)
    api = APIClient(base_url="http://localhost:9", version="1.41")  # asked nothing
    try:
        return arguments(api, plan(Environment(limits=limits)), image, volumes, files)
    finally:
        api.close()


def test_it_has_no_network_no_capability_and_limits():
    """As user 1000, whatever the image says."""
    settings = told(OF_THE_TASK, {})
    host = settings["host_config"]
    assert settings["user"] == "1000:1000"
    assert (host["NetworkMode"], host["CapDrop"]) == ("none", ["ALL"])
    assert host["SecurityOpt"][0] == "no-new-privileges"
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (100 << 20, 100 << 20, 7)
    assert host["CpuQuota"] / host["CpuPeriod"] == 0.5
    assert {each["Name"]: each["Hard"] for each in host["Ulimits"]} == {"core": 0, "fsize": 50 << 20}


def test_the_machines_image_is_read_only_and_sees_its_programs():
    """Its own folders are volumes; every file of the host is mounted read-only."""
    host = told(OF_THE_MACHINE, {"/workspace": "v1"}, Mount(Path("/etc/hostname"), "/opt/x"))["host_config"]
    assert host["ReadonlyRootfs"]
    mounts = {each["Target"]: each for each in host["Mounts"]}
    assert mounts["/workspace"]["Source"] == "v1"
    assert all(mount["ReadOnly"] for mount in mounts.values() if mount["Type"] == "bind")
    assert {"/usr", "/opt/x"} <= mounts.keys()


def test_an_image_of_the_tasks_own_is_written_to():
    """And so is the machine's, when a file has to be put elsewhere."""
    elsewhere = Environment(uploads=((Path("x"), "/data/x"),))
    at_home = Environment(uploads=((Path("x"), "/home/agent/x"),))
    assert places(plan(), OF_THE_TASK) == ()
    assert places(plan(elsewhere), OF_THE_MACHINE) == ()
    assert places(plan(at_home), OF_THE_MACHINE) == ("/workspace", "/home/agent", "/tmp", "/tests")


def test_variables_of_the_plan_come_last():
    """PATH is the image's unless somebody says it."""
    environment = Environment(variables={"A": "1", "B": "1"})
    found = variables(plan(environment, variables={"B": "2"}), OF_THE_TASK)
    assert (found["A"], found["B"], found["HOME"]) == ("1", "2", "/home/agent")
    assert "PATH" not in found


def test_the_path_of_an_image_stands_before_the_usual_folders():
    """The harness's programs come first, then those that the image means, unless the task says another PATH."""
    conda = replace(OF_THE_TASK, path="/opt/conda/bin:/usr/bin")
    with_harness = {"PATH": f"/opt/harness:{USUAL_PATH}"}
    assert (
        variables(plan(variables=with_harness), conda)["PATH"] == f"/opt/harness:/opt/conda/bin:/usr/bin:{USUAL_PATH}"
    )
    own = Environment(variables={"PATH": "/task/bin"})
    assert variables(plan(own, variables=with_harness), conda)["PATH"] == f"/opt/harness:{USUAL_PATH}"


def test_the_words_of_a_command_stay_words():
    """They are arguments of the shell that guards it, never part of its script; the size of the input comes first."""
    assert wrapped(("echo", "$HOME; exit"), b"12345")[-3:] == ["5", "echo", "$HOME; exit"]


@pytest.mark.parametrize(
    ("path", "place", "is_in"),
    [("/tests", "/tests", True), ("/tests/", "/tests", True), ("/tests/a", "/tests", True),
     ("/tests-more", "/tests", False), ("/tests/../etc", "/tests", False)],
)  # fmt: skip
def test_a_path_lies_in_a_folder(path: str, place: str, is_in: bool):  # noqa: FBT001  # a case
    """Once it is tidy."""
    assert is_below(path, place) is is_in
