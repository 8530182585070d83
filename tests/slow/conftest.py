"""The engines of the slow tests: a real SGLang for each way of streaming and an embedded engine, on SmolLM2-135M."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_mitm.tokens import Template, load
from polar_train.small_models import fetch
from tests.bench.provisions import qwen3_tokenizer
from tests.sglang.server import embedded, sglang


@pytest.fixture(scope="session")
def qwen3() -> Template:
    """The Qwen3 template (`make models`)."""
    return load(qwen3_tokenizer())


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct (`make models`)."""
    return fetch("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def sglang_url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a real SGLang with its default, cumulative streams."""
    with sglang(smollm2, tmp_path_factory.mktemp("sglang") / "log") as url:
        yield url


@pytest.fixture(scope="session")
def sglang_incremental_url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a real SGLang that streams deltas, as `polar-train engine` starts it."""
    with sglang(smollm2, tmp_path_factory.mktemp("sglang") / "log", "--incremental-streaming-output") as url:
        yield url


@pytest.fixture(scope="session")
def embedded_url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of the embedded engine."""
    with embedded(smollm2, tmp_path_factory.mktemp("embedded") / "log") as url:
        yield url
