"""The prompt of a call: its parent's tokens and the new messages, or a whole render; and what it costs to look again.

Invariant: a bridged prompt begins with the very tokens of the parent's prompt and of what was given out of its reply.
A forced beginning of the reply stands at the prompt's end, so that it is context and never counted as sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from polar_mitm.conversation import Conversation
from polar_mitm.desk import Desk
from polar_mitm.engine import Description
from polar_mitm.errors import BadRequest, ContextOverflow
from polar_mitm.identity import Session
from polar_mitm.tips import Parent, RootReason
from polar_mitm.tokens import Tokens

_AUDITED_CALLS = 8
"""So many calls of a session are re-rendered, each of them."""
_AUDITED_TOKENS = 1024
"""Of later calls, a share that costs on average the render of so many tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and where it comes from."""

    ids: Tokens
    parent: Parent | None
    root_reason: RootReason | None
    forced: int = 0
    """How many ids at its end are the beginning of the reply: a call of the tool that the request forces."""


async def prompt_of(desk: Desk, session: Session, request: Conversation) -> Prompt:
    """The parent's tokens extended by the new messages; a full render when there is no parent or no bridge.

    Raises BadRequest when the template refuses the history, or cannot begin the call that is forced.
    """
    prompt = await _plain_prompt(desk, session, request)
    if request.forced_tool is None:
        return prompt
    forced = await desk.tokens(desk.template.forced, request.forced_tool, request.tools)
    return replace(prompt, ids=np.concatenate([prompt.ids, forced]), forced=len(forced))


async def _plain_prompt(desk: Desk, session: Session, request: Conversation) -> Prompt:
    found = await desk.find_parent(session, request)
    if isinstance(found, Parent):
        tip, bridge = found.tip, desk.template.bridge
        new = found.messages
        ids = await desk.tokens(bridge, tip.prompt_ids, tip.output_ids, request.messages, new, request.tools)
        if ids is not None:
            return Prompt(ids, found, None)
        found = "bridge_refused"
    return Prompt(await desk.tokens(desk.template.render, request.messages, request.tools), None, found)


def check_fits(prompt: Tokens, described: Description) -> None:
    """Raises ContextOverflow when no token could be sampled after this prompt."""
    if room(prompt, described) < 1:
        raise ContextOverflow(len(prompt), described.context)


def room(prompt: Tokens, described: Description) -> int:
    """How many tokens may be sampled: SGLang keeps one position of the context free."""
    return described.context - len(prompt) - 1


def is_audited(call_id: str, ordinal: int, length: int) -> bool:
    """Whether a bridged prompt of `length` tokens is compared with a plain re-render, which costs its whole length.

    The first calls of a session all are, of the later ones a share that falls with their length.
    """
    if ordinal < _AUDITED_CALLS or length <= _AUDITED_TOKENS:
        return True
    drawn = int.from_bytes(blake2b(call_id.encode(), digest_size=4).digest(), "little")
    return drawn * length < _AUDITED_TOKENS << 32


async def rerender_shared(desk: Desk, prompt: Tokens, request: Conversation) -> int | None:
    """How many leading tokens of `prompt` a plain re-render of the harness's history gives; None when it is refused."""
    try:
        rendered = await desk.tokens(desk.template.render, request.messages, request.tools)
    except BadRequest:
        return None  # the template refuses the history that the bridge could extend
    return shared_prefix(rendered, prompt)


def shared_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
