"""The bridge of templates that no typed renderer knows, and when it is off."""

from __future__ import annotations

import pytest

from polar_mitm.tokens import difference
from tests.mitm.tokens.chatml import CHATML, COUNTING, FORGETFUL, REFUSING, byte_tokenizer


@pytest.mark.parametrize(
    ("template", "works"), [(CHATML, True), (COUNTING, False), (FORGETFUL, False), (REFUSING, False)]
)
def test_the_bridge_works_only_where_a_longer_history_extends_a_shorter_one(template: str, *, works: bool) -> None:
    """A template that re-writes what stood before is found by the probe, and one that refuses it is no error."""
    assert difference.works(byte_tokenizer(template)) is works


def test_a_tokenizer_without_a_template_has_no_bridge() -> None:
    """A base model's tokenizer cannot render a conversation."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    assert not difference.works(tokenizer)


def test_the_suffix_is_what_follows_the_assistants_words() -> None:
    """The end of its turn, the new messages, and the head of its next turn."""
    tokenizer = byte_tokenizer()
    ids = difference.suffix_ids(tokenizer, [{"role": "user", "content": "and\n now?"}], None)
    assert tokenizer.decode(ids) == "<|im_end|>\n<|im_start|>user\nand\n now?<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == tokenizer.eos_token_id
