"""Which renderer speaks a template: found by what it reads and writes, never by a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from renderers.base import load_tokenizer

from polar_mitm.tokens import Template, family
from polar_mitm.tokens.chat_template import ChatTemplate
from tests.mitm.tokens.chatml import byte_tokenizer


def test_a_qwen3_folder_is_found_to_be_qwen3(qwen3: Template) -> None:
    """The folder's name says nothing: its template is compared with each typed renderer on scripted steps."""
    assert qwen3.family == "qwen3"
    assert qwen3.bridge_kind == "typed"
    assert qwen3.found.renders


@pytest.fixture(scope="module")
def fine_tune(qwen3_folder: Path) -> Any:
    """Qwen3's tokenizer under a template that says one word of its head differently."""
    tokenizer: Any = load_tokenizer(str(qwen3_folder))
    assert "# Tools" in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace("# Tools", "# Functions")
    return tokenizer


def test_a_fine_tune_with_another_head_is_rendered_by_its_own_template(fine_tune: Any) -> None:
    """Turns and calls are its base model's, so they are read and bridged as such; whole prompts are its own."""
    found = family.find(fine_tune, ChatTemplate(fine_tune))
    assert found.name == "qwen3"
    assert found.bridges
    assert not found.renders
    assert "renders differently: a call, then its result" in found.reason


def test_a_fine_tune_with_other_calls_is_not_taken_for_its_base_model(fine_tune: Any) -> None:
    """The same vocabulary under another call syntax is another family."""
    tokenizer = fine_tune
    tokenizer.chat_template = tokenizer.chat_template.replace('{"name": "', '{"call": "')
    found = family.find(tokenizer, ChatTemplate(tokenizer))
    assert found.renderer is None
    assert "reads the template's replies differently" in found.reason


def test_a_template_that_says_no_calls_has_no_family() -> None:
    """Texts alone do not tell families apart; the reason is known."""
    tokenizer = byte_tokenizer()
    found = family.find(tokenizer, ChatTemplate(tokenizer))
    assert (found.renderer, found.name) == (None, "template")
    assert "says no tool calls" in found.reason


def test_the_names_of_families_are_the_librarys() -> None:
    """Only the families with a renderer of their own."""
    assert {"qwen3", "llama-3", "gpt-oss", "gemma4", "kimi-k2"} <= set(family.names())
    assert not {"auto", "default", "custom"} & set(family.names())
