"""gpt-oss's encoding without a network, and its renderer under the template's own head."""

from __future__ import annotations

import os

import pytest
from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding

from polar_mitm.tokens import harmony
from tests.mitm.tokens.chatml import byte_tokenizer
from tests.mitm.tokens.families import CASES, tokenizer_of

GPT_OSS = next(case for case in CASES if case.family == "gpt-oss")


def test_the_encoding_is_made_from_the_models_own_tokenizer() -> None:
    """The library accepts the file by its hash, and nothing is left behind."""
    before = dict(os.environ)
    with harmony.vocabulary(tokenizer_of(GPT_OSS)):
        encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    assert encoding.encode("hi") == tokenizer_of(GPT_OSS).encode("hi", add_special_tokens=False)
    assert dict(os.environ) == before


def test_another_vocabulary_is_refused() -> None:
    """A tokenizer that only has the family's markers is not taken for it."""
    with harmony.vocabulary(byte_tokenizer()), pytest.raises(HarmonyError):
        load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
