"""How a forest goes through a model: which way is taken, and that the ways agree."""

import pytest
import torch

from polar_train import branches, flex, passes
from polar_train.data import read_batches
from polar_train.forest import Layout
from polar_train.model import load

CPU = torch.device("cpu")
ROW_TOKENS = 65536


def test_a_model_that_cannot_be_cut_gets_whole_sequences(sliding_model, tiny_model, write, draw):
    """What they share stands in each of them, and a node is as long as its trajectory."""
    drawn = draw(300, 140)
    drawn[1].ids[:40] = drawn[0].ids[:40]
    rows = read_batches(write(drawn))
    whole, tree = (
        passes.grow(rows, load(folder, CPU), Layout.TREE, ROW_TOKENS)[0] for folder in (sliding_model, tiny_model)
    )
    assert (len(whole), len(tree)) == (440, 400)
    assert sorted(node.b - node.a for node in whole.nodes(len(whole))) == [140, 300]


@pytest.mark.parametrize("open_to_it", [True, False])
def test_flex_attention_is_taken_where_it_is_open(open_to_it, tiny_model, write, draw, monkeypatch):
    """Both for the gradient and for logprobs alone, which is what `gap` asks for."""
    model = load(tiny_model, CPU)
    (forest,) = passes.grow(read_batches(write(draw(60))), model, Layout.TREE, ROW_TOKENS)
    taken: list[str] = []
    for way in (flex, branches):
        name = way.__name__.rpartition(".")[2]
        for what in ("backward", "logprobs"):
            monkeypatch.setattr(
                way, what, lambda *_given, name=name, what=what, **_more: taken.append(f"{name}.{what}")
            )
    monkeypatch.setattr(flex, "applies", lambda _model: open_to_it)
    passes.backward(model, forest, lambda logprobs, _entropies, _at: logprobs.sum())
    passes.logprobs(model, forest)
    name = "flex" if open_to_it else "branches"
    assert taken == [f"{name}.backward", f"{name}.logprobs"]
