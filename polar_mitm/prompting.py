"""The prompt of a call: its parent's tokens and the new messages, or a whole render; and what it costs to look again.

Invariant: a bridged prompt begins with the very tokens of the parent's prompt and of what was given out of its reply.
A forced beginning of the reply stands at the prompt's end, so that it is context and never counted as sampled. What
was compared with another context is evidence beside the prompt, never a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from polar_mitm.conversation import Conversation, Message, joined_text
from polar_mitm.desk import Desk
from polar_mitm.divergence import Context, Departure, Drift, departure, drift, replaces_history, shared_prefix
from polar_mitm.engine import Description
from polar_mitm.errors import BadRequest, ContextOverflow
from polar_mitm.identity import Session
from polar_mitm.thinking import restored
from polar_mitm.tips import Parent, Past, RootReason
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
    past: Past | None = None
    """What a root with a history comes from."""
    restored: int = 0
    """Replies whose reasoning, which the harness left out, was put back."""

    @property
    def rendered(self) -> Tokens:
        """Without the forced beginning."""
        return self.ids[: len(self.ids) - self.forced]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a prompt was compared with."""

    rerender_shared: int | None = None
    drift: Drift | None = None
    departure: Departure | None = None

    @property
    def columns(self) -> dict[str, int | str | None]:
        """The columns of the calls table."""
        return {
            "rerender_shared": self.rerender_shared,
            "drift": self.drift.json() if self.drift else None,
            "root_window": self.departure.json() if self.departure else None,
        }


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
        found = "template_rewrites" if desk.template.rewrites(request.messages[new:]) else "bridge_refused"
    past = desk.past(session, request)
    if replaces_history(request.messages, _summaries(past)):
        found = "compaction"
    if found == "first":
        return Prompt(await desk.tokens(desk.template.render, request.messages, request.tools), None, found)
    messages, count = request.messages, 0
    if desk.template.preserves:
        messages, count = await desk.tokens(_with_reasoning, request.messages, past)
    ids = await desk.tokens(desk.template.render, messages, request.tools)
    return Prompt(ids, None, found, past=past, restored=count)


def _with_reasoning(messages: tuple[Message, ...], past: Past) -> tuple[tuple[Message, ...], int]:
    known = {index: said.reply for index, said in past.known}
    return restored(messages, known, [said.reply for said in past.named])


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


async def evidence(desk: Desk, prompt: Prompt, request: Conversation, *, audited: bool) -> Evidence:
    """A root with a history beside the nearest earlier call; a bridged prompt, when `audited`, beside a re-render."""
    if prompt.past is not None:
        return Evidence(departure=await desk.tokens(_departure, desk, prompt, prompt.past, request))
    if prompt.parent is None or not audited:
        return Evidence()
    try:
        rendered = await desk.tokens(desk.template.render, request.messages, request.tools)
    except BadRequest:
        return Evidence()  # the template refuses the history that the bridge could extend
    found = await desk.tokens(drift, desk.template, prompt.rendered, rendered)
    return Evidence(shared_prefix(rendered, prompt.ids), found)


def _departure(desk: Desk, prompt: Prompt, past: Past, request: Conversation) -> Departure | None:
    nearest = past.nearest
    if nearest is None:
        return None
    was = Context(nearest.tokens, nearest.messages, nearest.tools)
    now = Context(prompt.rendered, request.messages, request.tools)
    summaries = _summaries(past)
    return departure(desk.template, nearest.call_id, was, now, summaries=summaries, restored=prompt.restored)


def _summaries(past: Past) -> list[str]:
    """What the session's compactions came to."""
    return [joined_text(Message("assistant", said.reply)) for said in past.summaries]
