"""The bridge for chat templates without a typed renderer: what a template writes after an assistant's turn.

Invariant: the bridge is used only when the template was seen to be append-only on a probe (`works`). It renders two
messages and the new ones, cuts the text after a marker in the assistant's turn, and encodes only the remainder; the
sampled ids are never rendered again.
"""

from __future__ import annotations

from typing import Any

_MARK = "\u2063polar\u2063mark\u2063"
_STEM: list[dict[str, Any]] = [  # Any: messages as JSON
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": _MARK},
]


def suffix_ids(tokenizer: Any, new_messages: list[Any], tools: list[Any] | None) -> list[int]:  # Any: JSON
    """Ids of everything that the template writes after an assistant's content when `new_messages` follow it.

    Begins with the turn's end (for ChatML `<|im_end|>` and a new line) and ends with the generation prompt.
    """
    text: str = tokenizer.apply_chat_template(
        [*_STEM, *new_messages], tools=tools, add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(text.split(_MARK, 1)[1], add_special_tokens=False))


def works(tokenizer: Any) -> bool:  # Any: a transformers tokenizer
    """Whether history + suffix equals the template's own rendering of a longer conversation, token by token."""
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}
    reply, more = {"role": "assistant", "content": "Hello, you."}, [{"role": "user", "content": "And\n  now?"}]

    def render(messages: list[dict[str, str]], *, prompt: bool = False) -> list[int]:
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=True, return_dict=False)
        )

    try:
        prompt, whole = render([system, user], prompt=True), render([system, user, reply, *more], prompt=True)
        ours = [*prompt, *tokenizer.encode(reply["content"], add_special_tokens=False)]
        return [*ours, *suffix_ids(tokenizer, more, None)] == whole
    except Exception:  # noqa: BLE001 - jinja templates raise anything; then there is no bridge
        return False
