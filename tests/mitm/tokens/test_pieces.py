"""The bytes of single tokens."""

from __future__ import annotations

from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from polar_mitm.tokens import Template
from polar_mitm.tokens.pieces import byte_alphabet, bytes_of


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_the_bytes_of_a_texts_tokens_are_the_text(qwen3: Template, text: str) -> None:
    """In any script, also where a character is cut; Qwen3 reads text in Unicode's composed form."""
    assert b"".join(map(qwen3.bytes_of, qwen3.encode(text))) == normalize("NFC", text).encode()


def test_an_added_token_is_its_name(qwen3: Template) -> None:
    """As a client is shown it."""
    assert qwen3.bytes_of(qwen3.stop_ids[-1]) == b"<|im_end|>"


def test_every_byte_has_a_character() -> None:
    """256 of them, all different."""
    assert sorted(byte_alphabet().values()) == list(range(256))


@pytest.mark.parametrize(("token", "given_bytes"), [(0, b" one"), (1, b"\xe5"), (2, "é".encode())])
def test_sentencepiece_writes_bytes_and_spaces_its_own_way(token: int, given_bytes: bytes) -> None:
    """A byte as <0xE5>, a space as a low bar."""
    model = models.BPE(vocab={"\u2581one": 0, "<0xE5>": 1, "é": 2}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteFallback()  # pyright: ignore[reportAttributeAccessIssue] - the stub has no setter
    assert bytes_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer), token) == given_bytes
