"""Our own task folder: Harbor's layout and names, with a workspace in place of a Dockerfile and a [check].

    task.toml  instruction.md  workspace/ (first contents)  tests/ (the evaluator's)  solution/solve.sh  wrong/*.sh

Invariant: each field and each option of the check is known, or the task is refused. solution and wrong are never put
into a sandbox by a rollout.
"""

from __future__ import annotations

from pathlib import Path

from polar_toolkit.rollout import evaluators
from polar_toolkit.rollout.task import WORKDIR, Budget, Check, Environment, Limits, Task
from polar_toolkit.rollout.tasks.fields import Fields, plain, task_id


def task(folder: Path, instruction: str, fields: Fields) -> Task:
    """The task that a folder's fields say. Raises Refusal."""
    agent, environment, check = (fields.table(name) for name in ("agent", "environment", "check"))
    read = Task(
        task_id=task_id(fields.text("id", default=folder.name), fields),
        instruction=instruction,
        budget=_budget(agent, environment, check),
        allow_hosts=agent.words("allowed_hosts"),
        environment=_environment(folder, environment),
        check=_check(folder, check),
        metadata={"format": "folder", **plain(fields.table("metadata").rest())},
    )
    if left := fields.left():
        fields.refuse(left[0], "unknown", "there is no such field; docs/tasks.md lists them")
    return read


def _budget(agent: Fields, environment: Fields, check: Fields) -> Budget:
    default = Budget()
    return Budget(
        init_s=environment.number("build_timeout_sec", default.init_s),
        run_s=agent.number("timeout_sec", default.run_s),
        post_s=check.number("timeout_sec", default.post_s),
        turns=agent.count("max_turns", None),
        tokens=agent.count("max_tokens", None),
    )


def _environment(folder: Path, fields: Fields) -> Environment:
    uploads = tuple(_upload(folder, upload) for upload in fields.tables("uploads"))
    return Environment(
        image=fields.text("docker_image", default=""),
        dockerfile=_folder(folder / "environment"),
        workspace=_folder(folder / "workspace"),
        uploads=uploads,
        prepare=fields.words("prepare"),
        workdir=fields.text("workdir", default=WORKDIR),
        variables=fields.texts("env"),
        limits=_limits(fields),
        base_commit=fields.text("base_commit", default=""),
    )


def _limits(fields: Fields) -> Limits:
    default = Limits()
    return Limits(
        memory_mb=fields.count("memory_mb", default.memory_mb) or default.memory_mb,
        cpus=fields.number("cpus", default.cpus),
        pids=fields.count("pids", default.pids) or default.pids,
        disk_mb=fields.count("storage_mb", default.disk_mb) or default.disk_mb,
    )


def _upload(folder: Path, fields: Fields) -> tuple[Path, str]:
    source = folder / fields.text("source")
    if not source.exists():
        fields.refuse("source", str(source), "it does not exist; write a path below the task's folder")
    return source, fields.text("target")


def _check(folder: Path, fields: Fields) -> Check:
    kind = fields.text("kind")
    carry = fields.one_of("carry", ("workspace", "patch"), "workspace")
    known, options = evaluators.find(kind).options, fields.rest()
    for name, value in options.items():
        if name not in known:
            fields.refuse(name, value, f"a check of kind {kind!r} has the options {', '.join(sorted(known))}")
    place, colon, function = str(options.get("callable", "")).rpartition(":")
    if colon and place.endswith(".py"):
        options["callable"] = f"{folder / place}:{function}"
    return Check(kind, options, _folder(folder / "tests"), "patch" if carry == "patch" else "workspace")


def _folder(path: Path) -> Path | None:
    return path if path.is_dir() else None
