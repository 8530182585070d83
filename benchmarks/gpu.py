"""What the layouts cost on a GPU: step time, memory and correctness of FlexAttention, on random Qwen3 models.

Prints each correctness figure with its limit, then a table of times, then the same as JSON lines. Without CUDA (or with
`--cpu`) a small size runs on the CPU, where forests are computed node by node: that shows that the script runs and that
its gradients are right, and says nothing of a GPU. Times are of the gradient, without the optimizer's update, which
costs every layout the same. On a GPU it ends within ten minutes: a layout that takes longer than its share is measured
for so long and its time is taken to grow with its tokens, which the table marks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.stage.figures import Figure
from polar_train import branches, flex
from polar_train.data import Row
from polar_train.forest import Forest, Layout, lay_out
from polar_train.model import token_logprobs

CONSOLE = Console(width=None if sys.stdout.isatty() else 150)
Backward = Callable[[PreTrainedModel, Forest, branches.LossOf], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """A group: sessions that share a prompt, each of several calls."""

    name: str
    prompt: int
    calls: int
    sessions: int
    drawn: int = 120
    """Tokens sampled in a call."""
    seen: int = 250
    """Tokens of the observation behind them."""

    def rows(self, vocabulary: int) -> list[Row]:
        """Its sessions with random tokens and advantages, the same ones each time."""
        rng = np.random.default_rng(0)
        prompt = rng.integers(0, vocabulary, self.prompt)
        turn = [True] * self.drawn + [False] * self.seen
        mask_T = np.array([False] * self.prompt + turn * self.calls)[: -self.seen or None]
        weight = 1 / (self.sessions * mask_T.sum())
        return [
            _row(
                np.concatenate([prompt, rng.integers(0, vocabulary, len(mask_T) - self.prompt)]), mask_T, number, weight
            )
            for number in range(self.sessions)
        ]


@dataclass(frozen=True, slots=True)
class Size:
    """A Qwen3 by its figures."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int = 8
    head: int = 128
    vocabulary: int = 151_936

    def model(self, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """It with random weights, larger than usual so that attention matters."""
        config = Qwen3Config(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.inner,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.groups,
            head_dim=self.head, initializer_range=0.05, tie_word_embeddings=True, max_position_embeddings=40_960,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            return Qwen3ForCausalLM(config).to(dtype).train()


SIZES = {
    "0.6B": Size("0.6B", 1024, 3072, 28, 16),
    "1.7B": Size("1.7B", 2048, 6144, 28, 16),
    "4B": Size("4B", 2560, 9728, 36, 32),
    "small": Size("small", 64, 128, 2, 4, groups=2, head=16, vocabulary=512),
}
SHAPES = (Shape("short prompt", 1_400, 8, 8), Shape("long prompt", 8_000, 8, 8))
SMALL = Shape("small", 120, 3, 3, drawn=8, seen=12)
CHECKED = Shape("checked", 600, 3, 3, drawn=60, seen=90)
"""What gradients are compared on, beside `SMALL`, which is also what kernels are compiled on."""
ROW_TOKENS = 32_768
"""Of one forest."""
SHARE = 20.0
"""Seconds after which a layout is not measured any further."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one layout of one group cost one model."""

    model: str
    shape: str
    way: str
    tokens: int
    """Computed, those that are computed again not counted again."""
    seconds: float
    peak_gib: float | None
    """Of GPU memory, with weights and their gradients; None on a CPU."""
    measured: float
    """Share of the tokens that was measured; the seconds are scaled up from it."""


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="a small size on the CPU")
    parser.add_argument("--quick", action="store_true", help="the small size, wherever it runs")
    parser.add_argument("--models", default="0.6B,1.7B,4B", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--out", type=Path, help="a file for the JSON lines, which are printed anyway")
    told = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() and not told.cpu else "cpu")
    small = told.quick or device.type == "cpu"
    lines = [_machine(device)]
    CONSOLE.print(lines[0])
    if device.type == "cpu":
        CONSOLE.print("This is a CPU: forests go node by node, and FlexAttention does not run. No figure is of a GPU.")
    size, shape = (SIZES["small"], SMALL) if small else (SIZES["0.6B"], CHECKED)
    lines += [asdict(figure) for figure in _checks(size, shape, device)]
    names, shapes = (["small"], (SMALL,)) if small else (told.models.split(","), SHAPES)
    costs = list(_costs(names, shapes, device))
    CONSOLE.print(_table(costs))
    lines += [asdict(cost) for cost in costs]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if told.out:
        told.out.write_text(text)


def _machine(device: torch.device) -> dict[str, object]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "row_tokens": ROW_TOKENS}


def _ways(device: torch.device) -> dict[str, tuple[Layout, Backward]]:
    """Each layout as it is computed on this device, cheapest first."""
    if device.type == "cpu":
        return {str(layout): (layout, branches.backward) for layout in reversed(Layout)}
    one_pass = {f"{layout}, FlexAttention": (layout, flex.backward) for layout in reversed(Layout)}
    return {**one_pass, "tree, node by node": (Layout.TREE, branches.backward)}


# --- correctness --------------------------------------------------------------------------------------------------


def _checks(size: Size, shape: Shape, device: torch.device) -> Iterator[Figure]:
    """Gradients against those of plain passes in float32, a trajectory each."""
    for figure in _checked(size, shape, device):
        CONSOLE.print(f"{figure.name}: {figure.value:.3g} {figure.bound}", figure.verdict)
        yield figure


def _checked(size: Size, shape: Shape, device: torch.device) -> Iterator[Figure]:
    rows = shape.rows(size.vocabulary)
    model = size.model(device, torch.float32)
    true = _plain(model, rows)
    for name, (layout, backward) in _ways(device).items():
        yield Figure(f"{name}, float32: gradient error", _apart(_grown(model, rows, layout, backward), true), 1e-3, "")
    AttentionInterface.register("causal", flex.attention(_causal))
    wrong = _grown(model, rows, Layout.TREE, lambda *given: flex.backward(*given, attention="causal"))
    yield Figure("control, branches that see each other: gradient error", _apart(wrong, true), 0.05, "", least=True)
    if device.type == "cuda":
        yield Figure("probe against node by node: logprob gap", flex.probe(model), 1e-3, "nats")
    model = model.to(torch.bfloat16)  # pyright: ignore[reportArgumentType]  (transformers mistypes `to`)
    rounded = _apart(_plain(model, rows), true)
    yield Figure("plain passes, bfloat16: gradient error", rounded, None, "")
    for name, (layout, backward) in _ways(device).items():
        got = _grown(model, rows, layout, backward)
        yield Figure(f"{name}, bfloat16: gradient error", _apart(got, true), 1.5 * rounded, "")
        cosine = torch.nn.functional.cosine_similarity(got, true, dim=0).item()
        yield Figure(f"{name}, bfloat16: cosine with the float32 gradient", cosine, 0.95, "", least=True)


def _causal(query: Tensor, key: Tensor, value: Tensor, *, block_mask: object, enable_gqa: bool) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=enable_gqa)


def _apart(got: Tensor, true: Tensor) -> float:
    return ((got - true).norm() / true.norm()).item()


def _plain(model: PreTrainedModel, rows: list[Row]) -> Tensor:
    """The gradient from a pass for each trajectory, on the attention that the model came with."""
    total = _Gradient(model)
    for row in rows:
        at = np.flatnonzero(row.loss_mask_T)
        columns = (row.input_ids_T.astype(np.int64), row.position_ids_T.astype(np.int64))
        ids_T, positions_T, mask_T, temperature_T, factor_L = (
            torch.from_numpy(column).to(model.device)
            for column in (*columns, row.loss_mask_T, row.temperature_T, (row.loss_weight_T * row.advantages_T)[at])
        )
        (-(token_logprobs(model, ids_T, positions_T, mask_T, temperature_T) * factor_L).sum()).backward()
        total.take()
    return total.flat


def _grown(model: PreTrainedModel, rows: list[Row], layout: Layout, backward: Backward) -> Tensor:
    """The same from forests."""
    total = _Gradient(model)
    for forest in lay_out(rows, layout, ROW_TOKENS):
        backward(model, forest, _loss(forest, model.device))
        total.take()
    return total.flat


def _loss(forest: Forest, device: torch.device) -> branches.LossOf:
    """A policy gradient at ratio 1."""
    factor_T = torch.from_numpy(forest.loss_weight_T * forest.advantages_T).to(device)
    return lambda logprobs_L, _entropies_L, at_L: -(logprobs_L * factor_T[at_L]).sum()


class _Gradient:
    """A gradient that adds up in float32, whatever the model computes in."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._parameters = list(model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in self._parameters), device=model.device)

    def take(self) -> None:
        """Add the model's gradient, and clear it there."""
        begin = 0
        for parameter in self._parameters:
            if parameter.grad is not None:
                self.flat[begin : begin + parameter.numel()] += parameter.grad.flatten()
            parameter.grad = None
            begin += parameter.numel()


# --- cost ---------------------------------------------------------------------------------------------------------


def _costs(names: list[str], shapes: tuple[Shape, ...], device: torch.device) -> Iterator[Cost]:
    for size in (SIZES[name] for name in names):
        model = size.model(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
        for way, (layout, backward) in _ways(device).items():
            _measure(model, list(lay_out(SMALL.rows(size.vocabulary), layout, ROW_TOKENS)), backward)  # compiles
            for shape in shapes:
                forests = list(lay_out(shape.rows(size.vocabulary), layout, ROW_TOKENS))
                seconds, peak, share = _measure(model, forests, backward)
                cost = Cost(size.name, _said(shape), way, sum(map(len, forests)), seconds, peak, share)
                CONSOLE.print(f"{cost.model}, {shape.name}, {way}: {cost.tokens} tokens, {cost.seconds:.3f} s")
                yield cost


def _measure(model: PreTrainedModel, forests: list[Forest], backward: Backward) -> tuple[float, float | None, float]:
    """Seconds for all forests, peak memory in GiB, and the share of their tokens that was measured."""
    cuda = model.device.type == "cuda"
    model.zero_grad(set_to_none=True)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begin, done, spent = time.perf_counter(), 0, 0.0
    for forest in forests:
        backward(model, forest, _loss(forest, model.device))
        if cuda:
            torch.cuda.synchronize()
        done, spent = done + len(forest), time.perf_counter() - begin
        if spent > SHARE:
            break
    share = done / sum(map(len, forests))
    return spent / share, torch.cuda.max_memory_allocated() / 2**30 if cuda else None, share


def _said(shape: Shape) -> str:
    return (
        f"{shape.name}: P={shape.prompt} T={shape.calls} G={shape.sessions}, {shape.drawn} sampled, {shape.seen} seen"
    )


def _table(costs: list[Cost]) -> Table:
    """Beside each time, how often the first way of the same group goes into it."""
    table = Table("model", "group", "way", "tokens", "s", "times", "tokens/s", "peak GiB", "measured", title="gradient")
    for cost in costs:
        base = next(other for other in costs if (other.model, other.shape) == (cost.model, cost.shape))
        peak = "" if cost.peak_gib is None else f"{cost.peak_gib:.1f}"
        times, rate = f"{cost.seconds / base.seconds:.2f}", f"{cost.tokens / cost.seconds:,.0f}"
        seen = (f"{cost.tokens:,}", f"{cost.seconds:.3f}", times, rate, peak, f"{cost.measured:.0%}")
        table.add_row(cost.model, cost.shape, cost.way, *seen)
    return table


def _row(ids: np.ndarray, mask_T: np.ndarray, number: int, weight: float) -> Row:
    tokens = len(ids)
    ones_T = np.ones(tokens, np.float32)
    return Row(
        input_ids_T=ids.astype(np.int32),
        position_ids_T=np.arange(tokens, dtype=np.int32),
        loss_mask_T=mask_T,
        old_logprobs_T=-ones_T * mask_T,
        advantages_T=(-1.0) ** number * ones_T * mask_T,
        temperature_T=ones_T,
        loss_weight_T=(weight * mask_T).astype(np.float32),
        lengths=np.array([tokens], np.int32),
        trajectory_ids=(f"t{number}",),
        session_ids=(f"s{number}",),
        group_ids=("g",),
        versions_T=np.zeros(tokens, np.int32),
        version_names=("default",),
    )


if __name__ == "__main__":
    main()
