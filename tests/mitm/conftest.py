"""What the tests of the proxy share: one loaded template, and hypothesis without deadlines on a busy machine."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import settings

from polar_mitm.tokens import Template, load
from tests.bench.provisions import qwen3_tokenizer
from tests.mitm.tokens.chatml import byte_tokenizer

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    """The folder of the Qwen3 tokenizer."""
    return qwen3_tokenizer()


@pytest.fixture(scope="session")
def qwen3(qwen3_folder: Path) -> Template:
    """The Qwen3 template, loaded once: reading it takes seconds."""
    template = load(qwen3_folder)
    gc.freeze()  # it lives to the end: a collection that walks it takes a second, and tests make many
    return template


@pytest.fixture(scope="session")
def bytes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of one id for each byte, for programs that load one when they start."""
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer().save_pretrained(str(folder))
    return folder
