"""The whole example: prepare, imitate a little, learn from rewards, and measure on questions never seen.

    python examples/learn/learn.py runs/learn-1 --seed 1
    python examples/learn/learn.py runs/learn-1-shuffled --seed 1 --shuffled --start runs/learn-1/start

Every stage is skipped when its result is there, so the same words go on with what was interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tasks import Question, questions, row

HERE = Path(__file__).resolve().parent
HARNESS = HERE / "pi"
DEMOS, TRAIN, HELD = 84, 600, 120
SAMPLING = {"max_new_tokens": 64, "temperature": 1.0}
GREEDY = {"max_new_tokens": 64, "temperature": 0.0}
LOOP = """\
# Written by learn.py: what `polar-train loop` is told.
model = "{start}"
out = "loop"
updates = {updates}
seed = {seed}

[update]
lr = {lr}
beta1 = {beta1}

[lag]
max = 0

[engines]
urls = ["{url}"]

[rollout]
tasks = "train.jsonl"
harness = "{harness}"
samples = {samples}
groups = {groups}
seed = {seed}
sampling = {{ max_new_tokens = 64, temperature = 1.0 }}
pools = {{ init = 4, ready = 8, run = 8, post = 4 }}
shuffle_rewards = {shuffled}
"""


def main() -> None:
    """Run the stages, one after the other."""
    a = _arguments()
    out: Path = a.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(
        json.dumps({"seed": a.seed, "shuffled": a.shuffled, "updates": a.updates, "lr": a.lr, "beta1": a.beta1})
    )
    write_tasks(out, a.seed)
    start = a.start.resolve() if a.start else imitate(out, a)
    with engine(start, out / "engine.log") as url:
        held_out(out, "before", url, SAMPLING)
        held_out(out, "before-greedy", url, GREEDY)
        asked = {name: getattr(a, name) for name in ("updates", "seed", "lr", "beta1", "samples", "groups")}
        shuffled = str(a.shuffled).lower()
        (out / "loop.toml").write_text(LOOP.format(start=start, url=url, harness=HARNESS, shuffled=shuffled, **asked))
        run("polar-train", "loop", str(out / "loop.toml"))
        held_out(out, "after", url, SAMPLING)
        held_out(out, "after-greedy", url, GREEDY)


def imitate(out: Path, a: argparse.Namespace) -> Path:
    """The model that GRPO starts from: the base model after a look at a few conversations of the teacher."""
    start = out / "start"
    if start.is_dir():
        return start
    from model import with_tools

    if not (out / "base").is_dir():
        with_tools(Path(said("polar-train", "fetch", "smollm2-135m-instruct")), out / "base.part")
        (out / "base.part").rename(out / "base")
    if not (out / "sft").is_dir():
        with server([sys.executable, str(HERE / "teacher.py"), str(out / "base"), f"demo-{a.seed}"]) as url:
            rollout(out / "demos.jsonl", out / "demos", url, SAMPLING)
        run("polar-toolkit", "merge", str(out / "demos"))
        words = ["--format", "sft", "--min-reward", "1", "--out", str(out / "sft")]
        run("polar-toolkit", "export", str(out / "demos"), *words)
    lines = out / "sft" / "conversations.jsonl"
    run(sys.executable, str(HERE / "sft.py"), str(out / "base"), str(lines), str(start), "--seed", str(a.seed))
    return start


def write_tasks(out: Path, seed: int) -> None:
    """Three lists of questions; no instruction of one is in another."""
    told: set[str] = set()
    for name, count in (("held", HELD), ("demos", DEMOS), ("train", TRAIN)):
        word = f"{name.rstrip('s')}-{seed}"
        chosen = list(itertools.islice(_untold(questions(word), told), count))
        lines = [json.dumps(row(q, f"{word}-{place:04d}-{q.kind}")) for place, q in enumerate(chosen)]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def _untold(asked: Iterable[Question], told: set[str]) -> Iterator[Question]:
    for question in asked:
        if question.instruction not in told:
            told.add(question.instruction)
            yield question


def held_out(out: Path, name: str, url: str, sampling: dict[str, float]) -> None:
    """What the engine's model scores on the held-out questions, in OUT/NAME/rollouts.parquet."""
    import polars

    rollout(out / "held.jsonl", out / name, url, sampling)
    rows = polars.read_parquet(out / name / "rollouts.parquet")
    print(f"{name}: {rows['reward'].fill_null(0).mean():.3f} on {len(rows)} held-out questions", flush=True)


def rollout(tasks: Path, folder: Path, url: str, sampling: dict[str, float]) -> None:
    """One attempt at each question, or those that are missing."""
    if (folder / "rollouts.parquet").is_file():
        return
    if (folder / "rollout" / "plan.json").is_file():
        run("polar-toolkit", "rollout", "--resume", str(folder), "--engine", url)
        return
    words = ["--harness", str(HARNESS), "--samples", "1", "--engine", url, "--sampling", json.dumps(sampling)]
    pools = ["--pool-init", "4", "--pool-ready", "8", "--pool-run", "8", "--pool-post", "4"]
    run("polar-toolkit", "rollout", str(tasks), str(folder), *words, *pools)


@contextmanager
def engine(model: Path, log: Path) -> Generator[str]:
    """An embedded engine that serves the model while inside the block."""
    with server([*program("polar-train"), "engine", str(model), "--embedded", "--port", "0"]) as url:
        yield url


@contextmanager
def server(command: Sequence[str]) -> Generator[str]:
    """A program that prints its address in its first line, and is ended with the block."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            words = process.stdout.readline().split()
            address = next((word for word in words if word.startswith("http://")), None)
            if address is None:
                sys.exit(f"{command[1]} did not start")
            yield address
        finally:
            process.terminate()


def run(name: str, *words: str) -> None:
    """A command whose words a person sees as well."""
    print(f"$ {name} {' '.join(words)}", flush=True)
    done = subprocess.run([*program(name), *words], check=False)
    if done.returncode not in (0, 3):  # 3: some attempts failed, which their rows say
        sys.exit(done.returncode)


def said(name: str, *words: str) -> str:
    """What a command prints."""
    return subprocess.run([*program(name), *words], check=True, capture_output=True, text=True).stdout.strip()


def program(name: str) -> list[str]:
    """A command of this environment, whatever is on PATH."""
    beside = Path(sys.executable).parent / name
    return [str(beside)] if beside.is_file() else [name]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the run; what is in it is gone on with")
    parser.add_argument("--seed", type=int, default=1, help="of the questions, of the stages and of the tasks' order")
    parser.add_argument("--updates", type=int, default=12, help="GRPO updates")
    parser.add_argument("--groups", type=int, default=8, help="questions of an update")
    parser.add_argument("--samples", type=int, default=8, help="attempts at each")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate of GRPO")
    parser.add_argument("--beta1", type=float, default=0.9, help="of GRPO's AdamW")
    parser.add_argument("--start", type=Path, help="a model that imitated already, in place of the first two stages")
    parser.add_argument(
        "--shuffled", action="store_true", help="the control: rewards are permuted before they are learned from"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
