"""What a container of a sandbox is allowed and given: a plan, as the Docker engine wants to be told it.

Invariant: no network, no capability, no way to gain a right, nothing of the host but what the plan mounts read-only;
as the user 1000, with limits for memory, processors, processes and the size of a file. Pure; it asks no engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from docker import APIClient, types

from polar_toolkit.rollout.sandbox import HOME, USUAL_PATH, Mount, Plan, base_image
from polar_toolkit.rollout.sandbox.archives import UID
from polar_toolkit.rollout.sandbox.container_images import Image
from polar_toolkit.rollout.sandbox.docker_seccomp import profile
from polar_toolkit.rollout.task import TESTS

RUN_LABEL, NAME_LABEL, FOLDER_LABEL = "polar.run", "polar.name", "polar.folder"
USER = f"{UID}:{UID}"
_TMP = "/tmp"
_PERIOD = 100_000  # microseconds, of the kernel's share of processor time
_IDLE = "while :; do sleep 86400 & wait $!; done"
"""The first process: it outlives every command, and a shell that waits reaps whatever else has become its child."""
_COMMAND = (
    'size=$1; shift; if [ "$size" -gt 0 ]; then head -c "$size" | (exec "$@"); else (exec "$@") </dev/null; fi; '
    'status=$?; kill -9 -1 2>/dev/null; exit "$status"'
)
"""A command with its input, of which the size is told because a stream over TLS has no half end; after it everything
that it left is killed. The kernel spares only the one that kills and the first process."""


def places(plan: Plan, image: Image) -> tuple[str, ...]:
    """Folders that get a volume each because all else is read-only; none where the image itself is written to."""
    wanted = (plan.environment.workdir, HOME, _TMP, TESTS)
    uploads = [target for _, target in plan.environment.uploads]
    return wanted if image.is_base and all(any(is_below(path, place) for place in wanted) for path in uploads) else ()


def is_below(path: str, place: str) -> bool:
    """Whether a path is a folder or lies in it."""
    return PurePosixPath(os.path.normpath(path)).is_relative_to(os.path.normpath(place))


def arguments(
    api: APIClient, plan: Plan, image: Image, volumes: Mapping[str, str], files: Sequence[Mount]
) -> dict[str, Any]:  # Any: JSON
    """For `create_container`. `volumes`: folder inside -> name of its volume; `files` are mounted read-only."""
    limits = plan.environment.limits
    largest_file = (limits.disk_mb << 20) * 5 // 4  # the looks at the disk come first
    shown = [*(base_image.programs() if image.is_base else ()), *files]
    host = api.create_host_config(
        mounts=[*(types.Mount(place, name) for place, name in volumes.items()), *map(_shown, shown)],
        network_mode="none",
        read_only=bool(volumes),
        cap_drop=["ALL"],
        security_opt=["no-new-privileges", f"seccomp={profile()}"],
        mem_limit=limits.memory_mb << 20,
        memswap_limit=limits.memory_mb << 20,
        cpu_period=_PERIOD,
        cpu_quota=int(limits.cpus * _PERIOD),
        pids_limit=limits.pids,
        ulimits=[_limit("core", 0), _limit("fsize", largest_file)],
        log_config=types.LogConfig(type="none"),
    )
    return {
        "image": image.name,
        "entrypoint": ["/bin/sh", "-c", _IDLE],
        "command": [],
        "user": USER,
        "hostname": "sandbox",
        "working_dir": "/",
        "environment": variables(plan, image),
        "healthcheck": {"test": ["NONE"]},
        "stop_signal": "SIGKILL",  # of an engine that ends, too: a shell as first process would not hear of another
        "host_config": host,
        "use_config_proxy": False,
    }


def variables(plan: Plan, image: Image) -> dict[str, str]:
    """Of every command; the image's own PATH stays, and is part of the plan's where that has one."""
    own = {"HOME": HOME, "USER": "agent", "LOGNAME": "agent", "LANG": "C.UTF-8"}
    said = {**plan.environment.variables, **plan.variables}
    if image.path and "PATH" in plan.variables and "PATH" not in plan.environment.variables:
        said["PATH"] = said["PATH"].replace(USUAL_PATH, f"{image.path}:{USUAL_PATH}")
    return {**own, **said}


def wrapped(argv: tuple[str, ...], stdin: bytes) -> list[str]:
    """The words of a command, to be run by an exec."""
    return ["/bin/sh", "-c", _COMMAND, "sh", str(len(stdin)), *argv]


def _shown(mount: Mount) -> types.Mount:
    return types.Mount(mount.target, str(mount.source.resolve()), "bind", read_only=True)


def _limit(name: str, value: int) -> types.Ulimit:
    return types.Ulimit(name=name, soft=value, hard=value)
