"""The reasoning of our replies in a harness's messages: what may become of it, and what was left out, put back. Pure.

Invariant: reasoning that came back counts as ours when it is ours, a part of it, or nothing. Only reasoning that we
sampled is put in, only into the message that is that very reply, and only where the harness sent none or a part of it;
a reasoning that the harness changed stays as the harness sent it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b

from polar_mitm.conversation import Message, Part, Reasoning, canonical

Reply = tuple[Part, ...]
"""The parts of a reply of ours."""


def restored(
    messages: tuple[Message, ...], known: Mapping[int, Reply], named: Iterable[Reply]
) -> tuple[tuple[Message, ...], int]:
    """The messages with our reasoning in them, and how many of them were changed.

    `known` are the replies that stand at a place of the history; `named` those that the request's ids name, in its
    order: each is looked for among the other messages by what it says.
    """
    waiting: defaultdict[str, list[Reply]] = defaultdict(list)
    for reply in named:
        waiting[canonical(Message("assistant", reply))].append(reply)
    whole = [_whole(m, _reply(m, index, known, waiting)) for index, m in enumerate(messages)]
    return tuple(whole), sum(a is not b for a, b in zip(whole, messages, strict=True))


def _reply(message: Message, index: int, known: Mapping[int, Reply], waiting: Mapping[str, list[Reply]]) -> Reply:
    if message.role != "assistant":
        return ()
    candidates = waiting.get(canonical(message))
    pointed = candidates.pop(0) if candidates else ()
    return known.get(index, pointed)


def _whole(message: Message, reply: Reply) -> Message:
    ours, sent = thought(reply), thought(message.parts)
    if not ours or ours == sent or not is_trimmed(sent, ours):
        return message
    return Message("assistant", (Reasoning(ours), *(p for p in message.parts if not isinstance(p, Reasoning))))


def thought(parts: Iterable[Part]) -> str:
    """The reasoning among parts, as one text."""
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


def is_of(message: Message, key: bytes, reply: Callable[[], Reply]) -> bool:
    """Whether the reasoning in a message is that of the reply, all of it, a part or nothing.

    `key` is the reply's `thought_key`; the reply itself is asked for only when that does not decide.
    """
    return any(
        not sent or thought_key(sent) == key or is_trimmed(sent, thought(reply())) for sent in _thoughts(message)
    )


def _thoughts(message: Message) -> list[str]:
    """What may be the reasoning of a reply: all of it, or what stands behind that of replies that were cut off.

    Codex 0.171.0 keeps the reasoning item of a reply that was cut off before the items of the one that it then got.
    """
    pieces = [part.text for part in message.parts if isinstance(part, Reasoning) and part.text]
    return ["".join(pieces[start:]) for start in range(max(1, len(pieces)))]


def is_trimmed(sent: str, ours: str) -> bool:
    """Whether a reasoning that came back is ours, a part of it, or nothing; white space does not count."""
    return _bare(sent) in _bare(ours)


def thought_key(reasoning: str) -> bytes:
    """Hash of a reasoning without white space; 8 bytes."""
    return blake2b(_bare(reasoning).encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _bare(text: str) -> str:
    return "".join(text.split())
