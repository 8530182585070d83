"""The whole loop on one machine: a real harness, intercepted; calls, trajectories, a GRPO batch, one step, new weights.

Every step is printed as the command that a user would type. It ends with a table, and with exit code 1 when anything
that it claims was not seen: rewards that differ inside a group, a gradient, and an engine that serves the new weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from polar_toolkit.rollout import tasks
from polar_toolkit.rollout.evaluators import output

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("capital", "water")
MODEL = "smollm2-135m-instruct"
AGAIN = "Please answer the question again."
PI = "pi -p {words} --provider openai --model gpt-5.2"
SAMPLING = {"max_new_tokens": 64, "seed": 7}
LARGEST_GAP = 1e-4
console = Console(highlight=False, soft_wrap=True)


class DemoFailed(Exception):
    """Something that the demo claims was not seen."""


@dataclass(frozen=True)
class Place:
    """Where the demo works."""

    run: Path
    out: Path
    checkpoint: Path
    home: Path

    @property
    def engine(self) -> str:
        """The engine's URL, as it told us."""
        return (self.out / "engine.url").read_text()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: stopped"))  # so that the servers are ended too
    options = arguments()
    place = new_place(options.out)
    started = time.monotonic()
    try:
        with ExitStack() as servers:
            base = start_engine(servers, options, place)
            start_interceptor(servers, options, place)
            rewards = sample_groups(options, place)
            type_("polar-toolkit", "reward", place.run, "--from", place.out / "rewards.jsonl")
            type_("polar-toolkit", "merge", place.run, "--min-trained", "0.95", show=True)
            learning = ["--lr", options.lr]
            type_("polar-train", "step", place.run / "merged" / "batches", "--model", base, "--out", place.checkpoint,
                  *learning, show=True)  # fmt: skip
            type_("polar-train", "push", place.checkpoint, "--engine", place.engine, show=True)
            run_session(place, "after", "after-1", "capital")
        summary(place, rewards, time.monotonic() - started)
    except (DemoFailed, subprocess.CalledProcessError) as failure:
        sys.exit(f"demo: {failure}; the logs are in {place.out}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "demo", help="folder to make (runs/demo)")
    parser.add_argument("--samples", type=int, default=8, help="sessions of each task: the group (8)")
    parser.add_argument("--parallel", type=int, default=4, help="sessions at a time (4)")
    parser.add_argument("--engine", default="", help="use this SGLang server instead of starting the embedded engine")
    parser.add_argument(
        "--model", default=MODEL, help=f"model folder, or a name that polar-train fetch knows ({MODEL})"
    )
    parser.add_argument("--lr", default="1e-5", help="learning rate of the step (1e-5)")
    return parser.parse_args()


def new_place(out: Path) -> Place:
    """A folder that did not exist: runs/demo, or runs/demo-2, -3 ... beside it; nothing is overwritten."""
    numbered = (out if n == 1 else out.with_name(f"{out.name}-{n}") for n in range(1, 1000))
    free = next(path for path in numbered if not path.exists())
    (free / "home").mkdir(parents=True)
    return Place(free / "run", free, free / "checkpoints" / "step-1", free / "home")


# --- servers ------------------------------------------------------------------------------------------------------


def start_engine(servers: ExitStack, options: argparse.Namespace, place: Place) -> str:
    folder = type_("polar-train", "fetch", options.model).strip() if not Path(options.model).exists() else options.model
    url = options.engine
    if not url:
        log = servers.enter_context(serving(place.out / "engine.log", "polar-train", "engine", folder, "--port", "0"))
        url = next(word for word in wait_for(log, "http://") if word.startswith("http://"))
    (place.out / "engine.url").write_text(url)
    return folder


def start_interceptor(servers: ExitStack, options: argparse.Namespace, place: Place) -> None:
    settings = {
        "polar_engine": place.engine,
        "polar_run": str(place.run),
        "polar_sampling": json.dumps(SAMPLING),
        "confdir": str(place.out / "certificates"),
    }
    flags = [flag for name, value in settings.items() for flag in ("--set", f"{name}={value}")]
    command = ["mitmdump", "-s", str(ROOT / "addons" / "polar.py"), "--listen-port", "0", *flags]
    log = servers.enter_context(serving(place.out / "mitmdump.log", *command))
    wait_for(log, "in another terminal")


@contextmanager
def serving(log: Path, *command: str) -> Iterator[Path]:
    """Run a server while inside the block, its output in a log."""
    say([*command, "&"])
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},  # a log is read as it grows
        )  # fmt: skip
    try:
        yield log
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def wait_for(log: Path, text: str, seconds: float = 180) -> list[str]:
    """The words of the first line of a log that holds `text`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for line in log.read_text(errors="replace").splitlines():
            if text in line:
                return line.split()
        time.sleep(0.1)
    raise DemoFailed(f"{text!r} did not appear in {log.name} within {seconds:.0f} s")


# --- harness ------------------------------------------------------------------------------------------------------


def sample_groups(options: argparse.Namespace, place: Place) -> dict[str, list[float]]:
    """Run every session of every group, a few at a time; returns the rewards of each group."""
    todo = [(task, f"{task}-{n}") for task in TASKS for n in range(1, options.samples + 1)]
    rewards: dict[str, list[float]] = {task: [] for task in TASKS}
    with ThreadPoolExecutor(options.parallel) as pool, (place.out / "rewards.jsonl").open("w") as lines:
        runs = [pool.submit(run_session, place, task, session, task) for task, session in todo]
        for (task, session), run in zip(todo, runs, strict=True):
            reward = run.result()
            rewards[task].append(reward)
            lines.write(json.dumps({"session_id": session, "reward": reward}) + "\n")
            said = (place.out / "workspaces" / session / "answer.txt").read_text().strip().splitlines() or [""]
            console.print(f"  {session}: reward {reward:g}  [dim]{said[0][:80]!r}[/dim]", markup=True)
    if all(len(set(group)) == 1 for group in rewards.values()):
        raise DemoFailed(f"the rewards inside every group are equal, so there is nothing to learn: {rewards}")
    return rewards


def run_session(place: Place, group: str, session: str, task: str) -> float:
    """One harness run of two turns and its check: what a user types in a second terminal."""
    workspace = place.out / "workspaces" / session
    workspace.mkdir(parents=True)
    question = shlex.quote((ROOT / "examples" / "tasks" / task / "instruction.md").read_text().strip())
    script = "\n".join(
        [
            f'eval "$(polar-toolkit env {shlex.quote(str(place.run))} --session {session} --group {group})"',
            f"cd {shlex.quote(str(workspace))}",
            PI.format(words=question) + " > answer.txt",
            PI.format(words=f"--continue {shlex.quote(AGAIN)}") + " > again.txt",
        ]
    )
    say_script(script)
    environment = os.environ | {"HOME": str(place.home)}
    done = subprocess.run(
        ["bash", "-euc", script], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise DemoFailed(f"session {session} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    (read,) = tasks.read(ROOT / "examples" / "tasks" / task)
    return 1.0 if output.matches(read.check.options, (workspace / "answer.txt").read_text()) else 0.0


# --- typing -------------------------------------------------------------------------------------------------------


def type_(*command: str | Path, show: bool = False) -> str:
    """Print a command and run it; returns what it printed."""
    words = [str(word) for word in command]
    say(words)
    if show:
        subprocess.run(words, check=True)
        return ""
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def say(words: list[str]) -> None:
    console.print(
        "$ " + " ".join(word if word == "&" else shlex.quote(word) for word in words), style="bold", markup=False
    )


def say_script(script: str) -> None:
    console.print("$ " + script.replace("\n", "; "), style="dim", markup=False)


# --- what was seen ------------------------------------------------------------------------------------------------


def summary(place: Place, rewards: dict[str, list[float]], seconds: float) -> None:
    """The table at the end; raises DemoFailed when a claim does not hold."""
    report = json.loads((place.run / "merged" / "report.json").read_text())
    update = json.loads((place.checkpoint / "train.json").read_text())["updates"][-1]
    after = call_after(place)
    tokens, edges = report["tokens"], report["edges"]
    rows = {
        "calls captured": f"{report['calls']['total']} in {report['sessions']} sessions",
        "tokens sampled": f"{tokens['sampled']:,}",
        "  trained": f"{tokens['trained']:,} ({tokens['share']:.1%})",
        **{f"  not trained: {reason}": f"{count:,}" for reason, count in tokens["not_trained"].items()},
        "trajectories": str(report["trajectories"]["total"]),
        "edges": ", ".join(f"{kind} {count}" for kind, count in edges.items()),
        **{f"reward of {task}": f"{sum(r) / len(r):.2f} {[int(x) for x in r]}" for task, r in rewards.items()},
        "loss": f"{update['loss']:.3e}",
        "gradient norm": f"{update['grad_norm']:.3e}",
        "logprobs, engine and trainer": f"largest difference {update['gap_max']:.1e} over {update['tokens']:,} tokens",
        "weight version before": ", ".join(report["weight_versions"]),
        "weight version after": ", ".join(after),
        "calls": str(place.run / "calls"),
        "trajectories and batches": str(place.run / "merged"),
        "checkpoint": str(place.checkpoint),
        "took": f"{seconds:.0f} s",
    }
    table = Table("what", "seen", title="The loop, closed", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    check(update, report, after)


def call_after(place: Place) -> list[str]:
    """The weight versions that the call after the push recorded."""
    import polars as pl

    calls = pl.read_parquet(place.run / "calls" / "*.parquet", missing_columns="insert")
    spans = calls.filter(pl.col("session_id") == "after-1").get_column("versions").explode().struct.field("version")
    return sorted(set(spans.to_list()))


def check(update: dict[str, float], report: dict[str, object], after: list[str]) -> None:
    if update["grad_norm"] == 0:
        raise DemoFailed("the gradient norm is 0")
    if update["gap_max"] > LARGEST_GAP:
        raise DemoFailed(f"a recorded logprob differs from the trainer's by {update['gap_max']:.1e} > {LARGEST_GAP}")
    if after != ["step-1"]:
        raise DemoFailed(f"the call after the push was sampled by {after}, not by step-1")


if __name__ == "__main__":
    main()
