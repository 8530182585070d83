"""A harness as data: what a folder with a harness.toml says of how it is started and what it needs.

Invariant: the harness's own command is not changed but for the places of the instruction; adding a harness is adding a
folder. It starts nothing.

Each field is checked when it is read: a name that is misspelled would otherwise be a harness that runs, and does
something else. harness_images/README.md tells the fields to people.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Never

from polar_mitm.wire import DIALECTS
from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.sandbox import Command

FILE = "harness.toml"
_HERE = Path(__file__)
_INSTALLED = _HERE.parents[1] / "harness_images"
_CHECKOUT = _HERE.parents[3] / "harness_images"
IMAGES = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
"""The harnesses that come with the project: in the wheel, or beside the packages in a checkout."""
_PLACES = re.compile(r"\{(task|command)\}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,60}")
_HOST = re.compile(r"[a-z0-9*][a-z0-9.-]*")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to start a harness: a provider, a model, a mode."""

    name: str
    host: str
    """The provider's, which it believes that it talks to."""
    dialect: str
    command: tuple[str, ...]
    """`{task}` stands for the instruction, `{command}` for the user's own command (harness `shell`)."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Here, too, `{task}` stands for the instruction."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Path in its home folder -> contents."""
    stdin: str = ""
    """What it reads from standard input; `{task}` stands for the instruction."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One harness."""

    name: str
    package: str
    version: str
    folder: Path
    """Of the harness.toml, and of its Dockerfile where it has one."""
    default: str
    """The name of the way that is taken when none is named."""
    ways: Mapping[str, Way]
    programs: tuple[str, ...] = ()
    """Programs of the host that have to be mounted into a sandbox whose image has none of them, as found on PATH."""
    names: tuple[str, ...] = ()
    """More hosts that it asks for; each of its requests to them is answered with a 404 at once."""
    shell_tool: tuple[str, str] = ("", "")
    """What it calls its tool for shell commands, and the tool's parameter: for `harness check`."""
    version_command: tuple[str, ...] = ()
    """What prints its version; empty where it has none."""
    ending: str = ""
    """The shell command with which it wants to be told that the work is done, where a plain reply does not do."""
    replies: Mapping[str, str] = field(default_factory=dict[str, str])
    """What `harness check` answers to a prompt without tools that holds the key, where a word of prose does not do."""

    def way(self, name: str = "") -> Way:
        """A way by its name, the default one for "". Raises Refusal for an unknown one."""
        found = self.ways.get(name or self.default)
        if found is None:
            raise Refusal(f"harness {self.name!r} has no way {name!r}; it has {', '.join(self.ways)}")
        return found


def find(name: str) -> Recipe:
    """The recipe of that name in harness_images, or of the folder with that path. Raises Refusal for neither."""
    own = IMAGES / name
    if _NAME.fullmatch(name) and (own / FILE).is_file():
        return load(own)
    if (Path(name) / FILE).is_file():
        return load(Path(name))
    raise Refusal(
        f"no harness is called {name!r}, and no folder of that path holds a {FILE}; there are {', '.join(names())}"
    )


def names() -> list[str]:
    """The harnesses that come with the project."""
    return sorted(path.parent.name for path in IMAGES.glob(f"*/{FILE}"))


def load(folder: Path) -> Recipe:
    """What FOLDER/harness.toml says. Raises Refusal for the first field that is missing, unknown or wrong."""
    path = folder / FILE
    try:
        fields = _Fields(path, "", tomllib.loads(path.read_text()))
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no TOML
        raise Refusal(f"{path} cannot be read ({error}): write it as harness_images/README.md says") from error
    ways = {name: _way(name, table) for name, table in fields.tables("runs").items()}
    first = next(iter(ways.values()))
    recipe = Recipe(
        name=fields.text("name", _NAME),
        package=fields.text("package", default=""),
        version=fields.text("version"),
        folder=folder,
        default=fields.text("default", default=first.name),
        ways=ways,
        programs=fields.words("programs", default=()),
        names=fields.words("names", _HOST, default=()),
        shell_tool=_shell_tool(fields),
        version_command=fields.words("version_command", default=_version_command(first)),
        ending=fields.text("ending", default=""),
        replies=fields.texts("replies"),
    )
    fields.finish()
    if recipe.default not in ways:
        fields.refuse("default", recipe.default, f"name one of the ways: {', '.join(ways)}")
    return recipe


def command_of(way: Way, instruction: str, own: str = "") -> Command:
    """What is run for an instruction. `own` is the user's command, a line for a shell: there `{task}` is quoted.

    Raises Refusal when the way wants a command and none is given, or the reverse.
    """
    wants = any("{command}" in word for word in way.command)
    if wants != bool(own):
        raise Refusal(
            "the harness `shell` needs to be told what to run: --command 'my-agent {task}'"
            if wants
            else f"--command {own!r} is for the harness `shell`; this one has a command of its own"
        )
    values = {"task": instruction, "command": own.replace("{task}", shlex.quote(instruction))}

    def put(text: str) -> str:
        return _PLACES.sub(lambda found: values[found[1]], text)  # once: an instruction may hold braces of its own

    env = {name: put(value) for name, value in way.env.items()}
    return Command(tuple(map(put, way.command)), env, stdin=put(way.stdin).encode())


class _Fields:
    """A table of the file: each field is taken once, and what nobody took is refused."""

    def __init__(self, path: Path, table: str, values: Mapping[str, Any]) -> None:  # Any: TOML
        self._path = path
        self._table = table
        self._left = dict(values)

    def text(self, name: str, form: re.Pattern[str] | None = None, *, default: str | None = None) -> str:
        """A string; it may be empty only where there is a default."""
        value = self._take(name, default)
        if not isinstance(value, str) or not (value or default is not None):
            self.refuse(name, value, "write a string" if default is not None else "write a string that is not empty")
        if form and value and not form.fullmatch(value):
            self.refuse(name, value, f"it has to look like {form.pattern}")
        return value

    def words(
        self, name: str, form: re.Pattern[str] | None = None, *, default: Sequence[str] | None = None
    ) -> tuple[str, ...]:
        """A list of strings; it may be empty only where there is a default."""
        value = self._take(name, default)
        if not isinstance(value, list | tuple) or not (value or default is not None):
            self.refuse(name, value, "write a list of strings")
        for word in value:
            if not isinstance(word, str) or (form and not form.fullmatch(word)):
                self.refuse(name, word, f"it has to look like {form.pattern}" if form else "write a list of strings")
        return tuple(value)

    def texts(self, name: str, wrong: Callable[[str], str] = lambda _: "") -> dict[str, str]:
        """A table of strings, empty by default; `wrong` says what is wrong with a key."""
        value = self._take(name, {})
        if not isinstance(value, dict):
            self.refuse(name, value, "write a table of strings")
        for key, text in value.items():
            if not isinstance(text, str):
                self.refuse(f"{name}.{key}", text, "write a string")
            if sentence := wrong(key):
                self.refuse(f"{name}.{key}", text, sentence)
        return value

    def tables(self, name: str) -> dict[str, _Fields]:
        """At least one table of a name of its own."""
        value = self._take(name, None)
        if not isinstance(value, dict) or not value or not all(isinstance(table, dict) for table in value.values()):
            self.refuse(name, value, f"write at least one table [{name}.NAME]")
        return {key: _Fields(self._path, f"{name}.{key}", table) for key, table in value.items()}

    def finish(self) -> None:
        """Refuse what was not taken."""
        for name, value in self._left.items():
            self.refuse(name, value, "there is no such field; harness_images/README.md lists them")

    def refuse(self, name: str, value: object, remedy: str) -> Never:
        """Raise the Refusal that names file, field and value."""
        where = f"{self._table}.{name}" if self._table else name
        said = "is missing" if value is None else f"is {value!r}"
        raise Refusal(f"{self._path}: {where} {said}: {remedy}")

    def _take(self, name: str, default: object) -> Any:  # Any: TOML
        return self._left.pop(name, default)


def _way(name: str, fields: _Fields) -> Way:
    way = Way(
        name=name,
        host=fields.text("host", _HOST),
        dialect=fields.text("dialect"),
        command=fields.words("command"),
        env=fields.texts("env"),
        files=fields.texts("files", _outside_home),
        stdin=fields.text("stdin", default=""),
    )
    fields.finish()
    dialects = [dialect.name for dialect in DIALECTS]
    if way.dialect not in dialects:
        fields.refuse("dialect", way.dialect, f"it is one of {', '.join(dialects)}")
    if not any("{task}" in text for text in (*way.command, *way.env.values(), way.stdin)):
        fields.refuse(
            "command", list(way.command), "put {task} where the instruction belongs, here, in env or in stdin"
        )
    return way


def _outside_home(path: str) -> str:
    parts = PurePosixPath(path)
    inside = not parts.is_absolute() and ".." not in parts.parts and parts.parts
    return "" if inside else "the key is a path in the harness's home folder, without a leading / and without .."


def _shell_tool(fields: _Fields) -> tuple[str, str]:
    found = fields.words("shell_tool", default=())
    if len(found) not in (0, 2):
        fields.refuse("shell_tool", list(found), "write the tool's name and the name of its parameter")
    return (found[0], found[1]) if found else ("", "")


def _version_command(way: Way) -> tuple[str, ...]:
    return () if any("{command}" in word for word in way.command) else (way.command[0], "--version")
