"""The command `polar-toolkit rollout`: tasks, a harness and an engine in, rows and rewards out.

Invariant: results go to standard output, the live table and refusals to standard error. Exit codes: 0 every attempt
has a row and none failed by its set-up or its evaluator, 2 a refusal, 3 some did, 130 stopped by a signal. Modules of
the extra `rollout` are imported by the command, so that the rest of the command line does without.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from polar_mitm.sampling import Sampling
from polar_toolkit.errors import Refusal
from polar_toolkit.refusing import refusing
from polar_toolkit.rollout import options as asked
from polar_toolkit.rollout import outcome, recipe, sandbox, state, summary, tasks
from polar_toolkit.rollout.board import Board
from polar_toolkit.rollout.options import Keep, Options, Overrides
from polar_toolkit.rollout.outcome import Outcome, Status
from polar_toolkit.rollout.task import Task

if TYPE_CHECKING:
    from polar_toolkit.rollout.runner import Runner

_needing_rollout = functools.partial(refusing, extra="rollout")
_BROKEN, _STOPPED = 3, 130

HELP = (
    "Run a harness on every task, in a sandbox each time, judge what it did, and record every token of it.\n\n"
    "polar-toolkit rollout examples/tasks runs/today --harness pi --samples 8 --engine http://127.0.0.1:30000\n\n"
    "Each attempt is prepared, run, and judged in a fresh sandbox; stages overlap, so that the engine has work. Every "
    "attempt ends as a row of RUN/rollouts.parquet, with a reward or with the reason why there is none. Ctrl-C stops "
    "in order; what is missing then, or after a crash, is done by --resume RUN. Afterwards: polar-toolkit merge RUN."
)
_AT, _BUDGET = "At once", "Budgets, in place of the tasks' own"

Tasks = Annotated[
    Path | None, typer.Argument(help="A task folder, a folder of them, or a .jsonl or .parquet file of rows.")
]
Run = Annotated[Path | None, typer.Argument(help="The run folder to write; it must hold no rollout.")]
Harness = Annotated[str, typer.Option(help="A name that `harness list` prints, or a folder of your own.")]
Way = Annotated[str, typer.Option(help="One of the harness's ways; its default one unless given.")]
Own = Annotated[str, typer.Option(help="For the harness `shell`: your command; {task} is the instruction.")]
Engine = Annotated[str, typer.Option(metavar="URL", help="The SGLang server that answers every model call.")]
Tokenizer = Annotated[str, typer.Option(help="Folder or name; the engine's own unless given.")]
SamplingJson = Annotated[
    str, typer.Option(metavar="JSON", help='How to sample, e.g. {"max_new_tokens": 256}; temperature 1 unless given.')
]
Samples = Annotated[int, typer.Option(min=1, help="Attempts at each task: the size of a group.")]
Kind = Annotated[str, typer.Option(help="local (bubblewrap), docker, or process, which holds nothing back.")]
Enough = Annotated[
    int | None, typer.Option(min=1, help="Cancel the rest of a group once so many of its attempts have a reward.")
]
Tries = Annotated[int, typer.Option(min=1, help="At one attempt, where the fault is not the harness's.")]
Rewarded = Annotated[
    str,
    typer.Option(
        help="Statuses whose rewards are trained, separated by commas; the others are masked. harness_error among them "
        "gives such attempts a reward of 0."
    ),
]
Seed = Annotated[int, typer.Option(help="Each attempt gets a seed made of this, in $POLAR_SEED.")]
Only = Annotated[
    list[str] | None, typer.Option(metavar="ID", help="Only this task of the list; may be given several times.")
]
Shard = Annotated[str, typer.Option(metavar="I/N", help="Only part I of N of the tasks: one of several runners.")]
KeepOf = Annotated[Keep, typer.Option(help="Whose workspaces stay in the run folder for a look.")]
PoolInit = Annotated[int | None, typer.Option(min=1, help="Attempts in preparation.", rich_help_panel=_AT)]
PoolReady = Annotated[
    int | None, typer.Option(min=1, help="In preparation, or prepared and waiting to run.", rich_help_panel=_AT)
]
PoolRun = Annotated[
    int | None, typer.Option(min=1, help="Running harnesses: what the engine can serve.", rich_help_panel=_AT)
]
PoolPost = Annotated[int | None, typer.Option(min=1, help="Attempts being judged.", rich_help_panel=_AT)]
InitSeconds = Annotated[float | None, typer.Option(min=0, help="To prepare.", rich_help_panel=_BUDGET)]
RunSeconds = Annotated[float | None, typer.Option(min=0, help="To run.", rich_help_panel=_BUDGET)]
PostSeconds = Annotated[float | None, typer.Option(min=0, help="To judge.", rich_help_panel=_BUDGET)]
Turns = Annotated[int | None, typer.Option(min=1, help="Model calls.", rich_help_panel=_BUDGET)]
Tokens = Annotated[int | None, typer.Option(min=1, help="Sampled tokens.", rich_help_panel=_BUDGET)]
ListenHost = Annotated[
    str,
    typer.Option(help="The interceptor's address; that of the engine's bridge for docker sandboxes that have a relay."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")]
Resume = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="Finish the rollout of a run folder as it was asked for; takes only --engine."),
]


@_needing_rollout
def rollout_command(
    tasks: Tasks = None,
    run: Run = None,
    harness: Harness = "",
    way: Way = "",
    command: Own = "",
    engine: Engine = "",
    tokenizer: Tokenizer = "",
    sampling: SamplingJson = "{}",
    samples: Samples = 8,
    sandbox: Kind = "local",
    enough: Enough = None,
    tries: Tries = 2,
    reward_status: Rewarded = ",".join(outcome.TRAINED),
    seed: Seed = 0,
    only: Only = None,
    shard: Shard = "1/1",
    keep: KeepOf = Keep.FAILED,
    listen_host: ListenHost = "127.0.0.1",
    pool_init: PoolInit = None,
    pool_ready: PoolReady = None,
    pool_run: PoolRun = None,
    pool_post: PoolPost = None,
    init_seconds: InitSeconds = None,
    run_seconds: RunSeconds = None,
    post_seconds: PostSeconds = None,
    turns: Turns = None,
    tokens: Tokens = None,
    dry_run: DryRun = False,
    resume: Resume = None,
) -> None:
    """Run a harness on every task and judge what it did; what is said of it to people is `HELP`."""
    if resume is not None:
        if tasks or run or harness:
            raise Refusal("--resume RUN takes everything but --engine from the run folder; leave the rest out")
        plan, listed = _resumed(resume, engine)
    else:
        options = Options(
            run=_given(run, "RUN, the run folder to write, as the second argument"),
            harness=_given(harness, "--harness NAME; polar-toolkit harness list prints the names"),
            engine=_given(engine, "--engine URL, e.g. http://127.0.0.1:30000"),
            way=way, command=command, tokenizer=tokenizer, sampling=_sampling(sampling), samples=samples,
            sandbox=sandbox,
            pools=asked.default_pools(init=pool_init, ready=pool_ready, run=pool_run, post=pool_post),
            budget=Overrides(init_seconds, run_seconds, post_seconds, turns, tokens), enough=enough, tries=tries,
            rewarded=_statuses(reward_status), seed=seed, only=tuple(only or ()),
            shard=_shard(shard), keep=keep, listen_host=listen_host,
        )  # fmt: skip
        plan, listed = _planned(_given(tasks, "TASKS, a folder or a file, as the first argument"), options)
    if dry_run:
        return _print_plan(plan, listed)
    rows, stopped = asyncio.run(_perform(plan, listed, fresh=resume is None))
    _print_result(rows, plan.options)
    if stopped:
        raise typer.Exit(_STOPPED)
    if any(row.status in summary.BROKEN for row in rows):
        raise typer.Exit(_BROKEN)


# --- what is asked for --------------------------------------------------------------------------------------------


def _planned(source: Path, options: Options) -> tuple[state.Plan, list[Task]]:
    harness = recipe.find(options.harness)
    listed = asked.shard_of(options, asked.chosen(options, tasks.read(source)))
    if not listed:
        raise Refusal(f"shard {options.shard[0]} of {options.shard[1]} of {source} holds no task; use fewer shards")
    versions = {"polar-mitm": version("polar-mitm"), "harness": f"{harness.name} {harness.version}"}
    ids = tuple(task.task_id for task in listed)
    run_id = secrets.token_hex(6)
    return state.Plan(run_id, source.resolve(), ids, state.digest_of(listed), options, versions), listed


def _resumed(run: Path, engine: str) -> tuple[state.Plan, list[Task]]:
    plan = state.read_plan(run)
    now, listed = _planned(plan.source, plan.options)
    if now.digest != plan.digest:
        raise Refusal(f"the tasks in {plan.source} are not those that {run} was begun with; put them back as they were")
    if now.versions["harness"] != plan.versions["harness"]:
        was, is_now = plan.versions["harness"], now.versions["harness"]
        raise Refusal(f"{run} was begun with {was}, and here is {is_now}: install {was}, or begin another rollout")
    options = replace(plan.options, engine=engine or plan.options.engine)
    return replace(plan, options=options), listed


def _given[T](value: T | None, what: str) -> T:
    if not value:
        raise Refusal(f"give {what}")
    return value


def _sampling(text: str) -> str:
    try:
        Sampling.parse(text)
    except ValueError as error:
        raise Refusal(f"--sampling: {error}") from error
    return text


def _statuses(text: str) -> tuple[Status, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in set(Status)]
    if unknown:
        raise Refusal(f"--reward-status names {unknown[0]!r}; there are {', '.join(Status)}")
    return tuple(map(Status, names))


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise Refusal(f"--shard is {text!r}; give I/N with I from 1 to N, such as 2/4")
    return int(part), int(parts)


# --- doing it -----------------------------------------------------------------------------------------------------


async def _perform(plan: state.Plan, listed: Sequence[Task], *, fresh: bool) -> tuple[list[Outcome], bool]:
    """The rows, and whether a signal stopped it. A fresh rollout is written down once all of it can be started."""
    from polar_toolkit.rollout.interceptor import Interceptor
    from polar_toolkit.rollout.runner import Runner
    from polar_toolkit.rollout.screen import shown

    options = plan.options
    kind = sandbox.sandboxes(options.sandbox, options.run, plan.run_id)
    interceptor = Interceptor(options.run, options.settings(), listen_host=options.listen_host)
    board = Board(asked.attempts(options, listed))
    console = Console(stderr=True)
    runner = Runner(
        options, listed, recipe=recipe.find(options.harness), sandboxes=kind, interceptor=interceptor, board=board
    )
    _heed_signals(runner)
    console.print(await kind.check(), highlight=False, soft_wrap=True)
    if fresh:
        state.write_plan(plan)
    rows = await runner.run(shown(board, interceptor, console))
    return rows, runner.stopped


def _heed_signals(runner: Runner) -> None:
    """The first one stops in order; the second one at once, and what is left then is swept by --resume."""
    loop = asyncio.get_running_loop()

    def heed() -> None:
        if runner.stopped:
            os._exit(_STOPPED)
        typer.echo("polar-toolkit: stopping in order; once more to stop at once", err=True)
        runner.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, heed)


def _print_plan(plan: state.Plan, listed: Sequence[Task]) -> None:
    options, console = plan.options, Console()
    with tempfile.TemporaryDirectory() as scratch:  # the run folder is not made
        held = asyncio.run(sandbox.sandboxes(options.sandbox, Path(scratch), plan.run_id).check())
    console.print(summary.task_table(listed, options))
    for line in summary.plan_lines(listed, options, recipe.find(options.harness), held):
        console.print(line, highlight=False, soft_wrap=True)


def _print_result(rows: Sequence[Outcome], options: Options) -> None:
    console = Console()
    console.print(summary.status_table(rows))
    console.print(summary.group_table(rows))
    for line in summary.last_lines(rows, options):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
