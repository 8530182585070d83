"""A tiny real model with a byte tokenizer, and batches written by the public contract."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from polar_train.metrics import Record

VOCABULARY = 320

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("position_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("old_logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.string())),
        ("temperature", pa.list_(pa.float32())),
        ("loss_weight", pa.list_(pa.float32())),
        ("session_ids", pa.list_(pa.string())),
        ("group_ids", pa.list_(pa.string())),
        ("trajectory_ids", pa.list_(pa.string())),
        ("lengths", pa.list_(pa.int32())),
    ]
)


@dataclass
class Trajectory:
    """A trajectory as a test writes it down: token ids, mask, and per-token figures on the mask."""

    ids: np.ndarray
    mask: np.ndarray
    old: np.ndarray
    advantage: float = 1.0
    temperature: float = 1.0
    name: str = "t0"


Write = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random two-layer Qwen3 in Hugging Face format, with weights large enough that attention matters."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


@pytest.fixture(scope="session")
def sliding_model(tiny_model, tmp_path_factory) -> Path:
    """The tiny model with a sliding window in its second layer."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("models") / "sliding")
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    config["layer_types"] = ["full_attention", "sliding_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def draw() -> Callable[..., list[Trajectory]]:
    """Draws trajectories of given lengths: random ids, two sampled spans, random old logprobs and advantages."""

    def make(*lengths: int, seed: int = 0, temperature: float = 1.0) -> list[Trajectory]:
        rng = np.random.default_rng(seed)
        drawn = []
        for index, length in enumerate(lengths):
            mask = np.zeros(length, np.uint8)
            mask[max(length // 3, 1) : length // 2] = 1
            mask[-max(length // 5, 1) :] = 1
            drawn.append(
                Trajectory(
                    ids=rng.integers(0, VOCABULARY, length, dtype=np.int32),
                    mask=mask,
                    old=rng.uniform(-9, -4, length).astype(np.float32),
                    advantage=float(rng.normal()),
                    temperature=temperature,
                    name=f"t{index}",
                )
            )
        return drawn

    return make


@pytest.fixture(scope="session")
def as_batch() -> Callable[..., pa.Table]:
    """Packs each list of trajectories into a row by the batch contract; each trained token counts alike."""

    def make(*rows: list[Trajectory]) -> pa.Table:
        trained = sum(int(one.mask.sum()) for row in rows for one in row)
        return pa.Table.from_pylist([_row(row, trained) for row in rows], schema=SCHEMA)

    return make


@pytest.fixture
def write(tmp_path, as_batch) -> Write:
    """Writes rows of trajectories as a batch folder and gives its path."""

    def make(*rows: list[Trajectory], folder: str = "batches") -> Path:
        target = tmp_path / folder
        target.mkdir(exist_ok=True)
        pq.write_table(as_batch(*rows), target / "00000.parquet")
        return target

    return make


@pytest.fixture(scope="session")
def record() -> Callable[..., Record]:
    """Makes the record of a step; any figure can be told."""
    plain = Record(
        step=1, batch="batch-00001.parquet", version="", at=1000.0, seconds=40.0, reward_mean=0.25, sessions=16,
        groups=4, dead_groups=1, loss=-0.0125, grad_norm=0.5, ratio_mean=1.0, clip_share=0.01, kl_mean=0.0,
        entropy_mean=1.25, gap_mean=3e-6, gap_max=4e-5, lag_mean=0.5, lag_max=1, tokens_beyond_lag=0,
        tokens_trained=12000, tokens_computed=45000, tokens_per_second=300.0, idle_s=0.75,
    )  # fmt: skip

    def make(step: int, **told: object) -> Record:
        return replace(plain, step=step, version=f"step-{step:06d}", **told)

    return make


def _row(row: list[Trajectory], trained: int) -> dict:
    def over(value) -> np.ndarray:
        return np.concatenate([np.where(one.mask == 1, value(one), 0) for one in row]).astype(np.float32)

    masks = np.concatenate([one.mask for one in row])
    return {
        "input_ids": np.concatenate([one.ids for one in row]),
        "position_ids": np.concatenate([np.arange(len(one.ids), dtype=np.int32) for one in row]),
        "loss_mask": masks,
        "old_logprobs": over(lambda one: one.old),
        "advantages": over(lambda one: one.advantage),
        "versions": ["v1" if marked else "" for marked in masks],
        "temperature": np.where(
            masks == 1, np.concatenate([np.full(len(o.ids), o.temperature) for o in row]), 1.0
        ).astype(np.float32),
        "loss_weight": over(lambda _one: 1 / max(trained, 1)),
        "session_ids": [f"s-{one.name}" for one in row],
        "group_ids": ["g" for _ in row],
        "trajectory_ids": [one.name for one in row],
        "lengths": np.array([len(one.ids) for one in row], np.int32),
    }


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)} | {"<end>": len(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
