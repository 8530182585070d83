"""`harness check`: one run of a harness against an engine that plays a script, and what was seen of it.

Invariant: the harness's own command runs in a real sandbox behind a real interceptor, and what is said of it is read
from what it left: the calls on record, its files, its output. It asks no provider, and judges nothing: findings.py
does.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from polar_mitm import identity
from polar_mitm.journal import read_calls
from polar_toolkit.environment import trust
from polar_toolkit.errors import Refusal
from polar_toolkit.merge import Options, account
from polar_toolkit.rollout.harnesses import images, programs
from polar_toolkit.rollout.harnesses.scripted_engine import STOP, ScriptedEngine
from polar_toolkit.rollout.interceptor import Interceptor
from polar_toolkit.rollout.recipe import Recipe, Way, command_of
from polar_toolkit.rollout.sandbox import BUNDLE, CA, HOME, Command, Ended, Network, Plan, Sandbox, sandboxes
from polar_toolkit.rollout.task import Environment

TASK = "Write a greeting into the file hello.txt."
TOKENIZER = "qwen3-tokenizer"
_SESSION = "check"
GREETING = "bonjour, café"
CLOSING = "the greeting is in hello.txt."
_TITLE = "A greeting"
_TOOLS = "# Tools\n\nYou may call one or more functions"
_ASSISTANT = "<|im_start|>assistant"
_VERSION = re.compile(r"\d+(?:\.\d+)+[\w.+-]*")
_VERSION_S = 60.0

Json = dict[str, Any]  # Any: rows and reports


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be checked, and how."""

    recipe: Recipe
    way: Way
    tokenizer: Path
    """Folder of a tokenizer of the ChatML kind, such as Qwen3's."""
    sandbox: str = "local"
    command: str = ""
    """The user's own, for harness `shell`."""
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run left behind."""

    version: str
    """As the harness says it; "" where it says none."""
    ended: Ended
    rows: tuple[Json, ...]
    """All choices of all calls that are on record."""
    edges: Mapping[str, int]
    trained: int
    """Sampled tokens that a merge trains."""
    written: str | None
    """What hello.txt holds."""
    output: str
    """Standard output and standard error."""
    refused: Mapping[str, int] | None
    """Names and destinations that were asked for in vain; None where the sandbox does not tell."""

    def completed(self) -> list[Json]:
        """The rows of the completed calls."""
        return [row for row in self.rows if row["status"] == "completed"]


@runtime_checkable
class _Telling(Protocol):
    """A sandbox that knows what was asked for in vain."""

    refused: Counter[str]


def tokenizer_folder(chosen: Path | None) -> Path:
    """The folder that is named, else the small one that the project's own examples use. Raises Refusal for neither."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polar-mitm"
    folder = chosen or Path(os.environ.get("POLAR_CACHE") or cache) / TOKENIZER
    if not (folder / "tokenizer.json").is_file():
        raise Refusal(
            f"{folder} holds no tokenizer.json: run `polar-train fetch {TOKENIZER}`, or name a folder of a model of "
            "the Qwen family with --tokenizer"
        )
    if STOP not in (folder / "tokenizer.json").read_text():
        raise Refusal(f"the tokenizer in {folder} does not know {STOP!r}: the script is written for the Qwen family's")
    return folder


def look(asked: Asked, run: Path) -> Seen:
    """Run the harness once and say what was seen; RUN is the run folder, made here.

    Raises Refusal when the run cannot be made, SandboxError when the sandbox fails.
    """
    engine = ScriptedEngine(asked.tokenizer, script(asked.recipe))
    with engine.serving():
        settings = {"polar_engine": engine.url, "polar_tokenizer": str(asked.tokenizer)}
        return asyncio.run(_look(asked, run.resolve(), settings))


def script(recipe: Recipe) -> Callable[[str], str]:
    """The replies, as a function of the prompt: a shell call that writes the file, then the closing words.

    Both are spelled oddly, so that a harness which spells them anew shows in the evidence of its next call. A prompt
    without tools is one of the small calls that some harnesses make beside their agent's.
    """
    tool, parameter = recipe.shell_tool
    write = f"printf '{GREETING}' > hello.txt; cat hello.txt"
    first = _call(tool, parameter, write.replace("é", "\\u00e9"))
    end = f"{recipe.ending}; echo {CLOSING}" if recipe.ending else ""
    last = _call(tool, parameter, end) if end else f"<think>\nIt is there.\n</think>\n\nDone:  {CLOSING}"

    def act(prompt: str) -> str:
        if _TOOLS in prompt and tool:
            return first if prompt.count(_ASSISTANT) == 1 else last
        beside = _TITLE if tool else last
        return next((reply for words, reply in recipe.replies.items() if words in prompt), beside)

    return act


def _call(tool: str, parameter: str, line: str) -> str:
    said = "<think>\nThe file has to hold a greeting.\n</think>\n\n  I will do it. \n\n"
    return f'{said}<tool_call>\n{{"name": "{tool}",  "arguments": {{"{parameter}":   "{line}" }}}}\n</tool_call>'


async def _look(asked: Asked, run: Path, settings: Mapping[str, str]) -> Seen:
    run.mkdir(parents=True, exist_ok=True)
    interceptor = Interceptor(run, settings)
    kind = sandboxes(asked.sandbox, run, f"check-{secrets.token_hex(4)}")
    try:
        await kind.check()
        await interceptor.start()
        secret = identity.register(run, _SESSION)
        proxy = interceptor.proxy
        names = (asked.way.host, *asked.recipe.names)
        network = Network((proxy.host, proxy.port), _SESSION, secret, names, interceptor.bundle, proxy.ca)
        sandbox = await kind.create(_plan(asked, run, network))
        try:
            found = await _perform(asked, run, sandbox)
        finally:
            await sandbox.close()
    finally:
        await interceptor.close()
        await kind.close()
    return _seen(run, *found)


def _plan(asked: Asked, run: Path, network: Network) -> Plan:
    """As in a rollout whose task names no image: the harness's image where it is built, else the host's programs."""
    own_image = asked.sandbox == "docker" and images.is_built(asked.recipe)
    needed = None if own_image else programs.needed(asked.recipe)
    environment = Environment(image=images.name_of(asked.recipe)) if own_image else Environment()
    path = {"PATH": needed.path} if needed else {}
    mounts = needed.mounts if needed else ()
    return Plan(_SESSION, run / "sandbox", environment, mounts, {**trust(BUNDLE, CA), **path}, network)


async def _perform(asked: Asked, run: Path, sandbox: Sandbox) -> tuple[Ended, Mapping[str, int] | None]:
    logs = run / "logs"
    logs.mkdir()
    if asked.recipe.version_command:
        await sandbox.run(Command(asked.recipe.version_command), timeout_s=_VERSION_S, log=logs / "version")
    for name, content in asked.way.files.items():
        file = run / "files" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    if asked.way.files:
        await sandbox.put(run / "files", HOME)
    command = command_of(asked.way, TASK, asked.command)
    ended = await sandbox.run(command, timeout_s=asked.timeout_s, log=logs / "harness")
    await sandbox.kill()
    await sandbox.take(Environment().workdir, run / "workspace")
    return ended, sandbox.refused if isinstance(sandbox, _Telling) else None


def _seen(run: Path, ended: Ended, refused: Mapping[str, int] | None) -> Seen:
    rows = tuple(read_calls(run).to_pylist())
    report: Json = account(run, Options(workers=1), lambda *_: None)[1] if rows else {}
    written = run / "workspace" / "hello.txt"
    return Seen(
        version=_version(_text(run / "logs" / "version.out") + _text(run / "logs" / "version.err")),
        ended=ended,
        rows=rows,
        edges=report.get("edges", {}),
        trained=report.get("tokens", {}).get("trained", 0),
        written=written.read_text(errors="replace") if written.is_file() and not written.is_symlink() else None,
        output=_text(run / "logs" / "harness.out") + _text(run / "logs" / "harness.err"),
        refused=refused,
    )


def _version(printed: str) -> str:
    found = _VERSION.search(printed)
    return found[0].rstrip(".") if found else ""


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
