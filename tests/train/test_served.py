"""A model folder being served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

from polar_train.served import Engine


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[Engine]:
    engine = Engine(tiny_model, weight_version="v0")
    yield engine
    engine.close()


def test_limits_come_from_the_models_configuration(engine):
    """Context, vocabulary and end tokens are those of the folder."""
    assert (engine.context_length, engine.vocab_size) == (4096, 320)
    assert engine.end_ids == {engine.tokenizer.eos_token_id}
    assert engine.scheduler.version == "v0"


def test_a_folder_that_is_none_is_refused(engine, tmp_path):
    """The message names the folder."""
    with pytest.raises(OSError, match="no-such-folder"):
        engine.load_alike(tmp_path / "no-such-folder")


def test_weights_of_another_shape_are_refused(engine, tiny_model, tmp_path):
    """The limits that clients were told must stay true."""
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text()) | {"max_position_embeddings": 8}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="max_position_embeddings is 8 there and 4096 in the served model"):
        engine.load_alike(other)


def test_an_equal_folder_can_be_loaded(engine, tiny_model):
    """A checkpoint of the served model is a model of the same shape."""
    assert engine.load_alike(tiny_model).config.vocab_size == engine.vocab_size
