"""The `polar-toolkit` command line: what people type; each command calls one function of the module that knows.

Invariant: results go to standard output, progress and refusals to standard error. Exit codes: 0 done, 1 a failed
check, 2 a refusal (nothing was overwritten), 3 done but below the threshold that was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from polar_toolkit import (
    advantages,
    batches,
    calls,
    doctor,
    environment,
    importing,
    inspection,
    merge,
    rescore,
    rewards,
    stats,
)
from polar_toolkit import export as exports
from polar_toolkit.errors import Refusal
from polar_toolkit.ledger import Report
from polar_toolkit.locations import location
from polar_toolkit.refusing import refusing
from polar_toolkit.rollout import cli as rollout_cli
from polar_toolkit.rollout.harnesses.cli import app as harness_app
from polar_toolkit.tree import TRAINED_KINDS, Policy

app = typer.Typer(no_args_is_help=True, add_completion=False, help="From recorded calls to trajectories and batches.")
app.command("rollout", help=rollout_cli.HELP)(rollout_cli.rollout_command)
app.add_typer(harness_app, name="harness")

Root = Annotated[Path, typer.Argument(help="A run folder, or a folder of run folders.")]
RootURL = Annotated[
    Path, typer.Argument(parser=location, metavar="ROOT", help="A run folder, or a folder of them; a path or a URL.")
]
Run = Annotated[Path, typer.Argument(help="A run folder.")]
Out = Annotated[
    Path | None,
    typer.Option(parser=location, metavar="PATH", help="The merged folder, or its URL; ROOT/merged unless given."),
]
Kinds = Annotated[str, typer.Option(help="Kinds of calls to train, separated by commas.")]
MinTrained = Annotated[float, typer.Option(help="Exit with 3 when a smaller share of sampled tokens is trained.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longest packed row, in tokens.")]
Weighting = Annotated[batches.Weighting, typer.Option(help="What weighs the same in the loss.")]
DeliveredOnly = Annotated[bool, typer.Option("--delivered-only", help="Train no call whose answer was cut off.")]
MaxLag = Annotated[int | None, typer.Option(min=0, help="Train no call from more weight versions ago than this.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; as many as there are CPUs unless given.")]
Advantage = Annotated[advantages.Advantage, typer.Option(help="How rewards of a group become advantages.")]
Groups = Annotated[int | None, typer.Option(min=1, help="Groups of a batch; one batch of all unless given.")]
DropFlat = Annotated[bool, typer.Option("--drop-zero-variance", help="Leave out groups of equal rewards.")]
DEFAULT_KINDS = ",".join(TRAINED_KINDS)


class Format(StrEnum):
    """How `env` prints variables."""

    shell = "shell"
    json = "json"
    docker = "docker"


@app.command("env")
@refusing
def env_command(
    run: Run,
    session: Annotated[str | None, typer.Option(help="Register a session and use it; else the default one.")] = None,
    group: Annotated[str | None, typer.Option(help="The session's group: samples of one task.")] = None,
    format: Annotated[Format, typer.Option(help="Exports for eval, JSON, or lines of an env file.")] = Format.shell,
    proxy_host: Annotated[
        str, typer.Option(help="For a container or another machine: the name by which it reaches this one.")
    ] = "",
    certificates: Annotated[
        str, typer.Option(metavar="PATH", help="Where RUN/certificates is seen there; made with the public PEM files.")
    ] = "",
) -> None:
    """Print the variables that lead a harness to the interceptor: eval "$(polar-toolkit env runs/first)"."""
    names = environment.variables(run, session, group, proxy_host=proxy_host, certificates=certificates)
    if format is Format.json:
        typer.echo(json.dumps(names, indent=2))
    else:
        typer.echo((environment.as_shell if format is Format.shell else environment.as_env_file)(names), nl=False)


@app.command("import")
@refusing
def import_command(
    files: Annotated[list[Path], typer.Argument(help="JSONL or Parquet files, one record a call.")],
    out: Annotated[Path, typer.Option(help="The run folder to write; it must not exist.")],
    max_bad: Annotated[float, typer.Option(help="Exit with 3 when a larger share of the records is bad.")] = 0.0,
    temperature: Annotated[float, typer.Option(help="Of records that name none.")] = 1.0,
) -> None:
    """Make a run folder of others' records: prompt ids, output ids, logprobs; merge then finds what continues what."""
    summary = importing.import_records(files, out, temperature=temperature)
    for line in importing.lines(summary, out):
        typer.echo(line)
    if summary.bad_share > max_bad:
        typer.echo(f"polar-toolkit: {summary.bad_share:.1%} of records are bad, above {max_bad:.1%}", err=True)
        raise typer.Exit(3)


@app.command("merge")
@refusing
def merge_command(
    root: RootURL,
    out: Out = None,
    min_trained: MinTrained = 0.0,
    kinds: Kinds = DEFAULT_KINDS,
    delivered_only: DeliveredOnly = False,
    max_lag: MaxLag = None,
    max_tokens: MaxTokens = 8192,
    weighting: Weighting = "token",
    drop_zero_variance: DropFlat = False,
    advantage: Advantage = "grpo",
    groups: Groups = None,
    workers: Workers = None,
) -> None:
    """Make trajectories of all recorded calls, and batches of those with rewards."""
    packing = batches.Options(max_tokens, weighting, drop_zero_variance, advantage, groups)
    options = merge.Options(_policy(kinds, delivered_only, max_lag), packing, workers)
    folder = out or root / "merged"
    with _progress() as progress:
        report = merge.merge(root, folder, options, progress)
    _show(report)
    _say_written(root, folder, report)
    _require(report, min_trained)


@app.command("batch")
@refusing
def batch_command(
    root: RootURL,
    out: Out = None,
    max_tokens: MaxTokens = 8192,
    weighting: Weighting = "token",
    drop_zero_variance: DropFlat = False,
    advantage: Advantage = "grpo",
    groups: Groups = None,
) -> None:
    """Make the batches again, from merged trajectories and the rewards of now."""
    folder = out or root / "merged"
    report = merge.rebatch(root, folder, batches.Options(max_tokens, weighting, drop_zero_variance, advantage, groups))
    _show(report)
    _say_written(root, folder, report)


@app.command("reward")
@refusing
def reward_command(
    run: Run,
    value: Annotated[float | None, typer.Argument(help="The session's reward.")] = None,
    session: Annotated[str | None, typer.Option(help="The session to score.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="A .jsonl or .csv file with session_id and reward.")
    ] = None,
) -> None:
    """Score sessions: --session NAME VALUE, or --from FILE. The last reward of a session wins."""
    if source is not None and session is None and value is None:
        scores = rewards.from_file(source)
    elif source is None and session is not None and value is not None:
        scores = {session: value}
    else:
        raise Refusal("give either --session NAME VALUE or --from FILE")
    calls.find_runs(run)
    rewards.append(run, scores)
    typer.echo(f"{len(scores)} reward{'s' if len(scores) != 1 else ''} added to {run / rewards.FILE}")


@app.command("stats")
@refusing
def stats_command(
    root: RootURL,
    kinds: Kinds = DEFAULT_KINDS,
    delivered_only: DeliveredOnly = False,
    max_lag: MaxLag = None,
    min_trained: MinTrained = 0.0,
    workers: Workers = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Account for every sampled token, without writing anything."""
    with _progress() as progress:
        options = merge.Options(_policy(kinds, delivered_only, max_lag), workers=workers)
        _, report = merge.account(root, options, progress)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(report)
    _require(report, min_trained)


@app.command("inspect")
@refusing
def inspect_command(
    root: Root,
    name: Annotated[str | None, typer.Argument(help="A session, or the beginning of a call id.")] = None,
) -> None:
    """List sessions, show the tree of one, or one call token by token."""
    if name is None:
        with _progress() as progress:
            ledger, _ = merge.account(root, merge.Options(), progress)
        Console().print(stats.session_table(ledger.sessions()))
        return
    found = inspection.find(calls.find_runs(root), name)
    decode = inspection.load_decoder(found.run) if found.node else None
    Console().print(inspection.call_view(found, decode))


@app.command("rescore")
@refusing
def rescore_command(
    run: Run,
    call: Annotated[str, typer.Argument(help="The beginning of a call id.")],
    engine: Annotated[str | None, typer.Option(help="Base URL; the run's engine unless given.")] = None,
    tolerance: Annotated[float, typer.Option(help="Exit with 3 when a difference is larger.")] = 1e-3,
) -> None:
    """Prefill a call through the engine and compare the log-probability of each sampled token."""
    found = inspection.find_call(run, call)
    url = engine or calls.run_info(run).get("engine")
    if not url:
        raise Refusal(f"{run}/run.json names no engine; give --engine URL")
    assert found.node is not None  # find_call finds calls only
    compared = rescore.rescore(found.node.call, inspection.prompt_of(found), url)
    Console().print(_comparison_table(compared, inspection.load_decoder(run)))
    typer.echo(f"largest difference: {compared.largest:.2e} over {len(compared.output_ids)} tokens")
    if not compared.largest <= tolerance:
        typer.echo(f"polar-toolkit: above the tolerance of {tolerance:g}", err=True)
        raise typer.Exit(3)


@app.command("export", help=f"Write what other trainers read. Formats: {exports.described()}")
@refusing
def export_command(
    root: RootURL,
    format: Annotated[str, typer.Option(help="The name of a format.")],
    out: Annotated[Path, typer.Option(parser=location, metavar="PATH", help="The folder to write, or its URL.")],
    merged: Out = None,
    min_reward: Annotated[float | None, typer.Option(help="For sft: leave out sessions of a smaller reward.")] = None,
) -> None:
    """Write what other trainers read."""
    tally = exports.export(root, format, out, merged=merged or root / "merged", min_reward=min_reward)
    typer.echo(f"{out}: {tally}")


@app.command("verify")
@refusing
def verify_command(
    model: Annotated[Path, typer.Argument(help="A model or tokenizer folder.")],
    family: Annotated[str | None, typer.Option(help="Refuse unless this typed renderer speaks the template.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Take a model's chat template through scripted conversations: where it only appends, and what the bridge adds."""
    from polar_toolkit import verify  # transformers takes a second to import: only where a template is loaded

    report = verify.verify(model, family)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        Console().print(verify.table(report))
        typer.echo(verify.summary(report))
    if not report.faithful:
        raise typer.Exit(1)


@app.command("doctor")
@refusing
def doctor_command(run: Run) -> None:
    """Check versions, the run folder, the interceptor, the engine and the journals."""
    failed = False
    for check in doctor.examine(run):
        typer.echo(f"{check.verdict:4}  {check.name}: {check.text}")
        failed = failed or check.verdict == "fail"
    if failed:
        raise typer.Exit(1)


def _policy(kinds: str, delivered_only: bool, max_lag: int | None) -> Policy:
    return Policy(tuple(kind.strip() for kind in kinds.split(",") if kind.strip()), delivered_only, max_lag)


@contextmanager
def _progress() -> Generator[merge.Progress]:
    """A bar on standard error, one line a run; nothing where nobody watches."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, int] = {}

        def progress(run: str, done: int, total: int) -> None:
            if run not in tasks:
                tasks[run] = bars.add_task(f"{run}: sessions", total=total)
            bars.update(tasks[run], completed=done)  # type: ignore[arg-type]  # TaskID is a NewType of int

        yield progress


def _show(report: Report) -> None:
    console = Console()
    for table in stats.tables(report):
        console.print(table)
    typer.echo(stats.rerender_line(report))


def _say_written(root: Path, folder: Path, report: Report) -> None:
    typer.echo(f"trajectories: {folder / 'trajectories'}")
    if report["batch"] is None:
        run = calls.find_runs(root)[0]
        typer.echo(f"no rewards yet: polar-toolkit reward {run} --session NAME VALUE, then polar-toolkit batch {root}")
    elif report["batch"]["rows"]:
        typer.echo(f"batches: {folder / 'batches'}")
    else:
        typer.echo("no batch: none of the rewarded sessions has a token to train")
    typer.echo(f"report: {folder / 'report.json'}")


def _require(report: Report, min_trained: float) -> None:
    share = report["tokens"]["share"]
    if share < min_trained:
        typer.echo(f"polar-toolkit: {share:.1%} of sampled tokens are trained, below {min_trained:.1%}", err=True)
        raise typer.Exit(3)


def _comparison_table(compared: rescore.Comparison, decode: inspection.Decode | None) -> Table:
    table = Table("", "id", "text", "recorded", "engine", "difference")
    columns = (compared.output_ids.tolist(), compared.recorded.tolist(), compared.recomputed.tolist())
    for place, (token, old, new) in enumerate(zip(*columns, strict=True)):
        text = Text(inspection.text_of(token, decode))
        table.add_row(str(place), str(token), text, f"{old:.5f}", f"{new:.5f}", f"{new - old:+.1e}")
    return table
