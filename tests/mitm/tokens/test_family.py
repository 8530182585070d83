"""Which renderer speaks a template: found by what it renders, never by a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from renderers.base import load_tokenizer

from polar_mitm.tokens import Template, family
from tests.mitm.tokens.chatml import byte_tokenizer


def test_a_qwen3_folder_is_found_to_be_qwen3(qwen3: Template) -> None:
    """The folder's name says nothing: its template is compared with each typed renderer on probes."""
    assert qwen3.family == "qwen3"
    assert qwen3.bridges


@pytest.fixture(scope="module")
def fine_tune(qwen3_folder: Path) -> Any:
    """Qwen3's tokenizer under a template that says one word differently."""
    tokenizer: Any = load_tokenizer(str(qwen3_folder))
    assert "# Tools" in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace("# Tools", "# Functions")
    return tokenizer


def test_a_fine_tune_with_another_template_is_not_taken_for_its_base_model(fine_tune: Any) -> None:
    """The same vocabulary and special tokens under another template is another family."""
    assert family.find(fine_tune) == (None, "template")


def test_a_template_that_nobody_knows_has_no_family() -> None:
    """A tokenizer without any family's tokens is rendered by its own template."""
    assert family.find(byte_tokenizer()) == (None, "template")


def test_a_template_is_rendered_with_its_generation_prompt() -> None:
    """The ids end where the assistant begins."""
    tokenizer = byte_tokenizer()
    ids = family.by_template(tokenizer, [{"role": "user", "content": "hi"}], None)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
