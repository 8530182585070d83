"""The `polar-train` command: one GRPO step, a push to an engine, the engine itself, and its models.

Invariant: a command prints figures on success and one sentence on failure, with the exit code of `errors`. Torch is
imported by the commands that need it, so that help is instant. The work is in the other modules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from polar_train.errors import BadInput, TrainError
from polar_train.forest import Layout

if TYPE_CHECKING:
    from polar_train.grpo import Report

app = typer.Typer(
    help="Learn from batches, and serve the result.", no_args_is_help=True, pretty_exceptions_enable=False
)
console = Console(highlight=False, soft_wrap=True)
errors = Console(highlight=False, soft_wrap=True, stderr=True)

Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores if not given.")]


@app.command()
def step(
    batches: Annotated[
        Path, typer.Argument(help="Batch Parquet: a file, or the folder that `polar-toolkit merge` wrote.")
    ],
    model: Annotated[Path, typer.Option(help="Folder of the model that sampled the batch.")],
    out: Annotated[Path, typer.Option(help="Folder of the new checkpoint; must not exist.")],
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of AdamW.")] = 1e-6,
    clip_low: Annotated[float, typer.Option(min=0, help="The ratio is clipped below at 1 - this.")] = 0.2,
    clip_high: Annotated[float, typer.Option(min=0, help="The ratio is clipped above at 1 + this.")] = 0.28,
    max_grad_norm: Annotated[float, typer.Option(min=0, help="The gradient is scaled down to this norm.")] = 1.0,
    steps: Annotated[int, typer.Option(min=1, help="Updates from this batch, each over the whole of it.")] = 1,
    importance_cap: Annotated[
        float | None,
        typer.Option(min=0, help="Truncated importance sampling: a token weighs min(trainer / engine, this)."),
    ] = None,
    kl: Annotated[float, typer.Option(min=0, help="Weight of the KL to --reference (k3 estimate).")] = 0.0,
    reference: Annotated[Path | None, typer.Option(help="Folder of the model that --kl keeps near.")] = None,
    layout: Annotated[Layout, typer.Option(help="What is computed once: the gradient is the same.")] = Layout.TREE,
    threads: Threads = None,
) -> None:
    """Make a GRPO update from batch Parquet and write the new model in Hugging Face format."""
    with _sentences():
        from polar_train.grpo import Settings, train
        from polar_train.objective import Objective

        _one_bar_only()
        _use_threads(threads)
        objective = Objective(clip_low, clip_high, importance_cap, kl)
        settings = Settings(lr, objective, max_grad_norm, steps, layout)
        with _progress() as progress:
            task = progress.add_task("training", total=None)
            report = train(
                batches, model, out, settings,
                advance=lambda done, planned: progress.update(task, completed=done, total=planned),
                reference=reference,
            )  # fmt: skip
        console.print(_updates(report))
        console.print(f"checkpoint: {escape(str(out))}")


@app.command()
def push(
    checkpoint: Annotated[Path, typer.Argument(help="Folder that `polar-train step` or `polar-train run` wrote.")],
    engine: Annotated[list[str], typer.Option(help="URL of an engine; give each one: all take the weights or none.")],
    version: Annotated[str, typer.Option(help="Weight version; the folder's name if not given.")] = "",
    previous: Annotated[
        Path | None,
        typer.Option(help="Weights that come back on a failure; those that each engine names if not given."),
    ] = None,
) -> None:
    """Load a checkpoint into running engines and prove by a probe that it is what each of them serves."""
    with _sentences():
        from polar_train.engines import push as push_weights

        _one_bar_only()
        pushed = push_weights(checkpoint, engine, version or checkpoint.resolve().name, previous=previous)
        table = _table("engine", "before", "after", "changed", "probe", "difference")
        for one in pushed.each:
            table.add_row(
                escape(one.url), escape(one.version_before), escape(one.version_after),
                f"{one.changed} of {one.tensors}", str(one.tokens), f"{one.disagreement:.2e}",
            )  # fmt: skip
        table.caption = "changed: tensors; probe: tokens; difference: |logprob(engine) - logprob(checkpoint)|, at most"
        console.print(table)
        console.print(f"idle: {pushed.idle_s:.2f} s, from the first pause to the last continue")


@app.command()
def gap(
    batches: Annotated[Path, typer.Argument(help="Batch Parquet, or a merged folder: all its trajectories.")],
    model: Annotated[Path, typer.Option(help="Folder of the model that sampled them.")],
    merged: Annotated[
        Path | None, typer.Option(help="Merged folder of the batch, to tell edges; the one it lies in if not given.")
    ] = None,
    version: Annotated[str | None, typer.Option(help="Weight version that --model is, where several sampled.")] = None,
    limit: Annotated[float, typer.Option(min=0, help="Largest gap of a token, in nats, that is not a failure.")] = 1e-4,
    threads: Threads = None,
) -> None:
    """Compare the engine's logprobs with the trainer's, by how calls continue each other. Exit code 3 above --limit."""
    with _sentences():
        from polar_train.gap import check, measure

        _one_bar_only()
        _use_threads(threads)
        with _progress() as progress:
            task = progress.add_task("comparing", total=None)
            gaps = measure(
                batches, model, merged=merged, version=version,
                advance=lambda done, planned: progress.update(task, completed=done, total=planned),
            )  # fmt: skip
        table = _table("edge", "tokens", "mean", "p99", "max")
        for one in gaps:
            table.add_row(escape(one.edge), f"{one.tokens:,}", f"{one.mean:.1e}", f"{one.p99:.1e}", f"{one.max:.1e}")
        table.caption = "|logprob(train) - logprob(engine)| of the trained tokens, in nats"
        console.print(table)
        check(gaps, limit)


@app.command()
def run(config: Annotated[Path, typer.Argument(help="The run as a TOML file: see docs/training.md.")]) -> None:
    """Learn from batch after batch. Stopped or killed, the same command goes on behind the newest checkpoint."""
    with _sentences():
        from polar_train import training

        _go_on("run", config, training.run)


@app.command()
def loop(
    config: Annotated[Path, typer.Argument(help="The loop as a TOML file, with [engines] and [rollout].")],
) -> None:
    """Roll out and learn side by side; the engines get each step's weights. Stopped or killed, it goes on."""
    with _sentences():
        from polar_train import loop

        _go_on("loop", config, loop.run)


@app.command()
def plot(
    outs: Annotated[
        list[Path], typer.Argument(metavar="OUT...", help="Folders of runs; several are laid over each other.")
    ],
    to: Annotated[
        Path | None,
        typer.Option(help="The picture, .png, .svg or .pdf; curves.png in the first folder if not given."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the picture.")] = False,
) -> None:
    """Draw the metrics of runs as one picture: reward, loss, ratio, clip share, KL, entropy, gap, lag and speed."""
    with _sentences():
        from polar_train.plot import draw

        console.print(str(draw(outs, to, force=force)), markup=False)


@app.command()
def engine(
    model: Annotated[str, typer.Argument(help="Model folder, or a name known to `polar-train fetch`.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 30000,
    threads: Threads = None,
    sglang: Annotated[
        bool | None,
        typer.Option(
            "--sglang/--embedded", help="Which engine; SGLang if it is installed, unless said.", show_default=False
        ),
    ] = None,
) -> None:
    """Serve a model by SGLang's `/generate`: a real SGLang where one is installed, else the embedded engine."""
    with _sentences():
        from polar_train import launch

        if sglang is None:
            sglang = launch.has_sglang()
        if sglang and not launch.has_sglang():
            raise typer.BadParameter(
                "SGLang is not installed here: pip install 'polar-mitm[sglang]', or leave --sglang out"
            )
        folder = _folder(model)
        if sglang:
            import torch

            cuda = torch.cuda.is_available()
            command = launch.sglang_command(str(folder), host, port, cuda=cuda)
            os.execvpe(command[0], command, launch.sglang_environment(os.environ, threads=threads, cuda=cuda))
        _serve(str(folder), host, port, threads=threads)


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="Name of a small model or tokenizer.")]) -> None:
    """Fetch and convert a small model once into the cache, and print its folder."""
    with _sentences():
        console.print(str(_folder(name)), markup=False)


def _serve(model: str, host: str, port: int, *, threads: int | None) -> None:
    from polar_train import serve

    try:
        serve.run(model, host, port, threads=threads, incremental=True)
    except (OSError, ValueError) as error:  # a folder it cannot serve, or a port that is taken: said as one sentence
        raise BadInput(f"the embedded engine cannot serve {model!r} at {host}:{port}: {error}") from error


def _go_on(name: str, config: Path, work: Callable[..., int]) -> None:
    """Do the work of a configuration, shown to people, until it is done or a signal stops it."""
    from polar_train import config as configured
    from polar_train import lifetime
    from polar_train.screen import shown

    _one_bar_only()
    asked = configured.read(config)
    with shown(errors, asked.updates) as screen, lifetime.interrupts() as stop:
        steps = work(asked, seen=screen.seen, advance=screen.advance, say=screen.say, stop=stop)
    console.print(f"steps: {steps}; checkpoints: {escape(str(asked.out / 'checkpoints'))}")
    if stop.is_set():
        console.print(f"stopped: polar-train {name} {escape(str(config))} goes on from here")
        raise typer.Exit(130)


@contextmanager
def _sentences() -> Generator[None]:
    try:
        yield
    except TrainError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(error.exit_code) from error


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=errors,
    )  # fmt: skip


def _table(*names: str) -> Table:
    """Narrow: 80 columns hold every digit. Where they do not, the first column is folded."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True, caption_justify="left")
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name != names[0])
    return table


def _updates(report: Report) -> Table:
    table = _table("", "loss", "gradient", "mean gap", "max gap", "clip", "ratio", "KL", "entropy", "tokens")
    for number, update in enumerate(report.updates, start=1):
        table.add_row(
            str(number), f"{update.loss:.4g}", f"{update.grad_norm:.4g}",
            f"{update.gap_mean:.2e}", f"{update.gap_max:.2e}", f"{update.clip_share:.4f}",
            f"{update.ratio_mean:.4f}", f"{update.kl_mean:.2e}", f"{update.entropy_mean:.3f}", str(update.tokens),
        )  # fmt: skip
    table.caption = "gap: |logprob(train) - logprob(engine)| of the trained tokens, before the update"
    return table


def _one_bar_only() -> None:
    """Silences the bars that transformers draws for every load and save."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _use_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def _folder(model: str) -> Path:
    from polar_train import small_models

    try:
        return small_models.fetch(model)
    except small_models.FetchError as error:  # unknown name or no network: said as one sentence
        raise BadInput(str(error)) from error
