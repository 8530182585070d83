"""The commands `polar-toolkit harness ...`: what there is, whether it works, and its container image.

Invariant: results go to standard output, what a builder says to standard error. Exit codes: 0 all is well, 1 something
essential is missing, 2 a refusal. Modules of the extra `rollout` are imported by the commands that need them, so that
the rest of the command line does without.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from polar_toolkit.refusing import refusing
from polar_toolkit.rollout import recipe

app = typer.Typer(no_args_is_help=True, help="Harnesses: what there is, whether it works here, its container image.")

Name = Annotated[str, typer.Argument(help="A harness of the project, or the path of a folder with a harness.toml.")]
_needing_rollout = functools.partial(refusing, extra="rollout")


@app.command("list")
@refusing
def list_command() -> None:
    """Print the harnesses that come with the project, their versions and the ways to run them."""
    table = Table("harness", "version", "ways", "dialect", "host")
    for name in recipe.names():
        found = recipe.find(name)
        ways = [f"{way} (default)" if way == found.default else way for way in found.ways]
        default = found.way()
        table.add_row(name, found.version, "\n".join(ways), default.dialect, default.host)
    Console().print(table)


@app.command("check")
@_needing_rollout
def check_command(
    name: Name,
    way: Annotated[str, typer.Option(help="One of its ways; the default one unless given.")] = "",
    sandbox: Annotated[str, typer.Option(help="local, docker (in the image that `build` makes) or process.")] = "local",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of a tokenizer of the Qwen family; qwen3-tokenizer of the cache if none."),
    ] = None,
    command: Annotated[
        str, typer.Option(help="For the harness `shell`: your command; {task} is the instruction.")
    ] = "",
    run: Annotated[Path | None, typer.Option(help="Keep the run folder here; it must not exist.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the harness has.")] = 120.0,
) -> None:
    """Run a harness once against a model that plays a script, and say what was seen: polar-toolkit harness check pi."""
    from polar_toolkit.errors import Refusal
    from polar_toolkit.rollout.harnesses import check, findings
    from polar_toolkit.rollout.sandbox import SandboxError

    found = recipe.find(name)
    asked = check.Asked(found, found.way(way), check.tokenizer_folder(tokenizer), sandbox, command, timeout)
    recipe.command_of(asked.way, check.TASK, command)  # refused before anything is started
    if run and run.exists():
        raise Refusal(f"{run} exists: name a folder that does not, nothing is overwritten")
    folder = run or Path(tempfile.mkdtemp(prefix="polar-check-"))
    keep = run is not None
    try:
        lines = findings.findings(asked, check.look(asked, folder))
        missing = any(line.mark == "missing" for line in lines)
        keep = keep or missing
    except SandboxError as error:
        raise Refusal(f"the sandbox failed: {error}") from error
    finally:
        if not keep:
            shutil.rmtree(folder)
    Console().print(findings.table(f"{found.name} {found.version}, {asked.way.name}", lines))
    if missing:
        typer.echo(f"polar-toolkit: {name} cannot be used like this; logs and calls are in {folder}", err=True)
        raise typer.Exit(1)


@app.command("build")
@_needing_rollout
def build_command(
    name: Name,
    base: Annotated[
        str, typer.Option(help="Image to start from; the one that its Dockerfile names unless given.")
    ] = "",
    extra_ca: Annotated[
        list[Path] | None, typer.Option(help="PEM file with certificates to trust, as behind a company's proxy.")
    ] = None,
    network: Annotated[str, typer.Option(help="Network of the build's steps, such as host.")] = "",
) -> None:
    """Build a harness's container image with the engine that DOCKER_HOST names, and print its tag."""
    from polar_toolkit.rollout.harnesses import images

    def say(line: str) -> None:
        typer.echo(line, err=True)

    typer.echo(images.build(recipe.find(name), base=base, extra_ca=extra_ca or [], network=network, say=say))
