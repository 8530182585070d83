"""Fixtures of the tests of what is done with harnesses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.provisions import qwen3_tokenizer


@pytest.fixture
def qwen3_folder() -> Path:
    """The Qwen3 tokenizer's folder."""
    return qwen3_tokenizer()
