"""What is to be done, as values: a task, where it is done, how it is judged, and what it may use.

Invariant: a task is complete in itself; whatever format it was read from, the same fields say the same thing. Pure:
nothing here touches the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

WORKDIR = "/workspace"
"""Where the harness works, inside a sandbox, unless the environment says otherwise."""
TESTS = "/tests"
"""Where the evaluator's own files lie, inside the sandbox of the evaluation and in no other."""
LOGS = "/logs"
"""Where a test script writes its reward, there: LOGS/verifier/reward.txt, a number, or reward.json, numbers by name."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the processes of one sandbox may use together."""

    memory_mb: int = 4096
    cpus: float = 2.0
    pids: int = 512
    disk_mb: int = 4096
    """The workspace, the home folder and the temporary files, together."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What one attempt may use. Seconds are wall time of a stage."""

    init_s: float = 600.0
    run_s: float = 1800.0
    post_s: float = 600.0
    turns: int | None = None
    """Model calls of the session, enforced by the gateway in the provider's own terms."""
    tokens: int | None = None
    """Sampled tokens of the session, likewise."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What a sandbox holds before the harness starts."""

    image: str = ""
    """Container image; "" for the sandbox's own base."""
    dockerfile: Path | None = None
    """Folder with a Dockerfile from which the image is built, where no image is named."""
    workspace: Path | None = None
    """Folder whose contents are the workspace's first contents."""
    uploads: tuple[tuple[Path, str], ...] = ()
    """More files and folders of the host, each with its place inside the sandbox."""
    prepare: tuple[str, ...] = ()
    """Shell commands run in the workspace during INIT; the same before an evaluation."""
    workdir: str = WORKDIR
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    limits: Limits = Limits()
    base_commit: str = ""
    """The workspace is a git repository, to be set back to this commit; whatever came later is removed from it."""


@dataclass(frozen=True, slots=True)
class Check:
    """How an attempt is judged: the name of an evaluator, and what it needs to know."""

    kind: str
    """command, pytest, swebench, harbor, output or callable."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Any: JSON or TOML values
    tests: Path | None = None
    """Folder of the evaluator's own files, put at TESTS for the evaluation."""
    carry: Literal["workspace", "patch"] = "workspace"
    """What of the harness's work reaches the sandbox of the evaluation: all files, or the difference to base_commit."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `samples` attempts at it make a group, whose id is the task's."""

    task_id: str
    """1 to 80 letters, digits, '.', '_' or '-'; unique in a task list."""
    instruction: str
    check: Check
    environment: Environment = Environment()
    budget: Budget = Budget()
    allow_hosts: tuple[str, ...] = ()
    """Hosts that may be reached besides the interceptor, as in the option polar_allow_hosts."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Any: JSON
    """Carried to rollouts.parquet as it is."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One sample of a task. Another try at it, after a fault that was not the harness's, is another session."""

    task: Task
    sample: int
    """From 1."""
    tried: int = 1
    """From 1."""
    seed: int = 0

    @property
    def attempt_id(self) -> str:
        """TASK.SAMPLE"""
        return f"{self.task.task_id}.{self.sample}"

    @property
    def session_id(self) -> str:
        """The session in which its calls are recorded."""
        return self.attempt_id if self.tried == 1 else f"{self.attempt_id}.try{self.tried}"

    @property
    def group_id(self) -> str:
        """The session's group."""
        return self.task.task_id
