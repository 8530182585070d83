"""The model folder that the embedded engine serves: its model, tokenizer, limits and running batch.

Invariant: weights are exchanged only for weights of the same shape, so the limits told to clients stay true.
Not here: requests and HTTP.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import llguidance.hf
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from polar_train.kv import load_model
from polar_train.scheduler import Scheduler

CACHE_TOKENS = 32768
"""Bound of the prefix cache; with SmolLM2-135M 1.5 GB."""

SHAPE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
"""Fields of a model's configuration that new weights may not change."""


class Engine:
    """A model folder being served: tokenizer, limits and the scheduler. `close` ends its thread."""

    def __init__(
        self, folder: Path, *, weight_version: str = "default", max_batch: int = 16, incremental: bool = False
    ) -> None:
        model = load_model(folder)
        self.folder = self.weights = folder
        """Where tokenizer and limits came from, and where the weights of today."""
        self.tokenizer = cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(folder, local_files_only=True))
        self.config = model.config
        self.vocab_size: int = model.config.vocab_size
        self.context_length: int = model.config.max_position_embeddings
        self.end_ids = _end_ids(self.tokenizer, model.config, model.generation_config)
        self.incremental = incremental
        self.grammars = llguidance.hf.from_tokenizer(
            self.tokenizer, n_vocab=max(self.vocab_size, len(self.tokenizer)), eos_token=sorted(self.end_ids)
        )
        self.started = time.time()
        self.rids: set[str] = set()
        """The requests being answered."""
        self.scheduler = Scheduler(model, weight_version, max_batch=max_batch, cache_tokens=CACHE_TOKENS)

    def load_alike(self, folder: Path) -> PreTrainedModel:
        """The model in `folder`. Raises OSError or ValueError unless it is whole and shaped like the served one."""
        if not folder.is_dir():
            raise OSError(f"{str(folder)!r} is not a folder")
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        for name in SHAPE:
            old, new = getattr(self.config, name, None), getattr(config, name, None)
            if old != new:
                raise ValueError(f"{name} is {new!r} there and {old!r} in the served model")
        return load_model(folder)

    def close(self) -> None:
        """Abort what runs and end the model thread."""
        self.scheduler.close()


def _end_ids(tokenizer: PreTrainedTokenizerFast, *configs: Any) -> frozenset[int]:  # Any: transformers' config classes
    """The ids that end an output, from the tokenizer and both configurations of the folder."""
    found: set[int] = set()
    for value in (tokenizer.eos_token_id, *(config.eos_token_id for config in configs)):
        found.update(cast(list[int], [value] if isinstance(value, int) else value or []))
    return frozenset(found)
