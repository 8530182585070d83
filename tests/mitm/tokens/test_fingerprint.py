"""Fingerprints: the same for the same meaning of every id, and no other."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from polar_mitm.tokens.fingerprint import fingerprint
from tests.mitm.tokens.chatml import CHATML, COUNTING, byte_tokenizer


def test_it_starts_with_the_number_of_tokens() -> None:
    """For people, the first thing in which two vocabularies differ."""
    tokenizer = byte_tokenizer(CHATML)
    assert fingerprint(tokenizer).startswith(f"{len(tokenizer)}-")


def test_a_tokenizer_that_was_saved_and_loaded_has_its_fingerprint(tmp_path: Path) -> None:
    """However it was written down."""
    byte_tokenizer(CHATML).save_pretrained(tmp_path)
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert fingerprint(again) == fingerprint(byte_tokenizer(CHATML))


def test_the_chat_template_is_left_out() -> None:
    """It does not change what an id means."""
    assert fingerprint(byte_tokenizer(COUNTING)) == fingerprint(byte_tokenizer(CHATML))


def test_one_more_token_is_another_vocabulary() -> None:
    """Added tokens count."""
    tokenizer = byte_tokenizer(CHATML)
    before = fingerprint(tokenizer)
    tokenizer.add_tokens(["<more>"])
    assert fingerprint(tokenizer) != before


def test_two_tokens_that_changed_places_are_another_vocabulary() -> None:
    """The number of tokens is then the same."""

    class Swapped:
        """Two tokens."""

        def __init__(self, **ids: int) -> None:
            self._ids = ids

        def get_vocab(self) -> dict[str, int]:
            """As transformers names it."""
            return self._ids

    assert fingerprint(Swapped(a=0, b=1)) != fingerprint(Swapped(a=1, b=0))
