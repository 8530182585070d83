"""A chat template seen through its own renderings."""

from __future__ import annotations

from polar_mitm.tokens.chat_template import ChatTemplate, common
from polar_mitm.tokens.plain import Shape
from tests.mitm.tokens.chatml import CHATML, REFUSING, byte_tokenizer

CALLS = "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
OBJECTS = CHATML.replace("{{ m.content }}", CALLS + "{{ c.function.arguments | tojson }}{% endfor %}")
TEXTS = CHATML.replace("{{ m.content }}", CALLS + "{{ ' ' + c.function.arguments }}{% endfor %}")
"""As DeepSeek-V3's template, which adds arguments to a string."""
OPEN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
"""A template that writes no marker."""


def chat(template: str) -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(template))


def test_the_form_of_arguments_is_the_one_that_the_template_takes() -> None:
    """An object, or the text of one where the template concatenates it."""
    assert chat(OBJECTS).shape == Shape("object")
    assert chat(TEXTS).shape == Shape("text")


def test_a_template_that_leaves_calls_out_is_known() -> None:
    """SmolLM2's says no calls at all."""
    assert chat(OBJECTS).says_calls
    assert not chat(CHATML).says_calls


def test_a_turns_end_is_found_in_what_the_template_writes() -> None:
    """ChatML's end of turn; nothing where there is no marker, or no rendering."""
    assert chat(CHATML).closings == (257,)
    assert chat(OPEN).closings == ()
    assert chat(REFUSING).closings == ()


def test_a_template_may_end_its_last_turn_otherwise() -> None:
    """As gpt-oss does: the first is written when nothing follows, the last one when something does."""
    ending = CHATML.replace(
        "<|im_end|>", "{{ '<|im_start|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}"
    )
    assert chat(ending).closings == (256, 257)


def test_the_head_is_what_stands_before_a_reply_in_either_rendering() -> None:
    """Without the generation prompt, and without what ends a conversation."""
    assert (
        chat(CHATML + "{% if not add_generation_prompt %}THE END{% endif %}").head(
            [{"role": "user", "content": "hi"}], None
        )
        == "<|im_start|>user\nhi<|im_end|>\n"
    )


def test_a_common_beginning_is_counted() -> None:
    """Of ids, or of characters."""
    assert common([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common("ab", "abc") == 2
