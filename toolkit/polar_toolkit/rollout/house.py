"""What all attempts of a rollout share, and how a sandbox of theirs is made and filled.

Invariant: the sandbox of an evaluation is filled exactly as the harness's was before it began, but without a network,
without the harness, and with none of its work. It starts no harness and judges nothing.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from polar_toolkit.environment import Proxy, trust
from polar_toolkit.rollout import repository
from polar_toolkit.rollout.evaluators import Evaluator
from polar_toolkit.rollout.harnesses.programs import Found
from polar_toolkit.rollout.interceptor import Figures
from polar_toolkit.rollout.options import Options
from polar_toolkit.rollout.outcome import Status
from polar_toolkit.rollout.recipe import Recipe, Way
from polar_toolkit.rollout.sandbox import (
    BUNDLE,
    CA,
    USUAL_PATH,
    Command,
    Network,
    Plan,
    Sandbox,
    SandboxError,
    Sandboxes,
)
from polar_toolkit.rollout.state import FOLDER
from polar_toolkit.rollout.task import Attempt, Task


class Counting(Protocol):
    """The interceptor, as far as attempts see it."""

    restarts: int

    @property
    def proxy(self) -> Proxy:
        """Where it listens."""
        ...

    @property
    def bundle(self) -> Path:
        """The system's certificates and its own."""
        ...

    async def figures(self, sessions: Sequence[str] = ()) -> Figures:
        """What it has counted, in all and of these sessions."""
        ...


class Failed(Exception):
    """A try that is over before it is judged, with the status of its row and a sentence."""

    def __init__(self, status: Status, note: str, *, again: bool = False) -> None:
        """`again`: the fault is not the harness's, and another try may do."""
        super().__init__(note)
        self.status = status
        self.note = note
        self.again = again


@dataclass(frozen=True, slots=True)
class House:
    """What all attempts of a rollout share."""

    options: Options
    recipe: Recipe
    way: Way
    programs: Found
    """The harness's, of the host, for sandboxes whose image has none of them."""
    image: str
    """The harness's own, for tasks that name none; "" for the sandbox's own base."""
    sandboxes: Sandboxes
    interceptor: Counting
    judge: Callable[[str], Evaluator]
    """The evaluator of a kind."""

    def folder(self, attempt: Attempt) -> Path:
        """Of the logs and artifacts of a try."""
        return self.options.run / FOLDER / "attempts" / attempt.session_id

    def network(self, attempt: Attempt, secret: str) -> Network:
        """The way out of a harness's sandbox."""
        proxy = self.interceptor.proxy
        names = dict.fromkeys((self.way.host, *self.recipe.names, *attempt.task.allow_hosts))
        address = (proxy.host, proxy.port)
        return Network(address, attempt.session_id, secret, tuple(names), self.interceptor.bundle, proxy.ca)

    async def make(self, attempt: Attempt, network: Network | None) -> Sandbox:
        """The harness's sandbox; without network, the evaluation's. Raises SandboxError."""
        name = attempt.session_id if network else f"{attempt.session_id}.eval"
        folder = self.options.run / FOLDER / "sandboxes" / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        variables = {"POLAR_SEED": str(attempt.seed), **(trust(BUNDLE, CA) if network else {})}
        plan = Plan(name, folder, attempt.task.environment, variables=variables, network=network)
        if self.image and not named_image(attempt.task):  # the harness is in it
            plan = replace(plan, environment=replace(plan.environment, image=self.image))
        elif network and self.programs.mounts:
            path = _with(self.programs.path, attempt.task.environment.variables.get("PATH", ""))
            plan = replace(plan, mounts=self.programs.mounts, variables={**variables, "PATH": path})
        return await self.sandboxes.create(plan)

    async def furnish(self, sandbox: Sandbox, task: Task, logs: Path) -> None:
        """Put in and do what the task says that a sandbox holds. Raises SandboxError."""
        environment = task.environment
        if environment.workspace:
            await sandbox.put(environment.workspace, environment.workdir)
        for source, target in environment.uploads:
            await sandbox.put(source, posixpath.join(environment.workdir, target))
        steps = [(line, f"prepare command {line!r}") for line in environment.prepare]
        if environment.base_commit:
            base = environment.base_commit
            steps.append((repository.cut_history(base), f"cutting the history after {base!r}"))
        for number, (script, what) in enumerate(steps, start=1):
            logs.mkdir(exist_ok=True)
            log = logs / str(number)
            ended = await sandbox.run(Command(("sh", "-c", script)), timeout_s=task.budget.init_s, log=log)
            if ended.status or ended.by != "itself":
                see = self.relative(log.with_name(f"{log.name}.err"))
                raise SandboxError(f"{what} ended with status {ended.status} ({ended.by}); see {see}")

    def relative(self, path: Path) -> str:
        """As it is written in a row: relative to the run folder."""
        return str(path.relative_to(self.options.run))


def _with(path: str, own: str) -> str:
    """PATH with the task's own before the usual folders: its `python` is meant, and the harness's `node`."""
    return path.replace(USUAL_PATH, f"{own}:{USUAL_PATH}") if own else path


def named_image(task: Task) -> bool:
    """Whether a task says what its sandbox is made of."""
    return bool(task.environment.image or task.environment.dockerfile)
