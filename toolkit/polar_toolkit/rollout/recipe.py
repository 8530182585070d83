"""A harness as data: what a folder with a harness.toml says of how it is started and what it needs.

Invariant: the harness's own command is not changed but for the places of the instruction; adding a harness is adding a
folder. It starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


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
