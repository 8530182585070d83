"""The held-out questions without this project in between: Pi asks a chat endpoint, such as SGLang's own, directly.

    python examples/learn/plain_chat.py runs/learn-1/held.jsonl runs/learn-1/plain.jsonl --url http://127.0.0.1:30000/v1

Each question has a folder and a sandbox of its own (bubblewrap), which sees this machine's programs and nothing that it
could change. What comes out is compared with what the same model scored through the interceptor.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HARNESS = HERE / "pi" / "harness.toml"
TIMEOUT_S = 120
MAX_TOKENS = 64
"""Of a reply, as in the rollouts."""


def main() -> None:
    """Ask every question once; write a line for each, and print the share of right answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--url", required=True, help="of an OpenAI-compatible endpoint, with its /v1")
    parser.add_argument("--model", default="default", help="the name by which the endpoint knows the model")
    parser.add_argument("--at-once", type=int, default=4)
    a = parser.parse_args()
    for needed, remedy in (
        ("pi", "make harnesses, and put .harness/node_modules/.bin on PATH"),
        ("bwrap", "install bubblewrap"),
    ):
        if not shutil.which(needed):
            sys.exit(f"{needed} is not on PATH: {remedy}")
    if not starts():
        sys.exit(
            f"{shutil.which('pi')} does not start in a sandbox, which sees nothing below /tmp: install it elsewhere"
        )
    tasks = [json.loads(line) for line in a.tasks.read_text().splitlines()]
    with ThreadPoolExecutor(a.at_once) as pool:
        rewards = list(pool.map(lambda task: ask(task, a.url, a.model), tasks))
    lines = [{"task_id": task["id"], "reward": reward} for task, reward in zip(tasks, rewards, strict=True)]
    a.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"plain chat: {sum(rewards) / len(rewards):.3f} on {len(rewards)} held-out questions")


def starts() -> bool:
    """Whether Pi runs where the questions are asked: who cannot run gives no right answer either."""
    with tempfile.TemporaryDirectory() as empty:
        tried = [*_sandbox(Path(empty), Path(empty)), "pi", "--version"]
        return subprocess.run(tried, env=os.environ | {"HOME": "/tmp/home"}, capture_output=True).returncode == 0


def ask(task: dict, url: str, model: str) -> float:
    """1 when Pi's last words are the answer, and 0 when they are not or Pi does not come to an end."""
    with tempfile.TemporaryDirectory() as scratch:
        home, work = Path(scratch, "home"), Path(scratch, "workspace")
        (home / "agent").mkdir(parents=True)
        work.mkdir()
        models = [{"id": model, "maxTokens": MAX_TOKENS}]
        provider = {"baseUrl": url, "api": "openai-completions", "apiKey": "none", "models": models}
        (home / "agent" / "models.json").write_text(json.dumps({"providers": {"plain": provider}}))
        environment = os.environ | {"HOME": "/tmp/home", "PI_CODING_AGENT_DIR": "/tmp/home/agent"}
        inside = functools.partial(
            subprocess.run, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        for line in task["prepare"]:
            inside([*_sandbox(home, work), "sh", "-c", line], check=True)
        try:
            done = inside([*_sandbox(home, work), *words(task["instruction"], model)], check=False)
        except subprocess.TimeoutExpired:
            return 0.0
    return float(re.search(task["check"]["regex"], done.stdout) is not None)


def _sandbox(home: Path, work: Path) -> list[str]:
    """The words before a command that is to see two folders of its own, and the machine's programs."""
    words = ["bwrap", *_programs(), "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    words += ["--ro-bind", str(ROOT), str(ROOT)]  # which may lie below /tmp, and has the harnesses
    words += ["--bind", str(work), "/workspace", "--bind", str(home), "/tmp/home", "--chdir", "/workspace"]
    return [*words, "--unshare-pid", "--die-with-parent"]


def _programs() -> list[str]:
    """All of this machine, to be read; the questions' own folder has the path that it has in a rollout."""
    own = {"dev", "proc", "tmp", "sys", "workspace"}
    kept = [entry for entry in Path("/").iterdir() if entry.name not in own]
    links = [word for entry in kept if entry.is_symlink() for word in ("--symlink", str(entry.readlink()), str(entry))]
    return links + [word for entry in kept if not entry.is_symlink() for word in ("--ro-bind", str(entry), str(entry))]


def words(instruction: str, model: str) -> list[str]:
    """Pi's command as the rollouts give it, but for the provider."""
    told = tomllib.loads(HARNESS.read_text())["runs"]["openrouter"]["command"]
    swapped = {"{task}": instruction, "openrouter": "plain", "qwen/qwen3-coder": model}
    return [swapped.get(word, word) for word in told]


if __name__ == "__main__":
    main()
