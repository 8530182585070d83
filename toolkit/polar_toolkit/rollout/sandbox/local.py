"""Sandboxes of the kind `local`: the machine's own programs under bubblewrap, without a container engine.

Invariant: inside is uid 1000 without any capability, in namespaces of its own; it reaches nothing but its switchboard,
reads nothing of the host but programs, and writes nowhere but in its own folders. A sandbox is these folders and, for
each command, a fresh bubblewrap: files stay from one command to the next, processes do not.

Outside of the sandbox its processes are of the user who runs us. Where that is root (with the right to make namespaces
and to become another user) they are of a user id that nobody else has: root then lends its eyes to bubblewrap, which
mounts what only root could find, and nothing of its power to what runs inside. A root that may not do so is treated as
any other user.

Memory, CPUs and processes are kept by a control group where one can be made; else memory is watched, processes are
limited by RLIMIT_NPROC, and CPUs are not limited. The disk is watched; a single file is limited by RLIMIT_FSIZE.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.sandbox import (
    BUNDLE,
    CA,
    HOME,
    USUAL_PATH,
    Command,
    Ended,
    EndedBy,
    Mount,
    Plan,
    Sandbox,
    SandboxError,
    cgroups,
    inside,
    seccomp,
)
from polar_toolkit.rollout.sandbox.bubblewrap import INSIDE, OWN_ETC, Scene, is_below, python
from polar_toolkit.rollout.sandbox.capture import CappedFile
from polar_toolkit.rollout.sandbox.folders import copy, remove
from polar_toolkit.rollout.sandbox.folders import inside as within
from polar_toolkit.rollout.sandbox.marked import VARIABLE, Marked
from polar_toolkit.rollout.sandbox.outer_user import give, new_outer_user
from polar_toolkit.rollout.sandbox.warm import Start, Warm, start
from polar_toolkit.rollout.sandbox.watch import broken_limit, disk_usage
from polar_toolkit.rollout.task import Environment

_FULL = 1 << 60
"""More bytes than any limit."""
_THE_HOSTS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/dev", "/sys")
_TMP = "/tmp"
_IMAGE = "host"


class Local:
    """The kind."""

    name = "local"

    def __init__(self, run: Path, run_id: str) -> None:
        """`run`: the run folder, where what exists is written down for `sweep`."""
        self._register = run / "rollout" / "local"
        self._marked = Marked(run_id)
        self._groups = cgroups.find(run_id)

    async def check(self) -> str:
        """Make one and run `true` in it. Raises Refusal with bubblewrap's own words and the remedy."""
        folder = self._register / f"trial-{secrets.token_hex(4)}"
        sandbox = None
        try:
            sandbox = await self.create(Plan(folder.name, folder, Environment()))
            ended = await sandbox.run(Command(("true",)), timeout_s=30, log=folder / "log")
        except SandboxError as error:
            raise Refusal(
                f"local sandboxes cannot be made here: {error}; bubblewrap and unprivileged user namespaces are needed "
                "(sysctl kernel.apparmor_restrict_unprivileged_userns, user.max_user_namespaces), or --sandbox docker"
            ) from error
        finally:
            if sandbox:
                await sandbox.close()
        if ended.status:
            raise Refusal(f"local sandboxes do not work here: `true` ended with status {ended.status}")
        who = "this user's id" if new_outer_user() is None else "a user id of its own"
        held = "memory, CPUs and processes by a control group" if self._groups else (
            "memory watched, processes by RLIMIT_NPROC, CPUs not limited (no control group can be made here)"
        )  # fmt: skip
        return f"local: bubblewrap, {who} outside, no capability, system calls filtered; {held}; disk watched"

    async def create(self, plan: Plan) -> Sandbox:
        """See Sandboxes.create. Raises Refusal on a machine whose system calls are not known."""
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxError("bwrap is not on PATH: install bubblewrap (apt-get install bubblewrap)")
        if plan.environment.image or plan.environment.dockerfile:
            wanted = plan.environment.image or plan.environment.dockerfile
            raise SandboxError(f"the task wants the image {str(wanted)!r}, which is for --sandbox docker")
        sandbox = _LocalSandbox(plan, program, self._marked, self._groups, self._register, new_outer_user())
        preparing = asyncio.create_task(asyncio.to_thread(sandbox.prepare))
        try:
            await asyncio.shield(preparing)
            await sandbox.warm_up()
        except BaseException as error:  # cancelled, too: nothing stays
            await asyncio.gather(preparing, return_exceptions=True)  # a thread cannot be cancelled
            await sandbox.close()
            if isinstance(error, OSError):
                raise SandboxError(f"sandbox {plan.name!r} cannot be made in {plan.folder}: {error}") from error
            raise
        return sandbox

    async def sweep(self) -> int:
        """See Sandboxes.sweep."""
        return await asyncio.to_thread(self._sweep)

    async def close(self) -> None:
        """Nothing is shared but the register, which goes when it is empty."""
        with suppress(OSError):  # something is in it, or it is not there
            self._register.rmdir()

    def _sweep(self) -> int:
        self._marked.end(None)
        found = list(self._register.glob("*.json"))
        for entry in found:
            with suppress(ValueError):  # cut short while it was written: nothing was made yet
                remove(Path(json.loads(entry.read_text())["folder"]))
            entry.unlink()
        for group in self._groups.left() if self._groups else []:
            group.remove()
        return len(found)


class _LocalSandbox:
    """One of them."""

    def __init__(
        self,
        plan: Plan,
        program: str,
        marked: Marked,
        groups: cgroups.Cgroups | None,
        register: Path,
        uid: int | None,
    ) -> None:
        self.image = _IMAGE
        self.refused: Counter[str] = Counter()
        """Names and destinations that its commands asked for in vain."""
        folder = plan.folder.resolve()
        self._plan = replace(plan, folder=folder)
        self._program = program
        self._mark = {VARIABLE: marked.value(plan.name)}
        self._groups = groups
        self._group: cgroups.Cgroup | None = None
        self._entry = register / f"{plan.name}.json"
        self._uid = uid
        self._places = {
            plan.environment.workdir.rstrip("/"): folder / "workspace",
            HOME: folder / "home",
            _TMP: folder / "tmp",
        }
        self._warming: asyncio.Task[Warm] | None = None
        self._running: Warm | None = None
        self._killed = False

    def prepare(self) -> None:
        """Make the folders. Raises OSError, SandboxError."""
        for mount in self._plan.mounts:
            around = next((place for place in self._places if is_below(mount.target, place)), _TMP)
            if around != _TMP:  # a checkout may well lie in /tmp
                raise SandboxError(
                    f"the program {mount.target!r} would lie within the sandbox's own folder {around!r}: "
                    "set the task's workdir to another path, or move the program"
                )
        self._entry.parent.mkdir(parents=True, exist_ok=True)
        self._entry.write_text(json.dumps({"folder": str(self._plan.folder)}))
        etc = self._plan.folder / "etc"
        etc.mkdir(parents=True)
        for name, text in OWN_ETC.items():
            (etc / name).write_text(text)
        if self._plan.network:  # copies: whoever runs inside must be able to read them
            shutil.copyfile(self._plan.network.bundle, etc / "bundle.pem")
            shutil.copyfile(self._plan.network.ca, etc / "ca.pem")
        for file in etc.iterdir():
            file.chmod(0o644)
        for place in self._places.values():
            self._make(place)
        if self._groups:
            self._group = self._groups.make(self._plan.name, self._plan.environment.limits)

    async def warm_up(self) -> None:
        """Have a bubblewrap wait for the next command. Raises SandboxError."""
        self._warm_next()
        assert self._warming
        await self._warming

    async def run(self, command: Command, *, timeout_s: float, log: Path) -> Ended:
        """See Sandbox.run."""
        if self._running:
            await self._running.kill()
        self._killed = False
        warm = self._running = await self._begun(self._words(command))
        began = asyncio.get_running_loop().time()
        try:
            with (
                CappedFile(log.with_name(f"{log.name}.out")) as out,
                CappedFile(log.with_name(f"{log.name}.err")) as err,
            ):
                performing = asyncio.create_task(warm.finish(command.stdin, out, err))
                try:
                    if self._killed:  # while it was being started
                        await warm.kill()
                    by = await self._until(performing, warm, timeout_s)
                    seconds = asyncio.get_running_loop().time() - began
                finally:
                    await warm.kill()
                    status = (await asyncio.gather(performing, return_exceptions=True))[0]
        finally:
            self._running = None
            self.refused.update(warm.refused)
        if isinstance(status, BaseException):
            raise SandboxError(f"the command was lost: {status!r}") from status
        if not self._killed:
            self._warm_next()
        return Ended(128 - status if status < 0 else status, by, seconds)

    async def put(self, source: Path, target: str) -> None:
        """See Sandbox.put. What lies in none of its folders becomes one more, which needs a new bubblewrap."""
        place = self._place(target) or await self._new_place(source, target)
        if place.is_symlink():
            raise SandboxError(f"{target!r} is a link that was made in the sandbox; nothing is written through it")
        await self._copy(source, place)
        if self._uid is not None:
            await asyncio.to_thread(give, place, self._uid)

    async def take(self, source: str, target: Path) -> None:
        """See Sandbox.take."""
        place = self._place(source)
        if place is None:
            raise SandboxError(f"{source!r} is in none of {', '.join(self._places)}: nothing else can be taken")
        await self._copy(place, target)

    async def kill(self) -> None:
        """See Sandbox.kill."""
        self._killed = True
        await self._chill()
        if self._running:
            await self._running.kill()

    async def close(self) -> None:
        """See Sandbox.close."""
        with suppress(SandboxError):  # the kernel holds a process: its folder and its entry stay for the next sweep
            await self.kill()
            with suppress(OSError):  # nothing can be done about what is left
                await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        remove(self._plan.folder)
        if self._group:
            self._group.remove()
        self._entry.unlink(missing_ok=True)

    def _warm_next(self) -> None:
        self._warming = asyncio.create_task(self._start())

    async def _start(self) -> Warm:
        warm = await start(
            Start(self._program, self._scene(), seccomp.program(), self._mark, self._uid, self._plan.network)
        )
        if self._group:
            try:
                warm.join(self._group)
            except OSError as error:
                await warm.kill()
                raise SandboxError(f"{self._plan.name!r} cannot be put into its control group: {error}") from error
        return warm

    async def _begun(self, words: Mapping[str, object]) -> Warm:
        """The one that waits, with its command; a new one when there is none, or when it died while it waited."""
        for _ in range(2):
            warming, self._warming = self._warming or asyncio.create_task(self._start()), None
            warm = await warming
            try:
                await warm.begin(words)
            except OSError:  # it is dead: the next one
                await warm.kill()
            except BaseException:  # cancelled
                await warm.kill()
                raise
            else:
                return warm
        raise SandboxError(f"bubblewrap of {self._plan.name!r} ends before it has a command")

    async def _chill(self) -> None:
        warming, self._warming = self._warming, None
        if warming:
            (warm,) = await asyncio.gather(warming, return_exceptions=True)
            if isinstance(warm, Warm):
                await warm.kill()

    async def _until(self, performing: asyncio.Task[int], warm: Warm, timeout_s: float) -> EndedBy:
        limits = self._plan.environment.limits
        folders = list(self._places.values())
        watching = asyncio.create_task(broken_limit(limits, folders, lambda: self._memory(warm)))
        try:
            await asyncio.wait({performing, watching}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._killed:
                return "killed"
            if watching.done():
                return watching.result()
            if not performing.done():
                return "deadline"
            if self._group and self._group.out_of_memory():
                return "memory"
            used = await asyncio.to_thread(disk_usage, folders)  # what was written since the last look
            return "disk" if used > limits.disk_mb << 20 else "itself"
        finally:
            watching.cancel()

    def _memory(self, warm: Warm) -> int:
        """Bytes; where the kernel keeps the limit, only whether it had to."""
        if self._group:
            return _FULL if self._group.out_of_memory() else 0
        return warm.memory()

    def _words(self, command: Command) -> dict[str, object]:
        plan = self._plan
        own = {"HOME": HOME, "USER": "agent", "LOGNAME": "agent", "LANG": "C.UTF-8", "PATH": USUAL_PATH}
        disk = plan.environment.limits.disk_mb << 20
        return {
            "argv": command.argv,
            "stdin": bool(command.stdin),
            "env": {**own, **plan.environment.variables, **plan.variables, **command.env},
            "cwd": command.cwd or plan.environment.workdir,
            "pids": plan.environment.limits.pids,
            "file_bytes": disk + disk // 4,  # a quarter more: the looks at the disk come first
        }

    def _scene(self) -> Scene:
        etc = self._plan.folder / "etc"
        certificates = Path(BUNDLE)
        files = [*self._plan.mounts, *python()[1], Mount(Path(inside.__file__), INSIDE)]
        if self._plan.network:
            files += [Mount(etc / "bundle.pem", BUNDLE), Mount(etc / "ca.pem", CA)]
        elif certificates.exists():
            files += [Mount(certificates, BUNDLE)]
        return Scene(etc, self._places, files, self._uid is not None)

    def _place(self, path: str) -> Path | None:
        """Where a path of the sandbox lies on the host."""
        path = os.path.normpath(path)
        around = max((name for name in self._places if is_below(path, name)), key=len, default=None)
        if around is None:
            return None
        place = self._places[around]
        try:
            return within(place, place / path.removeprefix(around).lstrip("/"))
        except ValueError as error:
            raise SandboxError(str(error)) from error

    async def _new_place(self, source: Path, target: str) -> Path:
        path = os.path.normpath(target)
        if any(is_below(path, name) for name in _THE_HOSTS) or path == "/":
            raise SandboxError(f"{target!r} cannot be written to: it is the host's own; --sandbox docker")
        place = self._plan.folder / f"placed-{len(self._places)}"
        if source.is_dir():
            self._make(place)
        self._places[path] = place
        await self._chill()
        return place

    def _make(self, folder: Path) -> None:
        folder.mkdir()
        folder.chmod(0o700)
        if self._uid is not None:
            os.chown(folder, self._uid, self._uid)

    async def _copy(self, source: Path, target: Path) -> None:
        try:
            await asyncio.to_thread(copy, source, target)
        except OSError as error:
            raise SandboxError(f"{source} could not be copied to {target}: {error}") from error
