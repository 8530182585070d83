"""The forward over several sequences, and the prefix cache, against a plain Hugging Face forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from polar_train.kv import Piece, PrefixCache, SequenceKV, forward, load_model, shared_prefix


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def drawn(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 300, size).astype(np.int32)


def known(*values: int) -> SequenceKV:
    """A sequence whose keys and values nobody will read."""
    kv = SequenceKV(len(values))
    kv.commit(ids(*values))
    return kv


@pytest.fixture(scope="module")
def model(tiny_model):
    return load_model(tiny_model)


@pytest.fixture(scope="module")
def plain(tiny_model):
    """Logits [T, V] of a sequence by Hugging Face alone."""
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

    def logits(tokens: np.ndarray) -> torch.Tensor:
        with torch.inference_mode():
            return network(torch.from_numpy(tokens).long()[None]).logits[0]

    return logits


def test_pieces_of_different_sequences_in_one_forward_do_not_see_each_other(model, plain):
    """Two prompts behind each other in one row get the logits that each gets alone."""
    left, right = drawn(40, 1), drawn(7, 2)
    found = forward(model, [Piece(SequenceKV(1), left, 40), Piece(SequenceKV(64), right, 7)])
    torch.testing.assert_close(found[0], plain(left), atol=1e-4, rtol=0)
    torch.testing.assert_close(found[1], plain(right), atol=1e-4, rtol=0)


def test_a_sequence_computed_in_pieces_gets_the_logits_of_the_whole(model, plain):
    """A chunk, another chunk and single tokens add up to the plain forward."""
    tokens, kv = drawn(50), SequenceKV(4)
    found = [forward(model, [Piece(kv, tokens[a:b], b - a)])[0] for a, b in [(0, 20), (20, 48), (48, 49), (49, 50)]]
    torch.testing.assert_close(torch.cat(found), plain(tokens), atol=1e-4, rtol=0)
    assert kv.ids.tolist() == tokens.tolist()


def test_a_copied_prefix_is_as_good_as_computing_it(model, plain):
    """A fork that starts from another sequence's prefix leaves that sequence as it was."""
    tokens, source = drawn(30), SequenceKV(30)
    forward(model, [Piece(source, tokens, 1)])
    fork = source.prefix(20, 64)
    other = np.concatenate([tokens[:20], drawn(9, 5)])
    torch.testing.assert_close(forward(model, [Piece(fork, other[20:], 9)])[0], plain(other)[20:], atol=1e-4, rtol=0)
    more = np.concatenate([tokens, ids(7)])
    torch.testing.assert_close(forward(model, [Piece(source, ids(7), 1)])[0], plain(more)[-1:], atol=1e-4, rtol=0)


def test_only_the_wanted_logits_come_back(model):
    """`wanted` counts from the end of a piece."""
    found = forward(model, [Piece(SequenceKV(8), drawn(8), 3), Piece(SequenceKV(8), drawn(5), 1)])
    assert [tuple(logits.shape) for logits in found] == [(3, 320), (1, 320)]


def test_sliding_window_attention_is_refused_when_loading(tmp_path):
    """A model whose attention is not plainly causal is refused with a remedy, not served wrongly."""
    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="serve this model with SGLang"):
        load_model(tmp_path)


def test_a_folder_that_lacks_weights_is_refused(tmp_path, tiny_model):
    """Missing tensors are an error, never random numbers."""
    network = AutoModelForCausalLM.from_pretrained(tiny_model)
    state = {name: value for name, value in network.state_dict().items() if "layers.1.mlp" not in name}
    network.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match="lacks the weights"):
        load_model(tmp_path)


def test_the_shared_prefix_is_counted_up_to_the_first_difference():
    """Equal ids beyond a difference do not count."""
    assert shared_prefix(ids(1, 2, 3), ids(1, 2, 9, 3)) == 2
    assert shared_prefix(ids(1, 2), ids(1, 2, 3)) == 2
    assert shared_prefix(ids(), ids(1)) == 0


def test_the_cache_gives_the_longest_prefix_of_kept_and_running():
    """A running sequence may be copied from just as a finished one."""
    cache = PrefixCache(100)
    cache.add(short := known(1, 2, 8))
    assert cache.longest(ids(1, 2, 3, 4), []) == (short, 2)
    running = known(1, 2, 3, 9)
    assert cache.longest(ids(1, 2, 3, 4), [running]) == (running, 3)
    assert cache.longest(ids(5), [running]) == (None, 0)


def test_a_kept_sequence_that_a_longer_one_contains_is_forgotten():
    """A session's turns do not pile up."""
    cache = PrefixCache(8)
    cache.add(known(1, 2, 3))
    cache.add(whole := known(1, 2, 3, 4))
    cache.add(known(5, 6, 7, 8))
    assert cache.longest(ids(1, 2, 3, 4), [])[0] is whole


def test_the_cache_forgets_the_least_recently_used_beyond_its_bound():
    """Being asked for keeps a sequence alive."""
    cache = PrefixCache(6)
    cache.add(first := known(1, 1, 1))
    cache.add(known(2, 2, 2))
    cache.longest(ids(1, 1), [])
    cache.add(known(3, 3, 3))
    assert cache.longest(ids(1, 1), []) == (first, 2)
    assert cache.longest(ids(2, 2), []) == (None, 0)
