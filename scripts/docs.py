"""Writes the pages that are generated from the code: docs/dataset.md, cli.md, options.md and protocols.md.

Invariant: a page is a pure function of the code, so `--check` can tell a stale one by comparing bytes. It writes
nothing else; all other pages are written by hand.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import typer
from typer.cli import get_docs_for_click

from polar_mitm.compression import ENCODINGS, LARGEST_BODY
from polar_mitm.options import OPTIONS
from polar_mitm.routes import ROUTES, Route
from polar_mitm.rows import COLUMNS, SCHEMA_VERSION
from polar_mitm.wire import DIALECTS, Dialect

DOCS = Path(__file__).parent.parent / "docs"
NOTICE = "<!-- Made by `make docs` from {source}: change that, not this page. -->\n"
COMMANDS = {"polar-toolkit": "polar_toolkit.cli", "polar-train": "polar_train.cli"}


def main(arguments: list[str]) -> int:
    """Writes the pages, or with `--check` compares them; 1 when one is stale."""
    stale: list[str] = []
    for name, render in PAGES.items():
        page, text = DOCS / name, render()
        if page.exists() and page.read_text() == text:
            continue
        stale.append(f"docs/{name}")
        if "--check" not in arguments:
            page.write_text(text)
    if stale:
        print(("stale, run `make docs`: " if "--check" in arguments else "written: ") + ", ".join(stale))
    return int(bool(stale) and "--check" in arguments)


def dataset() -> str:
    """The columns of the calls table."""
    rows = "\n".join(f"| `{name}` | `{_type(kind)}` | {_cell(meaning)} |" for name, kind, meaning in COLUMNS)
    return f"""{NOTICE.format(source="polar_mitm/rows.py")}
# The calls table

One row per (call, choice), in `calls/*.parquet` of a run folder, `schema_version` {SCHEMA_VERSION}. A session's order
is (`writer`, `sequence`); a writer is named by its start.
`polar_mitm.journal.read_calls(run)` reads sealed and live rows as one table.

A run folder holds whatever the harness put into its prompts. Credentials of headers, cookies, URLs and proxies are
never written, but a secret inside a prompt is data and stays: the folder is 0700, look before you share it.

| column | type | meaning |
| --- | --- | --- |
{rows}
"""


def cli() -> str:
    """The help of every command."""
    return NOTICE.format(source="the commands' own help") + "\n# Command line\n\n" + "\n".join(_commands())


def options() -> str:
    """The options of interception."""
    rows = "\n".join(f"| `{name}` | {_default(default)} | {_cell(text)} |" for name, _, default, text in OPTIONS)
    return f"""{NOTICE.format(source="polar_mitm/options.py")}
# Options of interception

Given as `mitmdump -s addons/polar.py --set NAME=VALUE`, or without TLS as `python -m polar_mitm.gateway`, whose flags
leave out `polar_`.

| option | default | meaning |
| --- | --- | --- |
{rows}
"""


def protocols() -> str:
    """The table of routes, and what becomes of the fields of each protocol."""
    routes = "\n".join(map(_route, ROUTES))
    return f"""{NOTICE.format(source="polar_mitm/routes.py and the dialects of polar_mitm/wire")}
# Protocols

## Routes

The first row that fits a request decides. `*` stands for anything, `{{name}}` for a segment that joins the fields of
the request, as do the parameters named behind `?`. A host that `polar_allow_hosts` names is passed through before this
table is looked at. Nothing else leaves.

| method | path | only for | protocol | treatment |
| --- | --- | --- | --- | --- |
{routes}

Request bodies may come in {", ".join(ENCODINGS)}, up to {LARGEST_BODY >> 20} MB when they are decompressed.

## Fields

*Supported* fields are honoured. *Ignored* ones are harmless, and are named in the call's `fidelity` column, as is every
field that stands in no list. *Refused* ones would change the meaning of the request: they are answered with the
provider's own 400. Sampling fields are recorded; what is applied is the run's (`polar_sampling`).

{"".join(map(_fields, DIALECTS))}"""


PAGES: dict[str, Callable[[], str]] = {
    "dataset.md": dataset,
    "cli.md": cli,
    "options.md": options,
    "protocols.md": protocols,
}


def _route(route: Route) -> str:
    only = [*route.hosts, *([f"header `{route.header}`"] if route.header else [])]
    path = route.path + ("?" + "&".join(route.query) if route.query else "")
    said = f"{route.treatment.value}{f' ({route.why})' if route.why else ''}"
    cells = [f"`{route.methods}`", f"`{path}`", ", ".join(only), route.dialect, said]
    return f"| {' | '.join(map(_cell, cells))} |"


def _fields(dialect: Dialect) -> str:
    """One dialect's three lists."""
    support = dialect.support
    lines = [f"### {dialect.name}", "", "Supported: " + ", ".join(f"`{name}`" for name in support.supported) + ".", ""]
    for head, listed in (("ignored | why", support.ignored), ("refused | instead", support.refused)):
        lines += [f"| {head} |", "| --- | --- |"]
        lines += [f"| `{name}` | {_cell(why)} |" for name, why in listed.items()]
        lines.append("")
    return "\n".join(lines) + "\n"


def _commands() -> Iterator[str]:
    for name, module in COMMANDS.items():
        command = typer.main.get_command(importlib.import_module(module).app)
        context = typer.Context(command, info_name=name)
        page = get_docs_for_click(obj=command, ctx=context, name=name).strip()
        yield re.sub(r"^#", "##", page, flags=re.MULTILINE)


def _type(kind: pa.DataType) -> str:
    return str(kind).replace("item: ", "").replace("element: ", "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(value: object) -> str:
    return f"`{value}`" if value != "" else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
