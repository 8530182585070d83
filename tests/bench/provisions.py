"""What the bench needs on the machine before a test starts: the tokenizer and the harness binaries, or a sentence.

Invariant: it looks and installs nothing; what is missing fails the test with the make target that brings it.
"""

from __future__ import annotations

from pathlib import Path
from shutil import which

import pytest

from polar_train.small_models import cache_folder

ROOT = Path(__file__).parents[2]
HARNESS_BIN = ROOT / ".harness" / "node_modules" / ".bin"
"""Where `make harnesses` puts Node 24 and the harnesses that run on it."""
CLIENTS = ROOT / ".harness" / "clients"
"""Where it puts the clients that are written for the tests, and the packages that they need."""
_BINARIES = (HARNESS_BIN, ROOT / ".harness" / "mini-swe-agent" / "bin", CLIENTS)


def qwen3_tokenizer() -> Path:
    """The folder of the Qwen3 tokenizer."""
    return _present(cache_folder() / "qwen3-tokenizer", "make models")


def provided(name: str) -> Path:
    """The folder of a tokenizer, or of the chat templates, by its name in the cache."""
    return _present(cache_folder() / name, "make models")


def harness_binary(name: str) -> Path:
    """The pinned binary of a harness, of node, or of a client written for the tests."""
    found = next((folder / name for folder in _BINARIES if (folder / name).exists()), HARNESS_BIN / name)
    return _present(found, "make harnesses")


def nft() -> Path:
    """The program that redirects connections inside a namespace."""
    return _present(Path(which("nft") or "/usr/sbin/nft"), "apt-get install nftables")


def certifi_package() -> Path:
    """The certifi package of the client that trusts nothing else."""
    return _present(CLIENTS / "certifi", "make harnesses")


def _present(path: Path, remedy: str) -> Path:
    if not path.exists():
        pytest.fail(f"{path} is missing: run `{remedy}`", pytrace=False)
    return path
