"""polar_train.metrics: one line of JSON a step, each step once."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from polar_train.errors import BadInput
from polar_train.metrics import FILE, append, read


def test_what_is_appended_is_read(tmp_path, record):
    """Every field comes back as it was, in the order of the steps."""
    written = [record(1), record(2, reward_mean=None, batch="b.parquet"), record(3)]
    for one in written:
        append(tmp_path, one)
    assert read(tmp_path) == written


def test_a_step_is_one_line_of_plain_json(tmp_path, record):
    """Any reader of JSON lines can take it."""
    append(tmp_path, record(1))
    append(tmp_path, record(2))
    lines = (tmp_path / FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [asdict(record(1)), asdict(record(2))]


def test_numbers_that_are_not_finite_are_null(tmp_path, record):
    """JSON has none; they come back as nan."""
    append(tmp_path, record(1, ratio_mean=math.inf, kl_mean=math.nan))
    assert "Infinity" not in (tmp_path / FILE).read_text()
    (back,) = read(tmp_path)
    assert math.isnan(back.ratio_mean)
    assert math.isnan(back.kl_mean)


def test_whole_numbers_and_numpy_numbers_are_numbers(tmp_path, record):
    """A reward of 0 or a float32 loss is not another kind of thing."""
    append(tmp_path, record(1, reward_mean=0, loss=np.float32(0.5), seconds=3))
    (back,) = read(tmp_path)
    assert (back.reward_mean, back.loss, back.seconds) == (0.0, 0.5, 3.0)
    assert type(back.reward_mean) is float


def test_steps_that_are_done_again_replace_what_a_killed_run_left(tmp_path, record):
    """Lines of the step and of later ones go; earlier ones stay."""
    for step in range(1, 6):
        append(tmp_path, record(step))
    again = record(3, loss=0.75)
    append(tmp_path, again)
    append(tmp_path, record(4))
    assert read(tmp_path) == [record(1), record(2), again, record(4)]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_torn_last_line_is_not_read(tmp_path, record):
    """A run that was killed while writing has the steps before."""
    tear(tmp_path, record)
    assert read(tmp_path) == [record(1)]


def test_a_torn_last_line_is_replaced_by_the_next_step(tmp_path, record):
    """It does not run into what is written behind it."""
    tear(tmp_path, record)
    append(tmp_path, record(2))
    assert read(tmp_path) == [record(1), record(2)]


def tear(out, record):
    """Two steps, the second of them only half written."""
    append(out, record(1))
    whole = (out / FILE).read_bytes()
    (out / FILE).write_bytes(whole + whole[: len(whole) // 2])


def test_a_folder_without_metrics_is_refused(tmp_path):
    """The sentence says what to give."""
    with pytest.raises(BadInput, match=r"holds no metrics\.jsonl: give the folder that `polar-train run`"):
        read(tmp_path)


def test_a_run_without_a_step_is_refused(tmp_path):
    """An empty file is not a run with nothing to say."""
    (tmp_path / FILE).touch()
    with pytest.raises(BadInput, match="holds no step yet"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("not json", "line 2 is not JSON"),
        ("[1]", "line 2 is not the record of a step"),
        ('{"step": 2}', "line 2 is not the record of a step"),
    ],
)
def test_a_foreign_line_is_refused(tmp_path, record, line, complaint):
    """The sentence names the file and the line."""
    append(tmp_path, record(1))
    with (tmp_path / FILE).open("a") as stream:
        stream.write(f"{line}\n")
    with pytest.raises(BadInput, match=complaint):
        read(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("loss", "much"), ("step", 1.5), ("batch", 7), ("groups", True)])
def test_an_entry_of_another_kind_is_refused(tmp_path, record, name, value):
    """The sentence names the entry and its value."""
    (tmp_path / FILE).write_text(json.dumps(asdict(record(1)) | {name: value}) + "\n")
    with pytest.raises(BadInput, match=f"{name} of .* line 1 is {value!r}"):
        read(tmp_path)


def test_a_foreign_last_line_is_not_written_behind(tmp_path, record):
    """A file of something else stays as it is."""
    (tmp_path / FILE).write_text("something else\n")
    with pytest.raises(BadInput, match="is not JSON"):
        append(tmp_path, record(1))
    assert (tmp_path / FILE).read_text() == "something else\n"
