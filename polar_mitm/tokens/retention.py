"""Who decides about the reasoning of earlier turns: the run, which keeps what was sampled, or the model's own template.

Invariant: under "template" a context is extended only where the chat template was seen to leave the reasoning that
stands there; what it does is seen on probes, never told by a name. This module decides nothing else about a bridge.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from polar_mitm.conversation import Message

Policy = Literal["preserve", "template"]
POLICIES: tuple[str, ...] = get_args(Policy)
PRESERVE: Policy = "preserve"

_MARK = "polarthought"
_ASKED = {"role": "user", "content": "Look."}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "peek", "arguments": {"path": "oats"}}}
_AFTER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # Any: messages as JSON
    "user": ({"role": "assistant", "content": "Oats."}, {"role": "user", "content": "And now?"}),
    "tool": (
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "barley", "tool_call_id": "call_1", "name": "peek"},
    ),
}
"""A reply, and what may follow it."""


def rewrites(tokenizer: Any, new: tuple[Message, ...]) -> bool:  # Any: a transformers tokenizer, untyped
    """Whether the chat template drops the reasoning of the reply that these messages follow."""
    role = "user" if any(message.role == "user" for message in new) else "tool"
    reply, follow = _AFTER[role]
    written = {**reply, "content": f"<think>\n{_MARK}\n</think>\n\n{reply['content']}"}
    apart = {**reply, "reasoning_content": _MARK, "thinking": _MARK}  # gpt-oss has the second name
    try:
        as_text = _shows(tokenizer, [_ASKED, written, follow])
        at_last, then = _shows(tokenizer, [_ASKED, apart]), _shows(tokenizer, [_ASKED, apart, follow])
    except Exception:  # noqa: BLE001 - jinja templates raise anything; then nothing is known to stay
        return True
    return not as_text or (at_last and not then)


def _shows(tokenizer: Any, messages: list[dict[str, Any]]) -> bool:  # Any: as above
    return _MARK in str(tokenizer.apply_chat_template(messages, tokenize=False))
