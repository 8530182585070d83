"""Forests: every path spells its trajectory, every trained token stands once, whatever is merged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_train.data import Row
from polar_train.forest import Forest, Layout, lay_out, requests, trajectories


def chain(ids, mask, name="t", seed=0) -> Row:
    """A row of one trajectory with figures of its own on the mask."""
    mask_T = np.array(mask, np.bool_)
    figures = np.random.default_rng([seed, *map(ord, name)]).uniform(0.1, 1, (3, len(ids))).astype(np.float32)
    old_T, advantages_T, weights_T = np.where(mask_T, figures, np.float32(0))
    positions_T, lengths = np.arange(len(ids), dtype=np.int32), np.array([len(ids)], np.int32)
    return Row(
        np.array(ids, np.int32), positions_T, mask_T, -old_T, advantages_T, np.ones(len(ids), np.float32), weights_T,
        lengths, (name,), (f"s-{name}",), ("g",), np.zeros(len(ids), np.int32), ("v1",),
    )  # fmt: skip


def path(forest: Forest, token: int) -> list[int]:
    """The tokens from the root to this one, by way of the parents."""
    found = []
    while token >= 0:
        found.append(token)
        token = int(forest.parent_T[token])
    return found[::-1]


def owned(forests: list[Forest]) -> list[tuple]:
    """Each token with loss: what stands before it and itself, and its figures."""
    return sorted(
        (tuple(forest.input_ids_T[path(forest, t)].tolist()), *_figures(forest, t))
        for forest in forests
        for t in np.flatnonzero(forest.loss_mask_T).tolist()
    )


def _figures(holder, t) -> tuple[float, ...]:
    return tuple(
        float(c[t]) for c in (holder.old_logprobs_T, holder.advantages_T, holder.loss_weight_T, holder.temperature_T)
    )


@st.composite
def chains(draw):
    """Up to eight trajectories over two tokens, so that beginnings are shared and sampled spans collide."""
    drawn = []
    for number in range(draw(st.integers(1, 8))):
        ids = draw(st.lists(st.integers(0, 1), min_size=2, max_size=12))
        mask = [False, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))]
        drawn.append(chain(ids, mask, f"t{number}"))
    return drawn


@settings(deadline=None, max_examples=300)
@given(chains(), st.sampled_from(Layout), st.sampled_from([5, 1000]))
def test_every_trained_token_stands_once_in_its_context(rows, layout, max_tokens):
    """Whatever is merged and however it is cut, the trained tokens with their contexts and figures are the same."""
    expected = sorted(
        (tuple(row.input_ids_T[: t + 1].tolist()), *_figures(row, t))
        for row in rows
        for t in np.flatnonzero(row.loss_mask_T).tolist()
    )
    assert owned(list(lay_out(rows, layout, max_tokens))) == expected


@settings(deadline=None, max_examples=300)
@given(chains(), st.sampled_from(Layout))
def test_the_order_is_depth_first(rows, layout):
    """Parents come first, depth grows by one, and the descendants of a token are the tokens up to its end."""
    for forest in lay_out(rows, layout, 1000):
        for t in range(len(forest)):
            parent = int(forest.parent_T[t])
            assert parent < t
            assert forest.position_T[t] == (forest.position_T[parent] + 1 if parent >= 0 else 0)
            above = [k for k in range(t + 1) if t < forest.end_T[k]]
            assert above == path(forest, t)


@settings(deadline=None, max_examples=200)
@given(chains(), st.sampled_from(Layout), st.integers(1, 4))
def test_nodes_are_the_forest_cut_at_branches(rows, layout, longest):
    """Nodes hold every token in order, are no longer than told, and are entered at their first token only."""
    for forest in lay_out(rows, layout, 1000):
        nodes = forest.nodes(longest)
        assert [t for node in nodes for t in range(node.a, node.b)] == list(range(len(forest)))
        assert max(node.b - node.a for node in nodes) <= longest
        for node in nodes:
            assert (forest.parent_T[node.a + 1 : node.b] == np.arange(node.a, node.b - 1)).all()
            last_parents = set(forest.parent_T.tolist()) & set(range(node.a, node.b))
            inside = {int(p) for t, p in enumerate(forest.parent_T) if not node.a < t < node.b} & last_parents
            assert inside <= {node.b - 1}


def test_a_group_with_one_prompt_on_paper():
    """Two samples of one prompt share it; a second trajectory of a session shares its first reply as well."""
    prompt = [1, 2, 3]
    rows = [
        chain([*prompt, 4, 5], [0, 0, 0, 1, 1], "a"),
        chain([*prompt, 4, 5, 6, 7], [0, 0, 0, 0, 0, 0, 1], "a-later"),
        chain([*prompt, 8], [0, 0, 0, 1], "b"),
    ]
    (tree,) = lay_out(rows, Layout.TREE, 100)
    assert tree.input_ids_T.tolist() == [1, 2, 3, 8, 4, 5, 6, 7]
    assert tree.parent_T.tolist() == [-1, 0, 1, 2, 2, 4, 5, 6]
    assert tree.end_T.tolist() == [8, 8, 8, 4, 8, 8, 8, 8]
    assert tree.loss_mask_T.tolist() == [False, False, False, True, True, True, False, True]


def test_two_samples_of_one_token_stay_two():
    """The same token sampled twice in the same context bears loss twice, with figures of its own."""
    rows = [chain([1, 2, 3], [0, 0, 1], "a"), chain([1, 2, 3], [0, 0, 1], "b")]
    (tree,) = lay_out(rows, Layout.TREE, 100)
    assert tree.input_ids_T.tolist() == [1, 2, 3, 3]
    assert tree.loss_mask_T.sum() == 2


@pytest.mark.parametrize(("layout", "tokens"), [("per_request", 3 + 5 + 3), ("packed", 5 + 3), ("tree", 6)])
def test_what_is_computed(layout, tokens):
    """A session of two calls and a sample beside it: each layout computes what its row of the table says."""
    rows = [chain([1, 2, 3, 4, 5], [0, 0, 1, 0, 1], "a"), chain([1, 2, 9], [0, 0, 1], "b")]
    assert sum(map(len, lay_out(rows, Layout(layout), 100))) == tokens


def test_a_forest_that_is_cut_keeps_whole_beginnings():
    """Each piece starts from its roots again, and holds no more than it may unless one trajectory does."""
    prompt = list(range(10))
    rows = [chain([*prompt, 20 + n, n], [0] * 10 + [0, 1], f"t{n}") for n in range(6)]
    pieces = list(lay_out(rows, Layout.TREE, 16))
    assert [len(piece) for piece in pieces] == [16, 16]
    assert all(piece.input_ids_T[:10].tolist() == prompt for piece in pieces)


def test_a_packed_row_falls_into_its_trajectories():
    """Splitting keeps every token, in order, and makes each position start at 0."""
    a, b = chain([1, 2, 3], [0, 1, 1], "a"), chain([4, 5], [0, 1], "b")
    joined = {
        name: np.concatenate([getattr(a, name), getattr(b, name)]) for name in Row.__slots__ if name.endswith("_T")
    }
    names = {"trajectory_ids": ("a", "b"), "session_ids": ("s-a", "s-b"), "group_ids": ("g", "g")}
    row = Row(**joined, **names, lengths=np.array([3, 2], np.int32), version_names=("v1",))
    parts = list(trajectories(row))
    assert [part.input_ids_T.tolist() for part in parts] == [[1, 2, 3], [4, 5]]
    assert [part.trajectory_ids for part in parts] == [("a",), ("b",)]
    assert [part.session_ids for part in parts] == [("s-a",), ("s-b",)]


def test_each_sampled_span_is_a_request():
    """A request ends with its span, and only that bears loss."""
    got = list(requests(chain([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])))
    assert [one.input_ids_T.tolist() for one in got] == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert [one.loss_mask_T.tolist() for one in got] == [[False, True, True], [False] * 4 + [True]]


def test_trajectories_without_loss_are_left_out():
    """What trains nothing is not computed."""
    assert list(lay_out([chain([1, 2], [0, 0])], Layout.TREE, 100)) == []
