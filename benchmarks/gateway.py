"""What the gateway costs: the same scripted answer taken from the engine itself and through the gateway, in one run.

Prints medians of interleaved rounds and their ratio; the limit is the engine alone, so the ratio is above 1.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from polar_mitm.tokens import load
from polar_train.small_models import fetch
from tests.bench.scripted_engine import ScriptedEngine
from tests.mitm.house import open_house

ROUNDS = 5
TEXT = "word " * 50


def main() -> None:
    folder = fetch("qwen3-tokenizer")
    engine = ScriptedEngine(folder, lambda _: TEXT)
    with engine.serving(), tempfile.TemporaryDirectory() as run:
        template = load(folder)
        with open_house(Path(run) / "run", engine.url, template, described=True) as house:
            prompt = template.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
            direct: dict[str, Any] = {
                "input_ids": prompt,
                "return_logprob": True,
                "stream": True,
                "sampling_params": {},
            }
            chat = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}
            with httpx.Client(trust_env=False, timeout=60) as client:
                for parallel in (1, 16):
                    row(
                        parallel,
                        lambda: client.post(
                            f"{engine.url}/generate", json=direct | {"rid": uuid4().hex}
                        ).raise_for_status(),
                        lambda: client.post(
                            f"http://127.0.0.1:{house.port}/v1/chat/completions", json=chat
                        ).raise_for_status(),
                    )


def row(parallel: int, engine: Callable[[], object], gateway: Callable[[], object]) -> None:
    engine(), gateway()
    rounds = [(timed(parallel, engine), timed(parallel, gateway)) for _ in range(ROUNDS)]
    alone, through = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(
        f"{parallel:2} at a time, 51 tokens, not streamed: engine {alone * 1e3:6.1f} ms a call, "
        f"through the gateway {through * 1e3:6.1f} ms, ratio {through / alone:.2f}"
    )


def timed(parallel: int, call: Callable[[], object]) -> float:
    """Seconds per call of 32 calls."""
    began = time.perf_counter()
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(lambda _: call(), range(32)))
    return (time.perf_counter() - began) / 32


if __name__ == "__main__":
    main()
