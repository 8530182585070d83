"""What holds for every session: random trees of calls, forks, retries, several choices, drift, kinds, cut-offs.

The generator knows each call's whole prompt and output; everything is checked against these, by code that shares
nothing with the tree. A sampled token is told by its log-probability, which no other token has.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar_toolkit import trajectories
from polar_toolkit.trajectories import to_table
from polar_toolkit.tree import Policy, grow

PLACES = 64
"""More than the longest output."""

COLUMNS = st.sampled_from(
    [
        {}, {}, {}, {}, {"status": "aborted"}, {"status": "failed"}, {"kind": "auxiliary"}, {"kind": "subagent"},
        {"client_delivered": False}, {"thread_id": "t"}, {"trainable": False, "untrainable_reason": "greedy"},
    ]
)  # fmt: skip


@dataclass
class Session:
    """What was sent and sampled, by (call, choice)."""

    prompts: dict = field(default_factory=dict)
    outputs: dict = field(default_factory=dict)
    """Without what was sampled behind a stop string."""
    columns: dict = field(default_factory=dict)

    def token(self, logprob):
        """The call, choice and position of the sampled token with this log-probability."""
        serial, place = divmod(round(-float(logprob) * PLACES), PLACES)
        return list(self.prompts)[serial - 1], place


@dataclass
class Drawn:
    """One call as drawn."""

    way: str
    """root, go on from an earlier call, or repeat its prompt."""
    parent: int
    cut: int
    """How many tokens of the parent's prompt + output the prompt leaves out."""
    context: list
    outputs: list
    """One a choice."""
    after_stop: int
    stored: bool
    """Whether the row names its parent."""
    hashed: bool
    columns: dict


@st.composite
def sessions(draw, tokens):
    """Calls in the order in which they were made."""
    ways = st.sampled_from(["root", "go on", "go on", "go on", "go on", "repeat"])
    return [
        Drawn(
            way=draw(ways) if number else "root",
            parent=draw(st.integers(0, max(0, number - 1))),
            cut=draw(st.sampled_from([0, 0, 0, 0, 1, 2, 3, 5])),
            context=draw(st.lists(tokens, min_size=1, max_size=3)),
            outputs=draw(st.lists(st.lists(tokens, max_size=4), min_size=1, max_size=draw(st.sampled_from([1, 1, 3])))),
            after_stop=draw(st.sampled_from([0, 0, 0, 1, 2])),
            stored=draw(st.booleans()),
            hashed=draw(st.booleans()),
            columns=draw(COLUMNS),
        )
        for number in range(draw(st.integers(1, 12)))
    ]


def written(book, drawn, *, distinct=False):
    """Record a drawn session in a book. With `distinct`, every sampled token has an id of its own."""
    session = Session()
    for number, one in enumerate(drawn):
        name, parent = f"c{number}", _of(session, drawn, one)
        prompt = _prompt(session, one, parent)
        for choice, output in enumerate(one.outputs):
            key, serial = (name, choice), len(session.prompts) + 1
            sampled = [1000 * serial + place for place in range(len(output))] if distinct else output
            session.prompts[key], session.outputs[key], session.columns[key] = prompt, sampled, one.columns
            behind = [5] * one.after_stop
            logprobs = -(serial + np.arange(len(sampled) + len(behind)) / PLACES)
            names = parent if one.stored and one.way == "go on" else None
            book.call(
                name, prompt, [*sampled, *behind], choice=choice, parent=names,
                logprobs=logprobs.astype(np.float32), kept_len=len(sampled) if behind else None,
                **({} if one.hashed else {"prompt_hash": None}), **one.columns,
            )  # fmt: skip
            book.tips[key] = np.array([*prompt, *sampled], np.int32)
    return session


def _of(session, drawn, one):
    """The call that is gone on from or repeated, by its first or last choice."""
    choice = one.cut % len(drawn[one.parent].outputs)
    return None if one.way == "root" else (f"c{one.parent}", choice)


def _prompt(session, one, parent):
    if one.way == "root":
        return one.context
    if one.way == "repeat":
        return session.prompts[parent]
    tip = [*session.prompts[parent], *session.outputs[parent]]
    return tip[: max(0, len(tip) - one.cut)] + one.context


def trained_places(built, session):
    """(call and choice, position) of every token on a mask; each stands behind exactly what it was sampled behind."""
    places = []
    for path in built:
        for at in np.flatnonzero(path.loss_mask):
            key, place = session.token(path.logprobs[at])
            sampled = [*session.prompts[key], *session.outputs[key][: place + 1]]
            assert path.input_ids[: at + 1].tolist() == sampled, (key, place)
            places.append((key, place))
    return places


few, some = st.integers(0, 3), st.integers(10, 99)
# `new_book` makes a fresh book each time it is called, so that sharing the fixture between examples is harmless.
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(drawn=sessions(few))
def test_every_trained_token_stands_once_and_behind_what_it_was_sampled_behind(new_book, drawn):
    """With three token ids everything is ambiguous, and still each token has one owner in its own context."""
    book = new_book()
    session = written(book, drawn)
    forest = grow(book.calls())
    built = trajectories.build(forest)
    places = trained_places(built, session)
    reasons = {node.call.key: node.reason for node in forest.nodes}
    assert len(places) == len(set(places)), "two owners"
    expected = {
        (key, place) for key, out in session.outputs.items() if reasons[key] is None for place in range(len(out))
    }
    assert set(places) == expected, "lost without a reason"
    assert sum(int(path.loss_mask.sum()) for path in built) == len(expected)


@many
@given(drawn=sessions(few))
def test_nothing_is_left_out_but_for_a_reason_that_the_session_gives(new_book, drawn):
    """A finished, trainable agent's call is trained unless its prompt was asked again in its thread."""
    book = new_book()
    session = written(book, drawn)
    for node in grow(book.calls()).nodes:
        key, columns = node.call.key, session.columns[node.call.key]
        twins = [
            other
            for other, prompt in session.prompts.items()
            if prompt == session.prompts[key] and other[0] != key[0]
            and session.columns[other].get("thread_id") == columns.get("thread_id")
        ]  # fmt: skip
        told = {columns.get("status"), columns.get("untrainable_reason"), columns.get("kind")} - {None, "subagent"}
        assert node.intact
        assert node.reason in {*told, *(["superseded"] if twins else []), *([None] if not told else [])}


@many
@given(drawn=sessions(few), data=st.data())
def test_the_order_of_rows_is_irrelevant(new_book, drawn, data):
    """A shuffled table gives the same trajectories, to the byte."""
    book = new_book()
    written(book, drawn)
    order = data.draw(st.permutations(range(len(book.rows))))
    one, two = (to_table(trajectories.build(grow(book.calls(rows))), {}) for rows in (None, order))
    assert one.equals(two)


@many
@given(drawn=sessions(some))
def test_splitting_into_plain_records_and_merging_again_is_identity(new_book, drawn):
    """Whole prompts without parents or hashes give the same trajectories as pointers and suffixes."""
    book = new_book()
    session = written(book, drawn, distinct=True)
    forest = grow(book.calls())
    plain = [
        replace(
            node.call, parent=None, prompt_shared=0, prompt_hash=None, evidence=None,
            prompt_suffix=np.array(session.prompts[node.call.key], np.int32),
        )
        for node in forest.nodes
    ]  # fmt: skip
    again = grow(plain)
    assert [(n.parent, n.shared, n.edge, n.reason) for n in forest.nodes] == [
        (n.parent, n.shared, n.edge, n.reason) for n in again.nodes
    ]
    assert to_table(trajectories.build(forest), {}).equals(to_table(trajectories.build(again), {}))


@many
@given(drawn=sessions(few))
def test_splitting_trajectories_into_calls_and_merging_again_is_identity(new_book, drawn):
    """Each run of masked tokens is a call behind all that stands before it: merged, they are the same rows again."""
    book = new_book()
    written(book, drawn)
    first = [path for path in trajectories.build(grow(book.calls())) if path.loss_mask.any()]
    for path in first:
        spans = np.flatnonzero(np.diff(np.concatenate([[0], path.loss_mask, [0]]))).reshape(-1, 2).tolist()
        parts = new_book()
        for number, (start, end) in enumerate(spans):
            parts.call(f"p{number}", path.input_ids[:start], path.input_ids[start:end], prompt_hash=None,
                       logprobs=path.logprobs[start:end])  # fmt: skip
        (whole,) = trajectories.build(grow(parts.calls()))
        assert whole.input_ids.tolist() == path.input_ids[: spans[-1][1]].tolist()
        assert whole.loss_mask.tolist() == path.loss_mask[: spans[-1][1]].tolist()
        assert whole.logprobs.tolist() == path.logprobs[: spans[-1][1]].tolist()


@many
@given(drawn=sessions(few), delivered_only=st.booleans(), lag=st.none() | st.integers(0, 2))
def test_a_stricter_policy_only_takes_tokens_away_and_says_why(new_book, drawn, delivered_only, lag):
    """What is trained under a policy is trained without it, but for retries, of which another may be kept."""
    book = new_book()
    session = written(book, drawn)
    for number, row in enumerate(book.rows):
        row["versions"] = [{"start": 0, "end": len(row["output_ids"]), "version": f"v{number % 3}"}]
    rows = book.calls()
    policy = Policy(delivered_only=delivered_only, max_lag=lag, versions=("v0", "v1", "v2"))
    forest = grow(rows, policy)
    places = trained_places(trajectories.build(forest), session)
    loose = {node.call.key: node.reason for node in grow(rows).nodes}
    for node in forest.nodes:
        reason = loose[node.call.key]
        assert node.reason == reason or node.reason in ("stale", "undelivered") or "superseded" in (node.reason, reason)
        if node.reason is None:
            assert node.call.delivered or not delivered_only
    assert len(places) == sum(len(session.outputs[n.call.key]) for n in forest.nodes if n.reason is None)
