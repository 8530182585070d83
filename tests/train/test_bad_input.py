"""What `polar-train step` and `run` are given and cannot use: one sentence, exit code 2, and nothing overwritten."""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from polar_mitm.tokens.fingerprint import fingerprint
from polar_train.cli import app

SCOPE = {"sessions": 1, "groups": 1, "dead_groups": 0, "reward_mean": 0.5, "tokenizer": "257-ab"}


def changed(table: pa.Table, name: str, value) -> pa.Table:
    """The table with another value at the last token of a column."""
    row = table.to_pylist()[0]
    return pa.Table.from_pylist([{**row, name: [*row[name][:-1], value]}], schema=table.schema)


BATCHES = {
    "of another tokenizer": (
        lambda table: table.replace_schema_metadata({"polar_batch": json.dumps(SCOPE)}),
        r"the batch was sampled with the tokenizer '257-ab', and that of the model at .* is '\d+-\w+': train the model",
    ),
    "with an id that the model has not": (
        lambda table: changed(table, "input_ids", 320),
        r"token id 320, the vocabulary of the model at '.*model' has 320: it is another model's batch",
    ),
    "without a column": (
        lambda table: table.drop_columns(["old_logprobs"]),
        r"batch.parquet' has no column 'old_logprobs': it is not a batch of `polar-toolkit batch`",
    ),
    "with a NaN among the logprobs": (
        lambda table: changed(table, "old_logprobs", float("nan")),
        r"old_logprobs of '.*batch.parquet' row 0 is nan at token 39 \(loss_mask 1\)",
    ),
    "of which a part is missing": (
        lambda table: changed(table, "loss_weight", 0.0),
        r"loss_weight of .* adds up to 0.9\d*, not 1: pass the whole batch",
    ),
}
MODELS = {
    "that is no folder": (lambda folder: shutil.rmtree(folder), r"no model at '.*model': a Hugging Face folder "),
    "without weights": (lambda folder: (folder / "model.safetensors").unlink(), r"model at .* cannot be loaded: "),
    "whose weights are cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100),
        r"model at .* cannot be loaded: ",
    ),
    "whose config is no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        r"model at .* cannot be loaded: ",
    ),
}


@pytest.fixture
def place(tmp_path, tiny_model, as_batch, draw) -> Path:
    """A folder with a model, a batch and the configuration of a run over it, all of them good."""
    shutil.copytree(tiny_model, tmp_path / "model")
    pq.write_table(as_batch(draw(40)), tmp_path / "batch.parquet")
    (tmp_path / "run.toml").write_text(
        "model = 'model'\nbatches = 'batch.parquet'\nout = 'out'\nthreads = 1\n[engines]\nversion = 'v1'\n"
    )
    return tmp_path


@pytest.fixture(params=["step", "run"])
def refused(request, place, match):
    """Runs a command on what is in the place, which must refuse it with a sentence and leave everything alone."""

    def check(sentence: str) -> None:
        before = contents(place)
        command = {
            "step": ["step", place / "batch.parquet", "--model", place / "model", "--out", place / "out"],
            "run": ["run", place / "run.toml"],
        }[request.param]
        match(command, sentence)
        after = {name: content for name, content in contents(place).items() if not is_empty(name, content)}
        assert after == {name: content for name, content in before.items() if not is_empty(name, content)}

    return check


@pytest.fixture
def match():
    """Runs a command, which must exit with 2 and one line of the given pattern."""

    def check(command: list[object], sentence: str) -> None:
        result = CliRunner().invoke(app, [str(word) for word in command], env={"COLUMNS": "200"})
        assert result.exit_code == 2, result.output
        told = result.output[result.output.index("error: ") :]
        assert told.count("\n") == 1, result.output
        assert re.search(sentence, told), result.output

    return check


def contents(folder: Path) -> dict[str, bytes]:
    """All files and what is in them."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_empty(name: str, content: bytes) -> bool:
    """A lock that a run leaves behind holds nothing."""
    return name.startswith("out/") and not content


@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_is_refused(refused, place, batch):
    """Before a checkpoint, with what is wrong and where."""
    change, sentence = BATCHES[batch]
    pq.write_table(change(pq.read_table(place / "batch.parquet")), place / "batch.parquet")
    refused(sentence)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_refused(refused, place, model):
    """With its path."""
    change, sentence = MODELS[model]
    change(place / "model")
    refused(sentence)


def narrow(folder: Path) -> None:
    """Makes the model know eight tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(8)
    model.save_pretrained(folder)


def rename(folder: Path) -> None:
    """Gives the tokenizer a token of its own."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<own>"])
    tokenizer.save_pretrained(folder)


REFERENCES = {
    "with fewer tokens": (narrow, r"the vocabulary of the model at '.*reference' has 8: it is another model's batch"),
    "of another tokenizer": (rename, r"and that of the model at '.*reference' is .*: train the model that sampled it"),
}


@pytest.mark.parametrize("reference", REFERENCES)
def test_a_reference_is_refused(match, place, reference):
    """It is held to the batch as the model is: else its logprobs would be of other tokens, or not be there."""
    change, sentence = REFERENCES[reference]
    change(shutil.copytree(place / "model", place / "reference"))
    own = json.dumps(SCOPE | {"tokenizer": fingerprint(AutoTokenizer.from_pretrained(place / "model"))})
    batch = pq.read_table(place / "batch.parquet")
    pq.write_table(batch.replace_schema_metadata({"polar_batch": own}), place / "batch.parquet")
    text = (place / "run.toml").read_text()
    (place / "run.toml").write_text(f"{text}[objective]\nkl = 0.1\nreference = 'reference'\n")
    match(["run", place / "run.toml"], sentence)
    step = ["step", place / "batch.parquet", "--model", place / "model", "--out", place / "stepped"]
    match([*step, "--kl", 0.1, "--reference", place / "reference"], sentence)


CONFIGURATIONS = {
    "with a misspelled key": ("folow = true", "folow = true", r"run.toml': folow is no key: the file has batches, "),
    "of another value": ("threads = 1", "threads = 'all'", r"run.toml': threads is 'all': write a whole number"),
    "without a model": ("model = 'model'", "", r"run.toml': model is missing: add a path, relative to this file"),
    "that is no TOML": ("model = 'model'", "model = ", r"run.toml' cannot be read as TOML: "),
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_configuration_is_refused(match, place, configuration):
    """With file, key, value and remedy, before anything is made."""
    before, after, sentence = CONFIGURATIONS[configuration]
    text = (place / "run.toml").read_text()
    (place / "run.toml").write_text(text.replace(before, after) if before in text else f"{after}\n{text}")
    match(["run", place / "run.toml"], sentence)
    assert not (place / "out").exists()


def test_versions_that_are_too_old_are_refused_and_the_run_keeps_what_it_has(match, place, as_batch, draw):
    """The checkpoint and the figures of the first step are untouched by the second, which cannot be."""
    (place / "batches").mkdir()
    for number in (1, 2):
        pq.write_table(as_batch(draw(40, seed=number)), place / "batches" / f"batch-{number}.parquet")
    text = (place / "run.toml").read_text().replace("batch.parquet", "batches")
    (place / "run.toml").write_text(f"updates = 1\n{text}[lag]\nmax = 0\n")
    done = CliRunner().invoke(app, ["run", str(place / "run.toml")], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    (place / "run.toml").write_text(f"{text}[lag]\nmax = 0\n")
    before = contents(place / "out")
    match(
        ["run", place / "run.toml"],
        r"all \d+ trained tokens were sampled more than 0 weight versions before 'step-000001', the oldest 1 before: ",
    )
    assert contents(place / "out") == before


def test_versions_of_nobody_are_refused(match, place):
    """A run has to know what the first weights were called."""
    text = (place / "run.toml").read_text()
    (place / "run.toml").write_text(text.replace("'v1'", "'other'"))
    match(["run", place / "run.toml"], r"sampled by weight version 'v1', which is neither 'other' nor 'step-NNNNNN'")
