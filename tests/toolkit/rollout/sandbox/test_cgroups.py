"""Where control groups are made and what is written to them. That the kernel keeps them: test_local.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_toolkit.rollout.sandbox.cgroups import Cgroup, Cgroups, find
from polar_toolkit.rollout.task import Limits

LIMITS = Limits(memory_mb=100, cpus=1.5, pids=50)


def settings(folder: Path, *names: str) -> None:
    """The kernel makes a group's files; here, they stand in its place."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("")


def test_version_1_limits_are_written_to_each_controller(tmp_path: Path):
    """Memory with swap, processes with those of the sandbox itself, CPU time in a period."""
    files = {
        "memory": {"memory.limit_in_bytes": "104857600", "memory.memsw.limit_in_bytes": "104857600"},
        "pids": {"pids.max": "54"},
        "cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"},
    }
    for controller, values in files.items():
        settings(tmp_path / controller / "polar-r-one", *values)
    Cgroups(tuple(tmp_path / name for name in files), "polar-r-").make("one", LIMITS)
    written = {
        controller: {file.name: file.read_text() for file in (tmp_path / controller / "polar-r-one").iterdir()}
        for controller in files
    }
    assert written == files


def test_version_2_limits_are_written_to_one_group(tmp_path: Path):
    """Without swap."""
    values = {"memory.max": "104857600", "memory.swap.max": "0", "pids.max": "54", "cpu.max": "150000 100000"}
    settings(tmp_path / "polar-r-one", *values)
    Cgroups((tmp_path,), "polar-r-").make("one", LIMITS)
    assert {file.name: file.read_text() for file in (tmp_path / "polar-r-one").iterdir()} == values


@pytest.mark.parametrize("name", ["memory.events", "memory.oom_control"])
def test_what_the_kernel_ended_for_its_memory_is_seen(name: str, tmp_path: Path):
    """Both versions count it."""
    group = Cgroup((tmp_path,))
    assert not group.out_of_memory()
    (tmp_path / name).write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    assert not group.out_of_memory()
    (tmp_path / name).write_text("oom 3\noom_kill 1\n")
    assert group.out_of_memory()


def test_groups_that_are_left_are_found_by_the_runs_name(tmp_path: Path):
    """And removed; those of another run stay."""
    for name in ("polar-r-one", "polar-r-two", "polar-other-one"):
        (tmp_path / name).mkdir()
    for group in Cgroups((tmp_path,), "polar-r-").left():
        group.remove()
    assert [folder.name for folder in tmp_path.iterdir()] == ["polar-other-one"]


def test_groups_are_made_below_our_own(tmp_path: Path):
    """For each controller where it is mounted, whatever part of the tree the mount shows."""
    own = "4:memory:/outer/ours\n8:pids:/\n1:cpu,cpuacct:/ours\n0::/\n"
    mounts = "".join(
        f"{number} 1 0:1 {root} {tmp_path}/{name} rw - cgroup cgroup rw,{name}\n"
        for number, (name, root) in enumerate([("memory", "/outer"), ("pids", "/"), ("cpu", "/")])
    )
    folders = [tmp_path / "memory" / "ours", tmp_path / "pids", tmp_path / "cpu" / "ours"]
    for folder in folders:
        folder.mkdir(parents=True)
    found = find("r", own=own, mounts=mounts)
    assert found
    assert found.parents == tuple(folders)
    assert not [each for folder in folders for each in folder.iterdir()]  # the trial is gone


def test_a_subtree_that_was_not_delegated_is_left_alone(tmp_path: Path):
    """Version 2: a group in somebody else's group, and one that cannot be written to, are not ours to divide."""
    settings(tmp_path / "theirs", "cgroup.procs")
    settings(tmp_path / "theirs" / "ours", "cgroup.procs", "cgroup.subtree_control")
    mounts = f"1 1 0:1 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    assert find("r", own="0::/theirs/ours\n", mounts=mounts) is None
    assert find("r", own="0::/nowhere\n", mounts=mounts) is None


def test_the_root_of_a_container_is_divided(tmp_path: Path):
    """Version 2: its processes move aside into a group of their own, and the controllers are handed down."""
    settings(tmp_path / "root", "cgroup.procs", "cgroup.subtree_control")
    (tmp_path / "root" / "cgroup.procs").write_text("11\n12\n")
    found = find("r", own="0::/\n", mounts=f"1 1 0:1 / {tmp_path}/root rw - cgroup2 cgroup2 rw\n")
    assert found
    assert found.parents == (tmp_path / "root",)
    assert (tmp_path / "root" / "polar-runner" / "cgroup.procs").read_text() == "12"  # the last that was written
    assert (tmp_path / "root" / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def test_a_machine_without_groups_has_none():
    """Nothing mounted, nothing made."""
    assert find("r", own="0::/\n", mounts="1 1 0:1 / / rw - ext4 /dev/x rw\n") is None
