"""The supervised stage: the log-likelihood of what the assistant says in `polar-toolkit export --format sft` lines.

    python examples/learn/sft.py BASE_MODEL SFT_LINES OUT

It is small on purpose: the model is to know the form of a call, and to get some of the questions right.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from polar_train import branches
from polar_train.data import Int_T, Mask_T, Row
from polar_train.forest import Layout, lay_out
from polar_train.model import load
from polar_train.optimizer import Optimizer
from polar_train.weights import save_checkpoint


def example(tokenizer: PreTrainedTokenizerBase, line: dict[str, Any]) -> Row:
    """The tokens of a conversation; what the assistant says, up to its end of turn, bears loss."""
    ids: list[int] = []
    mask: list[bool] = []

    messages = [_parsed(message) for message in line["messages"]]

    def render(upto: int, *, prompt: bool) -> list[int]:
        said = messages[:upto]
        text = tokenizer.apply_chat_template(said, tools=line["tools"], add_generation_prompt=prompt, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)

    for place, message in enumerate(line["messages"]):
        if message["role"] == "assistant":
            before, after = render(place, prompt=True), render(place + 1, prompt=False)
            end = len(after) - after[::-1].index(tokenizer.eos_token_id)
            mask += [False] * (len(before) - len(mask)) + [True] * (end - len(before))
            ids = after[:end]
    return _row(np.array(ids, np.int32), np.array(mask))


def _parsed(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments of calls as objects, which templates write as JSON themselves."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return message | {"tool_calls": calls} if calls else message


def _row(ids_T: Int_T, mask_T: Mask_T) -> Row:
    tokens = len(ids_T)
    zeros_T, ones_T = np.zeros(tokens, np.float32), np.ones(tokens, np.float32)
    return Row(
        input_ids_T=ids_T, position_ids_T=np.arange(tokens, dtype=np.int32), loss_mask_T=mask_T,
        old_logprobs_T=zeros_T, advantages_T=ones_T, temperature_T=ones_T,
        loss_weight_T=mask_T.astype(np.float32),
        lengths=np.array([tokens], np.int32), trajectory_ids=("",),
        session_ids=("",), group_ids=("",),
        versions_T=np.zeros(tokens, np.int32), version_names=("",),
    )  # fmt: skip


def step(model: PreTrainedModel, rows: list[Row]) -> float:
    """Adds the gradient of the mean negative log-likelihood of the rows' tokens; gives the loss."""
    tokens = sum(row.trained for row in rows)
    losses: list[float] = []

    def loss_of(logprobs_L: Tensor, _entropies_L: Tensor, _at_L: Tensor) -> Tensor:
        loss = -logprobs_L.sum() / tokens
        losses.append(loss.item())
        return loss

    for forest in lay_out(rows, Layout.TREE, 65536):
        branches.backward(model, forest, loss_of)
    return sum(losses)


def main() -> None:
    """Learn from all lines, a few at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("lines", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(a.base)
    rows = [example(tokenizer, json.loads(line)) for line in a.lines.read_text().splitlines()]
    model = load(a.base)
    optimizer = Optimizer(model, a.lr)
    dice = random.Random(a.seed)
    for epoch in range(1, a.epochs + 1):
        dice.shuffle(rows)
        for start in range(0, len(rows), a.batch):
            batch = rows[start : start + a.batch]
            loss = step(model, batch)
            optimizer.clip(1.0)
            optimizer.step()
            print(f"epoch {epoch}, {start + len(batch)} of {len(rows)}: loss {loss:.3f}", flush=True)
    save_checkpoint(model, a.base, a.out, {"stage": "supervised", "demos": len(rows), "epochs": a.epochs, "lr": a.lr})


if __name__ == "__main__":
    main()
