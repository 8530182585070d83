"""The `polar-train` command: figures on success, one sentence and a code on failure."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from polar_train.cli import app
from polar_train.metrics import append


@pytest.fixture
def polar_train():
    """Runs the command with the given arguments."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def sentence(result) -> str:
    """The message of a failed command; it must be one line."""
    assert result.output.count("\n") == 1, result.output
    return result.output


def test_step_prints_its_figures_and_writes_a_checkpoint(polar_train, tiny_model, write, draw, tmp_path):
    """Loss, gradient norm, gap, clip share and tokens are printed as train.json has them."""
    result = polar_train("step", write(draw(40, 30)), "--model", tiny_model, "--out", tmp_path / "new", "--threads", 1)
    assert result.exit_code == 0, result.output
    update = json.loads((tmp_path / "new" / "train.json").read_text())["updates"][0]
    for figure in (
        f"{update['loss']:.4g}",
        f"{update['grad_norm']:.4g}",
        f"{update['clip_share']:.4f}",
        str(update["tokens"]),
    ):
        assert figure in result.output


def test_step_refuses_an_existing_checkpoint(polar_train, tiny_model, write, draw, tmp_path):
    """Exit code 2, and the folder is as it was."""
    (tmp_path / "new").mkdir()
    result = polar_train("step", write(draw(40)), "--model", tiny_model, "--out", tmp_path / "new")
    assert result.exit_code == 2
    assert "exists and is not overwritten" in result.output
    assert list((tmp_path / "new").iterdir()) == []


def test_step_without_gradient_exits_with_3(polar_train, tiny_model, write, draw, tmp_path):
    """Nothing learned is not success."""
    drawn = draw(40)
    drawn[0].advantage = 0.0
    result = polar_train("step", write(drawn), "--model", tiny_model, "--out", tmp_path / "new")
    assert result.exit_code == 3
    assert "gradient norm is 0" in result.output


def test_push_to_nobody_exits_with_2(polar_train, tiny_model):
    """The address is in the sentence."""
    result = polar_train("push", tiny_model, "--engine", "http://127.0.0.1:1")
    assert result.exit_code == 2
    assert "no engine answers at 'http://127.0.0.1:1/model_info'" in result.output


@pytest.fixture
def embedded_engine(tiny_model):
    """The address of an embedded engine that serves the tiny model in a process of its own."""
    code = "import sys; from polar_train.entry import main; sys.argv[0] = 'polar-train'; main()"
    command = [sys.executable, "-c", code, "engine", tiny_model, "--port", "0", "--embedded", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        line = engine.stdout.readline()
        assert line.startswith("engine ready: "), line
        yield line.split()[2]
        engine.terminate()


def test_a_step_is_served_by_the_embedded_engine(polar_train, tiny_model, write, draw, tmp_path, embedded_engine):
    """Step, push, and the engine names the new version; the same weights under another name exit with 3."""
    out = tmp_path / "step-1"
    assert polar_train("step", write(draw(40, 30)), "--model", tiny_model, "--out", out).exit_code == 0
    result = polar_train("push", out, "--engine", embedded_engine)
    assert result.exit_code == 0, result.output
    assert "default" in result.output
    assert "step-1" in result.output
    assert "idle: " in result.output
    again = polar_train("push", out, "--engine", embedded_engine, "--version", "other")
    assert again.exit_code == 3
    assert "its weights are still those of 'step-1', or equal to them" in again.output


def test_a_folder_that_cannot_be_served_is_one_sentence(polar_train, tmp_path):
    """The embedded engine's complaint comes with the folder and the address."""
    result = polar_train("engine", tmp_path, "--embedded", "--port", 0)
    assert result.exit_code == 2
    assert "the embedded engine cannot serve" in sentence(result)


def test_fetch_prints_the_folder_of_a_model(polar_train, tiny_model):
    """A folder is its own answer, on one line, whatever the terminal's width."""
    result = polar_train("fetch", tiny_model)
    assert (result.exit_code, result.output) == (0, f"{tiny_model}\n")


def test_an_unknown_model_is_one_sentence(polar_train):
    """Neither a folder nor a known name."""
    result = polar_train("fetch", "no-such-model")
    assert result.exit_code == 2
    assert "'no-such-model' is neither a model folder" in sentence(result)


def test_plot_draws_runs_into_one_picture(polar_train, record, tmp_path):
    """It prints where the picture is, and does not overwrite it."""
    append(tmp_path, record(1))
    picture = tmp_path / "new.png"
    result = polar_train("plot", tmp_path, tmp_path, "--to", picture)
    assert (result.exit_code, result.output) == (0, f"{picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = polar_train("plot", tmp_path, "--to", picture)
    assert again.exit_code == 2
    assert "exists and is not overwritten" in sentence(again)


def test_plot_of_an_empty_folder_is_one_sentence(polar_train, tmp_path):
    """Exit code 2, and no picture."""
    result = polar_train("plot", tmp_path)
    assert result.exit_code == 2
    assert "holds no metrics.jsonl" in sentence(result)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def config_file(tiny_model, write, draw, tmp_path):
    """A run over one batch, as its file."""
    write(draw(40, 30))
    file = tmp_path / "run.toml"
    file.write_text(
        f'model = "{tiny_model}"\nbatches = "batches"\nout = "out"\nthreads = 1\n[engines]\nversion = "v1"\n'
    )
    return file


def test_a_run_prints_its_steps_and_where_they_are(polar_train, config_file):
    """A line a step, and at the end the folder; the second time there is nothing to do."""
    result = polar_train("run", config_file)
    assert result.exit_code == 0, result.output
    assert "step 1, reward -, loss" in result.output
    assert f"steps: 1; checkpoints: {config_file.parent / 'out' / 'checkpoints'}" in result.output
    again = polar_train("run", config_file)
    assert again.exit_code == 0
    assert "step 1, reward" not in again.output


def test_a_run_without_batches_exits_with_2(polar_train, config_file):
    """In one sentence; no checkpoint is there."""
    (config_file.parent / "batches" / "00000.parquet").unlink()
    result = polar_train("run", config_file)
    assert result.exit_code == 2
    assert "no batches at" in result.output
    assert not (config_file.parent / "out" / "checkpoints").exists()


def test_a_loop_without_rollouts_is_one_sentence(polar_train, config_file):
    """The file of a run is not that of a loop; nothing is written."""
    result = polar_train("loop", config_file)
    assert result.exit_code == 2
    assert "has no table [rollout]" in sentence(result)
    assert not (config_file.parent / "out").exists()
