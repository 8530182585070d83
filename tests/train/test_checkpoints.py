"""Checkpoints of a run: whole or not there, and only so many of them."""

import pytest
import torch

from polar_train import checkpoints
from polar_train.checkpoints import State
from polar_train.errors import BadInput

TENSORS = {"exp_avg.weight": torch.arange(3.0)}


def state(step):
    return State(step, "0123456789abcdef", "default", {"batch-00000.parquet": "fedcba9876543210"})


def model(folder):
    """Stands for a model's files."""
    (folder / "config.json").write_text("{}")


def test_what_was_written_is_read(tmp_path):
    """The state and the tensors, from the sub-folder `training`."""
    written = checkpoints.write(tmp_path, state(3), TENSORS, model)
    assert written == tmp_path / "checkpoints" / "step-000003"
    assert sorted(path.name for path in written.iterdir()) == ["config.json", "training"]
    found, tensors = checkpoints.read(written)
    assert found == state(3)
    assert found.version == "step-000003"
    assert torch.equal(tensors["exp_avg.weight"], torch.arange(3.0))


def test_no_weights_lie_beside_the_models(tmp_path):
    """An engine takes every safetensors file of the folder for weights: there is none but what the model wrote."""
    assert list(checkpoints.write(tmp_path, state(1), TENSORS, model).glob("*.safetensors")) == []


def test_before_the_first_step_the_version_is_the_engines_name():
    """Of the weights that the run began with."""
    assert state(0).version == "default"


def test_the_newest_is_by_number(tmp_path):
    """Also behind a million; other folders are none."""
    assert checkpoints.newest(tmp_path) is None
    for step in (999_999, 1_000_000, 2):
        checkpoints.write(tmp_path, state(step), TENSORS, model)
    (tmp_path / "checkpoints" / "step-9999999-copy").mkdir()
    assert checkpoints.newest(tmp_path).name == "step-1000000"


def test_a_half_written_one_is_ignored_and_written_anew(tmp_path):
    """What a killed run left has another name, and does not stand in the way."""

    def dies(folder):
        model(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.write(tmp_path, state(1), TENSORS, dies)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".step-000001"]
    assert checkpoints.newest(tmp_path) is None
    checkpoints.write(tmp_path, state(1), TENSORS, model)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_only_so_many_stay(tmp_path):
    """The newest, at least one, and nothing half removed."""
    for step in (1, 2, 3):
        checkpoints.write(tmp_path, state(step), TENSORS, model)
    (tmp_path / "checkpoints" / ".step-000001" / "training").mkdir(parents=True)
    checkpoints.prune(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    checkpoints.prune(tmp_path, 0)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


def test_one_is_never_replaced(tmp_path):
    """A second of the same step is refused."""
    checkpoints.write(tmp_path, state(1), TENSORS, model)
    with pytest.raises(BadInput, match="exists and is not overwritten"):
        checkpoints.write(tmp_path, state(1), TENSORS, model)


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_a_broken_one_is_one_sentence(tmp_path, name):
    """Which names it and says what to do."""
    written = checkpoints.write(tmp_path, state(1), TENSORS, model)
    (written / "training" / name).write_text("{")
    with pytest.raises(BadInput, match=r"step-000001' cannot be resumed from: .*; remove it to go on"):
        checkpoints.read(written)
