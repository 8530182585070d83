"""How a step is taken through a template, and how a bridge is judged."""

from __future__ import annotations

import pytest

from polar_mitm.tokens import probe, script
from polar_mitm.tokens.chat_template import ChatTemplate
from tests.mitm.tokens.chatml import CHATML, REFUSING, byte_tokenizer

STOPS = frozenset({257})
CHAT = ChatTemplate(byte_tokenizer(CHATML))


def taken(step: script.Step) -> probe.Taken:
    rendered = probe.render(CHAT, step)
    assert isinstance(rendered, probe.Rendered)
    return rendered.ended(STOPS)


def test_a_reply_is_sampled_as_the_template_writes_it_with_its_end() -> None:
    """Up to the first id at which the model stops."""
    assert CHAT.decode(taken(script.TEXT).output) == "Hello, you.<|im_end|>"


def test_a_cut_reply_has_no_end() -> None:
    """As a length ending leaves it."""
    assert CHAT.decode(taken(script.CUT_TEXT).output) == "Hello, you."


def test_a_step_that_the_template_does_not_say_is_told() -> None:
    """A template without calls, or one that refuses."""
    assert probe.render(CHAT, script.CALL) == "not said by the template: 'src/main'"
    assert probe.render(ChatTemplate(byte_tokenizer(REFUSING)), script.TEXT) == "refused: no"


@pytest.mark.parametrize(
    ("made", "faithful"),
    [
        pytest.param(lambda t: t.canonical, True, id="the template's own"),
        pytest.param(lambda t: t.own, False, id="the new message is missing"),
        pytest.param(lambda t: [*t.own, *t.canonical[len(t.own) + 1 :]], False, id="a character is missing"),
        pytest.param(lambda t: [*t.canonical, 1], False, id="a character too much"),
        pytest.param(lambda t: t.canonical[1:], False, id="what was sampled is not kept"),
    ],
)
def test_a_bridge_is_faithful_when_it_adds_what_the_template_says_and_only_that(
    made: object, *, faithful: bool
) -> None:
    """The negative controls are each one change away."""
    assert callable(made)
    step = taken(script.TEXT)
    assert probe.is_faithful(CHAT, step, made(step), STOPS) is faithful


def test_a_template_that_only_appends_is_seen_to() -> None:
    """ChatML leaves prompt and reply at the beginning of the next prompt."""
    assert taken(script.TEXT).append_only
