"""The example that learns: its questions have the answers they say, and imitation trains what the assistant says."""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import polars as pl
import pytest
from transformers import AutoTokenizer

from polar_mitm.tokens import template
from polar_toolkit.rollout.harnesses.scripted_engine import ScriptedEngine
from polar_train import metrics
from polar_train.small_models import fetch

LEARN = Path(__file__).parent.parent.parent / "examples" / "learn"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    """The scripts import each other by their plain names."""
    monkeypatch.syspath_prepend(LEARN)
    yield
    for name in ("tasks", "teacher", "sft", "model", "learn", "report"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory):
    """SmolLM2 with words for calling tools."""
    sys.path.insert(0, str(LEARN))
    try:
        from model import with_tools
    finally:
        sys.path.remove(str(LEARN))
    folder = tmp_path_factory.mktemp("learn") / "base"
    with_tools(fetch("smollm2-135m-instruct"), folder)
    return folder


def test_the_command_of_a_question_prints_its_answer(tmp_path):
    """tasks.py: several of each kind, in the folder that the row prepares; the evaluator takes no other answer."""
    from tasks import KINDS, questions, row

    for number, question in enumerate(islice(questions("a test"), 3 * len(KINDS))):
        folder = tmp_path / str(number)
        folder.mkdir()
        asked = row(question, f"t{number}")
        for line in asked["prepare"]:
            subprocess.run(["sh", "-c", line], cwd=folder, check=True)
        printed = subprocess.run(["sh", "-c", question.command], cwd=folder, check=True, capture_output=True, text=True)
        assert printed.stdout.split("=")[-1].strip() == question.answer
        right = re.compile(asked["check"]["regex"])
        assert right.search(f"The answer is {question.answer}.\n")
        assert not right.search(f"The answer is 1{question.answer}.\n")
        assert not right.search(f"{question.answer} or 12\n")
        assert question.answer not in shlex.split(question.instruction)


def test_no_question_is_asked_twice(tmp_path):
    """learn.py: neither in two of the lists nor in one."""
    from learn import write_tasks

    write_tasks(tmp_path, 3)
    asked = [
        json.loads(line)["instruction"]
        for name in ("held", "demos", "train")
        for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
    ]
    assert len(asked) == 804
    assert len({*asked}) == len(asked)


def test_the_model_is_read_and_extended_by_a_typed_renderer(with_tools):
    """model.py: what it calls reaches the harness as a call."""
    assert template.load(with_tools).family == "qwen3"


def test_imitation_trains_what_the_assistant_says(with_tools):
    """sft.py: the call and the answer, each with its end of turn, and not a token more."""
    from sft import example

    tokenizer = AutoTokenizer.from_pretrained(with_tools)
    call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a\nb", "tool_call_id": "1"},
        {"role": "assistant", "content": "two"},
    ]
    row = example(tokenizer, {"messages": messages, "tools": []})
    said = tokenizer.decode(row.input_ids_T[row.loss_mask_T])
    assert said == '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>two<|im_end|>'
    assert tokenizer.decode(row.input_ids_T).startswith(
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    )


def test_the_teacher_runs_the_command_and_says_what_it_printed():
    """teacher.py, as it reads a prompt."""
    from tasks import questions
    from teacher import script

    question = next(islice(questions("seed"), 100, None))
    reply = script("seed")
    prompt = f"<|im_start|>user\n{question.instruction}<|im_end|>\n<|im_start|>assistant\n"
    assert json.dumps({"command": question.command}) in reply(prompt)
    told = f"{prompt}...<|im_start|>user\n<tool_response>\nport=12\n\n</tool_response><|im_end|>\n"
    assert reply(told) == "12"


def test_plain_chat_asks_pi_without_the_interceptor(with_tools, tmp_path):
    """plain_chat.py, against the teacher behind a chat endpoint: every answer is right."""
    from tasks import questions, row
    from teacher import script

    asked = [row(question, f"t{n}") for n, question in enumerate(islice(questions("seed"), 2))]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(task) + "\n" for task in asked))
    with ScriptedEngine(with_tools, script("seed")).serving() as engine, chat_endpoint(engine.url, tmp_path) as url:
        words = [LEARN / "plain_chat.py", tmp_path / "held.jsonl", tmp_path / "plain.jsonl", "--url", url]
        done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True, timeout=120)
    assert "1.000 on 2 held-out questions" in done.stdout
    assert [json.loads(line)["reward"] for line in (tmp_path / "plain.jsonl").read_text().splitlines()] == [1.0, 1.0]


@contextmanager
def chat_endpoint(engine: str, folder: Path):
    """The gateway as a plain server of chat completions."""
    command = [
        sys.executable,
        "-m",
        "polar_mitm.gateway",
        "--engine",
        engine,
        "--run",
        str(folder / "run"),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield re.search(r"http://[\d.:]+", process.stdout.readline())[0] + "/v1"
        finally:
            process.terminate()


def test_the_report_pairs_the_questions(tmp_path, record):
    """report.py: the change by question, its interval, answers without a call, and the picture; runs are added."""
    run = tmp_path / "run-1"
    for name, rewards in (("before", [0, 0, 0, 1]), ("after", [1, 1, 0, 1])):
        for asked in (name, f"{name}-greedy"):
            (run / asked).mkdir(parents=True)
            pl.DataFrame(
                {
                    "task_id": list("abcd"),
                    "status": "completed",
                    "reward": rewards,
                    "calls": [2, 1, 2, 2],
                    "sampled_tokens": 9,
                },
                schema_overrides={"reward": pl.Float64},
            ).write_parquet(run / asked / "rollouts.parquet")
    (run / "run.json").write_text(json.dumps({"seed": 1, "shuffled": False}))
    (run / "loop").mkdir()
    for step in (1, 2):
        metrics.append(run / "loop", record(step))
    words = [sys.executable, LEARN / "report.py", run, "--out", tmp_path / "results"]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=os.environ | {"COLUMNS": "160"})
    assert "+0.500" in done.stdout
    assert "run-1: 2 GRPO steps" in done.stdout
    assert pl.read_parquet(tmp_path / "results" / "held_out.parquet").height == 16
    assert (tmp_path / "results" / "curves.png").read_bytes().startswith(b"\x89PNG")
    run.rename(tmp_path / "run-2")
    for _ in range(2):
        words[2] = tmp_path / "run-2"
        done = subprocess.run(words, check=True, capture_output=True, text=True, env=os.environ | {"COLUMNS": "160"})
        assert re.findall(r"(run-\d): 2 GRPO steps", done.stdout) == ["run-1", "run-2"]
    assert pl.read_parquet(tmp_path / "results" / "held_out.parquet").height == 32


def test_the_results_say_what_the_readme_says():
    """results/: the README's scores and changes are those of held_out.parquet; no right answer came without a call."""
    from report import paired

    held = pl.read_parquet(LEARN / "results" / "held_out.parquet")
    told = (LEARN / "README.md").read_text()
    through = held.filter(~pl.col("asked").str.contains("plain"))
    assert through.filter((pl.col("reward") > 0) & (pl.col("calls") < 2)).is_empty()
    for run in held["run"].unique():
        for first, second in (("before", "after"), ("before-greedy", "after-greedy")):
            asked = [held.filter((pl.col("run") == run) & (pl.col("asked") == name)) for name in (first, second)]
            assert [rows.height for rows in asked] == [120, 120]
            scores = " | ".join(f"{rows['reward'].fill_null(0).mean():.3f}" for rows in asked)
            change, low, high = paired(held, run, first, second)
            assert f"| {scores} | {change:+.3f} | {low:+.3f} to {high:+.3f} |" in told
