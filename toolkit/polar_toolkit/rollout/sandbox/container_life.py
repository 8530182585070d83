"""A container's life, told to the engine: started, killed, removed, and swept up after a runner that died.

Invariant: each of these may be done again, and after each the state is what was asked for, whatever it was before: a
container that runs is started, one that is gone is removed. Blocking; errors are the SDK's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from docker import APIClient
from docker.errors import APIError, NotFound

from polar_toolkit.rollout.sandbox import SandboxError
from polar_toolkit.rollout.sandbox.container import FOLDER_LABEL, RUN_LABEL
from polar_toolkit.rollout.sandbox.folders import remove as remove_folder

_TRIES, _PAUSE_S = 6, 0.5


def start(api: APIClient, container: str) -> int:
    """Start it; its first process."""
    api.start(container)
    state = api.inspect_container(container)["State"]
    if not state["Running"]:
        raise SandboxError(
            f"container {container[:12]} ended at once with status {state['ExitCode']}; its image needs sh and sleep"
        )
    return state["Pid"]


def kill(api: APIClient, container: str) -> None:
    """Kill all in it, and wait until they are dead."""
    try:
        api.kill(container)
        api.wait(container)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != 409:  # it does not run
            raise


def folders(api: APIClient, container: str, volumes: Mapping[str, str]) -> list[Path]:
    """Where on this machine its files grow, as far as the engine's way of storing says it."""
    if volumes:
        return [Path(api.inspect_volume(name)["Mountpoint"]) for name in volumes.values()]
    layers = api.inspect_container(container)["GraphDriver"]["Data"] or {}
    return [Path(layers["UpperDir"])] if "UpperDir" in layers else []


def sweep(api: APIClient, run: Path, run_id: str) -> int:
    """Remove what bears a run's label, and the folders of it below the run's; how many sandboxes that were."""
    chosen = {"label": f"{RUN_LABEL}={run_id}"}
    containers = api.containers(all=True, filters=chosen)
    for each in containers:
        remove(api, each["Id"], [])
        folder = Path(each["Labels"][FOLDER_LABEL])
        if folder.is_relative_to(run):
            remove_folder(folder)
    for volume in api.volumes(filters=chosen)["Volumes"] or []:
        remove(api, "", [volume["Name"]])
    for network in api.networks(filters=chosen):
        remove_network(api, network["Name"])
    return len({each["Labels"][FOLDER_LABEL] for each in containers})  # with the relay, a sandbox has two


def remove(api: APIClient, container: str, volumes: list[str]) -> None:
    """Remove a container, if it is named, and volumes; what is gone already is no error."""
    if container:
        _insist(partial(api.remove_container, container, force=True, v=True))
    for name in volumes:
        _insist(partial(api.remove_volume, name, force=True))


def remove_network(api: APIClient, name: str) -> None:
    """Remove a network that every container has left; one that is gone is no error."""
    _insist(partial(api.remove_network, name))


def _insist(removal: Callable[[], None]) -> None:
    """An engine that is at it already, or that was just started again, says no at first."""
    for left in range(_TRIES, 0, -1):
        try:
            return removal()
        except NotFound:
            return None
        except APIError:
            if left == 1:
                raise
            time.sleep(_PAUSE_S)
    return None
