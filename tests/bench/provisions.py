"""What the bench needs on the machine before a test starts: the tokenizer and the harness binaries, or a sentence.

Invariant: it looks and installs nothing; what is missing fails the test with the make target that brings it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_train.small_models import cache_folder

ROOT = Path(__file__).parents[2]
HARNESS_BIN = ROOT / ".harness" / "node_modules" / ".bin"
"""Where `make harnesses` puts Node 24 and the harnesses."""


def qwen3_tokenizer() -> Path:
    """The folder of the Qwen3 tokenizer."""
    return _present(cache_folder() / "qwen3-tokenizer", "make models")


def harness_binary(name: str) -> Path:
    """The pinned binary of a harness (or node)."""
    return _present(HARNESS_BIN / name, "make harnesses")


def _present(path: Path, remedy: str) -> Path:
    if not path.exists():
        pytest.fail(f"{path} is missing: run `{remedy}`", pytrace=False)
    return path
