"""What people type: a rollout with a real harness, its rows and rewards, what is refused, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from polar_toolkit import rewards
from polar_toolkit.cli import app
from polar_toolkit.rollout import state, tasks
from polar_toolkit.rollout.harnesses.scripted_engine import ScriptedEngine
from polar_toolkit.rollout.options import Options
from polar_toolkit.rollout.outcome import FILE, Status
from polar_toolkit.rollout.recipe import find
from tests.bench.census import nothing_left
from tests.bench.provisions import HARNESS_BIN, ROOT, qwen3_tokenizer
from tests.harness.performance import turn

TASKS = ROOT / "examples" / "tasks"
POLAR_TOOLKIT = Path(sys.executable).with_name("polar-toolkit")
URL = "http://127.0.0.1:9"


def typed(*words: object) -> str:
    """The output of a command that must be refused or only prints."""
    done = CliRunner().invoke(app, ["rollout", *map(str, words)])
    assert done.exit_code == (0 if "--dry-run" in words else 2), done.output
    return " ".join(done.output.split())


def test_a_dry_run_says_what_would_be_started_and_starts_nothing(tmp_path: Path):
    """Tasks, budgets, pools and what the sandbox holds; no run folder is made."""
    run = tmp_path / "run"
    output = typed(TASKS, run, "--harness", "pi", "--engine", URL, "--samples", 4, "--turns", 7, "--dry-run")
    assert "10 tasks x 4 samples = 40 attempts" in output
    assert "it believes that it talks to api.openai.com" in output
    assert "bubblewrap" in output
    assert not run.exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give RUN"),
        ([TASKS, "run"], "give --harness NAME"),
        ([TASKS, "run", "--harness", "pi"], "give --engine URL"),
        ([TASKS, "run", "--harness", "pia", "--engine", URL], "no harness is called 'pia'"),
        ([TASKS, "run", "--harness", "pi", "--engine", URL, "--shard", "3/2"], "--shard is '3/2'"),
        ([TASKS, "run", "--harness", "pi", "--engine", URL, "--sampling", "{"], "not a JSON object"),
        ([TASKS, "run", "--harness", "pi", "--engine", URL, "--reward-status", "good"], "--reward-status names 'good'"),
        ([TASKS, "run", "--harness", "pi", "--engine", URL, "--shard", "11/11"], "holds no task"),
        ([TASKS, "run", "--harness", "pi", "--engine", URL, "--only", "sort"], "--only names 'sort'"),
        ([TASKS, "run", "--harness", "pi", "--engine", URL, "--way", "morse"], "has no way 'morse'"),
        ([TASKS, "run", "--harness", "pi", "--engine", URL, "--sandbox", "box"], "no sandbox is called 'box'"),
        ([TASKS, "run", "--harness", "pi", "--engine", URL, "--command", "x"], "is for the harness `shell`"),
        (["--resume", "nowhere"], "holds no rollout"),
        ([TASKS, "--resume", "nowhere"], "leave the rest out"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[object], sentence: str
):
    """Nothing is written but what was there."""
    monkeypatch.chdir(tmp_path)
    assert sentence in typed(*words)
    assert not (tmp_path / "run" / "rollout" / "plan.json").exists()


# --- real ones ----------------------------------------------------------------------------------------------------


def play(prompt: str) -> str:
    """Pi's part: it writes the answer into a file by its shell, and says it."""
    command = "printf 5 > answer.txt" if "five" in prompt else "printf 6 > answer.txt"
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return [f"I write it.\n\n<tool_call>\n{call}\n</tool_call>", "It is done."][min(turn(prompt), 1)]


def write_tasks(folder: Path, *names: str, script: str = 'test "$(cat answer.txt)" = 5') -> Path:
    """Tasks that want the number of their name in a file; only five is right."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "instruction.md").write_text(f"Write the number {name} into answer.txt.\n")
        (folder / name / "task.toml").write_text(
            f"[agent]\ntimeout_sec = 60\n[check]\nkind = \"command\"\ncommand = '''{script}'''\n"
        )
    return folder


@contextmanager
def rolling(*words: object) -> Iterator[subprocess.Popen[str]]:
    """The command as a process of its own."""
    environment = {**os.environ, "PATH": f"{HARNESS_BIN}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        [POLAR_TOOLKIT, "rollout", *map(str, words)], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(run: Path) -> Counter[str]:
    """How often each attempt was ended for good."""
    lines = (run / "rollout" / "events.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["event"] == "ended" and not row["missing"]]
    return Counter(row["outcome"]["attempt_id"] for row in rows)


@pytest.mark.harness
def test_a_rollout_with_pi_gives_rows_rewards_and_trajectories(tmp_path: Path):
    """Two tasks by two samples, one of them solved; each attempt made two calls and left its work; merge reads it."""
    folder, run = write_tasks(tmp_path / "tasks", "five", "six"), tmp_path / "run"
    with ScriptedEngine(qwen3_tokenizer(), play).serving() as engine, nothing_left(tmp_path):
        words = (folder, run, "--harness", "pi", "--engine", engine.url, "--tokenizer", qwen3_tokenizer())
        with rolling(*words, "--samples", 2, "--keep", "all") as process:
            output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    rows = pq.read_table(run / FILE).to_pylist()
    assert [(row["attempt_id"], row["status"], row["reward"], row["calls"]) for row in rows] == [
        ("five.1", Status.COMPLETED, 1.0, 2),
        ("five.2", Status.COMPLETED, 1.0, 2),
        ("six.1", Status.COMPLETED, 0.0, 2),
        ("six.2", Status.COMPLETED, 0.0, 2),
    ]
    assert rewards.read(run) == {"five.1": 1.0, "five.2": 1.0, "six.1": 0.0, "six.2": 0.0}
    kept = json.loads(rows[0]["artifacts"])
    assert (run / kept["workspace"] / "answer.txt").read_text() == "5"
    assert "It is done." in (run / kept["stdout"]).read_text()
    assert f"next: polar-toolkit merge {run}" in output
    merged = CliRunner().invoke(app, ["merge", str(run)])
    assert merged.exit_code == 0, merged.output
    trajectories = pq.read_table(run / "merged" / "trajectories").to_pylist()
    assert {row["session_id"] for row in trajectories} == {"five.1", "five.2", "six.1", "six.2"}


ASK = (
    "curl -sS https://api.openai.com/v1/chat/completions -H 'content-type: application/json' "
    """-d '{"model": "gpt-5.2", "messages": [{"role": "user", "content": "five"}]}' && printf 5 > answer.txt"""
)


def shell(engine: str) -> tuple[object, ...]:
    """What asks for two attempts at each task, one after the other, by a harness of one command."""
    tokenizer = qwen3_tokenizer()
    return ("--harness", "shell", "--command", ASK, "--tokenizer", tokenizer, "--samples", 2, "--pool-run", 1,
            "--engine", engine)  # fmt: skip


def end_after(process: subprocess.Popen[str], words: str, *signals: signal.Signals) -> str:
    """Send the signals once the command has printed some words; the rest of its output when it has ended."""
    assert process.stdout
    for line in process.stdout:
        if words in line:
            break
    for number in signals:
        os.kill(process.pid, number)
    rest = process.stdout.read()
    process.wait(60)
    return rest


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -9), pytest.param(signal.SIGTERM, 130, marks=pytest.mark.slow)]
)
def test_a_killed_rollout_is_resumed_with_exactly_what_is_missing(tmp_path: Path, number: signal.Signals, status: int):
    """Each attempt is ended once; what the dead runner left is gone; a second rollout into the folder is refused."""
    folder, run = write_tasks(tmp_path / "tasks", "five", "six"), tmp_path / "run"
    with ScriptedEngine(qwen3_tokenizer(), play).serving() as engine, nothing_left(tmp_path):
        with rolling(folder, run, *shell(engine.url)) as process:
            end_after(process, "five.1 completed", number)
        assert process.returncode == status
        assert 0 < len(ended(run)) < 4
        assert "holds a rollout already" in typed(folder, run, *shell(engine.url))
        with rolling("--resume", run) as process:
            output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert ended(run) == dict.fromkeys(["five.1", "five.2", "six.1", "six.2"], 1)
    rows = pq.read_table(run / FILE).to_pylist()
    assert {row["status"] for row in rows} == {Status.COMPLETED}
    assert {row["session_id"]: row["reward"] for row in rows} == rewards.read(run)


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(tmp_path: Path):
    """What is left then is swept by the next runner; the interceptor and the sandboxes die with this one."""
    folder, run = write_tasks(tmp_path / "tasks", "five"), tmp_path / "run"
    with ScriptedEngine(qwen3_tokenizer(), play).serving() as engine, nothing_left(tmp_path):
        with rolling(folder, run, *shell(engine.url)) as process:
            said = end_after(process, "five.1 completed", signal.SIGINT, signal.SIGTERM)
        assert (process.returncode, "once more to stop at once" in said) == (130, True)
        with rolling("--resume", run) as process:
            output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output


def test_a_rollout_whose_tasks_have_changed_is_not_resumed(tmp_path: Path):
    """Its rows would not be of one thing."""
    folder, run = write_tasks(tmp_path / "tasks", "five"), tmp_path / "run"
    asked = Options(run, "shell", URL, command=ASK)
    listed = tasks.read(folder)
    state.write_plan(
        state.Plan(
            "id", folder, ("five",), state.digest_of(listed), asked, {"harness": f"shell {find('shell').version}"}
        )
    )
    (folder / "five" / "instruction.md").write_text("Write something else.\n")
    assert "are not those that" in typed("--resume", run)


def test_a_failed_set_up_is_an_exit_status_of_its_own(tmp_path: Path):
    """3: there are rows, and some say that something of the user's is broken."""
    folder, run = write_tasks(tmp_path / "tasks", "five"), tmp_path / "run"
    with (folder / "five" / "task.toml").open("a") as file:
        file.write("[environment]\nprepare = ['exit 7']\n")
    with (
        ScriptedEngine(qwen3_tokenizer(), play).serving() as engine,
        nothing_left(tmp_path),
        rolling(folder, run, *shell(engine.url), "--tries", 1) as process,
    ):
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 3, output
    assert "prepare command 'exit 7' ended with status 7" in output
