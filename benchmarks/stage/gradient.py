"""What one gradient of a recorded batch costs in one layout: tokens, pairs, CPU seconds and peak memory.

A process of its own for each, so that no layout finds memory or caches of another. Prints one line of JSON. The model
is random, of SmolLM2-135M's shape with few of its layers and as small a part of its vocabulary, so that the parts of a
token's cost keep their shares. Invariant: the gradient is that of the trainer's own code, and one thread makes it.
`python -m benchmarks.stage.gradient BATCH LAYOUT --sessions N`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.stage.processes import ROOT, Process
from polar_train.data import read_batches
from polar_train.forest import Forest, Layout, lay_out, trajectories
from polar_train.grpo import Settings, backward

_LAYERS, _VOCABULARY = 30, 49_152
"""SmolLM2-135M's."""
_ROW_TOKENS = 1_000_000
"""A group is one forest."""
_GIVING_BACK = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072:glibc.malloc.trim_threshold=131072:glibc.malloc.arena_max=1",
}
"""malloc returns what is freed; else the peak is of what it keeps, too: of one and the same pass 404 to 521 MB."""
PASS_TOKENS = 4096
"""Twice the trainer's default: in each layout fewer tokens are computed twice, for twice the memory."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one gradient."""

    sessions: int
    tokens: int
    """Computed, without what is computed again to save memory."""
    pairs: int
    """Of a token and one that it attends to."""
    cpu_s: float
    peak_mb: float
    """Above the model, its gradient and the batch."""
    norm: float
    """Of the gradient."""


def measured(
    batch: Path, layout: Layout, *, sessions: int, layers: int = 1, width: int = 576, memory: bool = False
) -> Cost:
    """The cost in a process of its own: its CPU seconds, or exactly its memory, which costs seconds."""
    words = [str(batch), layout.value, f"--sessions={sessions}", f"--layers={layers}", f"--width={width}"]
    command = [sys.executable, "-m", "benchmarks.stage.gradient", *words]
    told = os.environ | (_GIVING_BACK if memory else {})
    done = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def _cost(batch: Path, layout: Layout, sessions: int, model: PreTrainedModel) -> Cost:
    forests = _forests(batch, layout, sessions, model.config.get_text_config().vocab_size)
    _gradient(model, [_beginning(forests[0])])  # what is made on first use, the gradients' own memory with it
    model.zero_grad(set_to_none=False)
    process = Process(os.getpid(), 0)
    process.forget_peak()
    resident, began = process.memory(), time.process_time()
    _gradient(model, forests)
    cpu = time.process_time() - began
    return Cost(
        sessions=sessions,
        tokens=sum(map(len, forests)),
        pairs=sum(int((forest.position_T.astype(np.int64) + 1).sum()) for forest in forests),
        cpu_s=cpu,
        peak_mb=process.memory("VmHWM") - resident,
        norm=float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()),
    )


def _forests(batch: Path, layout: Layout, sessions: int, vocabulary: int) -> list[Forest]:
    """Laid out by their true tokens; which of the model's few tokens one becomes costs nothing."""
    chains = islice((chain for row in read_batches(batch) for chain in trajectories(row)), sessions)
    laid = lay_out(chains, layout, _ROW_TOKENS)
    return [replace(forest, input_ids_T=forest.input_ids_T % vocabulary) for forest in laid]


def _beginning(forest: Forest, count: int = 64) -> Forest:
    parts = {name: getattr(forest, name)[:count].copy() for name in Forest.__slots__}
    parts["end_T"] = np.minimum(parts["end_T"], count)
    parts["loss_mask_T"][-1] = parts["advantages_T"][-1] = parts["loss_weight_T"][-1] = 1
    return Forest(**parts)


def _gradient(model: PreTrainedModel, forests: list[Forest]) -> None:
    for forest in forests:
        backward(model, forest, Settings(pass_tokens=PASS_TOKENS))


def _model(layers: int, width: int) -> PreTrainedModel:
    torch.manual_seed(0)
    heads = width // 64
    config = LlamaConfig(
        vocab_size=_VOCABULARY * layers // _LAYERS, hidden_size=width, intermediate_size=width * 8 // 3,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 3, tie_word_embeddings=True,
        max_position_embeddings=131_072,
    )  # fmt: skip
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batch", type=Path)
    parser.add_argument("layout", type=Layout)
    parser.add_argument("--sessions", type=int, required=True, help="how many of the batch's, from its first")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=576, help="of the model, a multiple of 192")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cost = _cost(given.batch, given.layout, given.sessions, _model(given.layers, given.width))
    sys.stdout.write(json.dumps(asdict(cost)) + "\n")
