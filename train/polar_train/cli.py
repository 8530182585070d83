"""The `polar-train` command: one GRPO step, a push to an engine, the engine itself, and its models.

Invariant: a command prints figures on success and one sentence on failure, with the exit code of `errors`. Torch is
imported by the commands that need it, so that help is instant. The work is in the other modules.
"""

from __future__ import annotations

import os
from collections.abc import Generator
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
    checkpoint: Annotated[Path, typer.Argument(help="Folder that `polar-train step` wrote.")],
    engine: Annotated[str, typer.Option(help="URL of the engine.")],
    version: Annotated[str, typer.Option(help="Weight version; the folder's name if not given.")] = "",
) -> None:
    """Load a checkpoint into a running engine and prove by a probe that it is what the engine serves."""
    with _sentences():
        from polar_train.weights import push as push_weights

        _one_bar_only()
        seen = push_weights(checkpoint, engine, version or checkpoint.resolve().name)
        table = Table("figure", "value", show_header=False)
        table.add_row("weight version before", escape(seen.version_before))
        table.add_row("weight version after", escape(seen.version_after))
        table.add_row("probe tokens", str(seen.tokens))
        table.add_row("max |logprob(engine) - logprob(checkpoint)|", f"{seen.disagreement:.2e}")
        table.add_row("max |logprob(after) - logprob(before)|", f"{seen.change:.2e}")
        console.print(table)


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


def _updates(report: Report) -> Table:
    table = Table(
        "update",
        "loss",
        "gradient norm",
        "mean gap",
        "max gap",
        "clip share",
        "ratio",
        "KL",
        "entropy",
        "tokens trained",
    )
    for number, update in enumerate(report.updates, start=1):
        table.add_row(
            str(number), f"{update.loss:.6g}", f"{update.grad_norm:.6g}",
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
