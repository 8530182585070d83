"""A Harbor task folder as it is: task.toml (schema 1.x), instruction.md, environment/, tests/test.sh, solution/.

Invariant: what a task asks for and a sandbox here cannot give, and without which it would be another task (steps, a
Windows machine, compose services), is refused; what is only left out is listed in the metadata under "ignored".
The network stays closed but for the hosts of an allow list. The verifier sees the files of the working directory in a
fresh sandbox, not the container in which the agent worked.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import replace
from pathlib import Path

from polar_toolkit.rollout.task import Budget, Check, Environment, Limits, Task
from polar_toolkit.rollout.tasks.fields import Fields, made_id, plain

WORKDIR = "/app"
"""Where neither task.toml nor the Dockerfile says it."""
_HOST_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG])")
_MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}


def task(folder: Path, instruction: str, fields: Fields) -> Task:
    """The task that a folder's fields say. Raises Refusal."""
    package, agent, environment, verifier = (
        fields.table(name) for name in ("task", "agent", "environment", "verifier")
    )
    _refuse_what_is_another_task(folder, fields, environment)
    default = Budget()
    variables, unresolved = _variables(environment.texts("env"), "environment.env")
    own, more = _variables(verifier.texts("env"), "verifier.env")
    name = package.text("name", default=folder.name)
    for known in ("version", "schema_version"):
        fields.take(known)
    read = Task(
        task_id=made_id(name.rpartition("/")[2]),
        instruction=instruction,
        budget=Budget(
            init_s=environment.number("build_timeout_sec", default.init_s),
            run_s=agent.number("timeout_sec", default.run_s),
            post_s=verifier.number("timeout_sec", default.post_s),
        ),
        allow_hosts=(*environment.words("allowed_hosts"), *agent.words("allowed_hosts")),
        environment=_environment(folder, environment, variables),
        check=Check("harbor", {"env": own} if own else {}, folder / "tests"),
        metadata={"format": "harbor", "name": name, **plain(fields.table("metadata").rest())},
    )
    ignored = [*fields.left(), *unresolved, *more]
    return replace(read, metadata={**read.metadata, "ignored": sorted(ignored)}) if ignored else read


def _refuse_what_is_another_task(folder: Path, fields: Fields, environment: Fields) -> None:
    if steps := fields.take("steps"):
        fields.refuse("steps", steps, "tasks of several steps are not run here; make each step a task of its own")
    if (system := environment.text("os", default="linux").lower()) != "linux":
        environment.refuse("os", system, "only linux is run here")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / "environment" / name).exists():
            fields.refuse(f"environment/{name}", "there", "services are not run here; build them into one image")
    if not (folder / "tests" / "test.sh").is_file():
        fields.refuse(
            "tests/test.sh", None, "a Harbor task has one; a task of our own has a table [check] (docs/tasks.md)"
        )


def _environment(folder: Path, fields: Fields, variables: dict[str, str]) -> Environment:
    image, dockerfile = fields.text("docker_image", default=""), folder / "environment" / "Dockerfile"
    has_dockerfile = dockerfile.is_file() and not image
    return Environment(
        image=image,
        dockerfile=dockerfile.parent if has_dockerfile else None,
        workdir=fields.text("workdir", default="") or (_workdir(dockerfile) if dockerfile.is_file() else WORKDIR),
        variables=variables,
        limits=_limits(fields),
    )


def _limits(fields: Fields) -> Limits:
    default = Limits()
    return Limits(
        memory_mb=_size(fields, "memory", default.memory_mb),
        cpus=fields.number("cpus", default.cpus),
        disk_mb=_size(fields, "storage", default.disk_mb),
    )


def _size(fields: Fields, name: str, default: int) -> int:
    """NAME_mb, or in older files NAME as '2G'."""
    old = fields.text(name, default="")
    if not old:
        return fields.count(f"{name}_mb", default) or default
    match = _SIZE.fullmatch(old.strip().upper())
    if not match:
        fields.refuse(name, old, "write it like '512M' or '2G'")
    return int(float(match[1]) * _MEGABYTES[match[2]])


def _variables(env: dict[str, str], path: str) -> tuple[dict[str, str], list[str]]:
    """Variables, and the paths of those that would take their value from the host: nothing of the host goes in."""
    known: dict[str, str] = {}
    unresolved: list[str] = []
    for name, value in env.items():
        if any(default is None for _, default in _templates(value)):
            unresolved.append(f"{path}.{name}")
        else:
            known[name] = _HOST_VARIABLE.sub(lambda found: found[2], value)
    return known, unresolved


def _templates(value: str) -> list[tuple[str, str | None]]:
    return [(found[1], found[2]) for found in _HOST_VARIABLE.finditer(value)]


def _workdir(dockerfile: Path) -> str:
    """The last WORKDIR of the last stage."""
    place = ""
    for line in dockerfile.read_text().splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "FROM":
            place = ""
        if word.upper() == "WORKDIR":
            place = posixpath.join(place or "/", rest.strip().strip("\"'"))
    return place or WORKDIR
