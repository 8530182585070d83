"""What the decoders share: text content, and the history that they build message by message.

Invariant: adjacent assistant items become one Message, so a reply that a protocol splits is one turn again. This
module knows no protocol beyond the shape "a string, or a list of typed text parts".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from polar_mitm.conversation import Message, Part, Role, Text
from polar_mitm.errors import BadRequest
from polar_mitm.wire.fields import Fields


class History:
    """Messages, echoed ids and ignored fields, gathered in the order of the request."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._echoes: list[str] = []
        self._ignored: dict[str, None] = {}

    def add(self, message: Message) -> None:
        """The next message; joined to the one before when both are the assistant's."""
        before = self._messages[-1] if self._messages else None
        if before and before.role == message.role == "assistant":
            self._messages[-1] = Message("assistant", before.parts + message.parts)
        else:
            self._messages.append(message)

    def echo(self, item_id: str | None) -> None:
        """An id that we may have minted."""
        if item_id:
            self._echoes.append(item_id)

    def ignore(self, *names: str) -> None:
        """Fields that are deliberately not honoured."""
        self._ignored.update(dict.fromkeys(names))

    def messages(self, field: str) -> tuple[Message, ...]:
        """The whole history. Raises BadRequest when `field` gave none."""
        if not self._messages:
            raise BadRequest(f"{field}: at least one message is required", field=field)
        return tuple(self._messages)

    def ends_with(self, role: Role) -> bool:
        """Whether the last message is of this role."""
        return bool(self._messages) and self._messages[-1].role == role

    @property
    def echoes(self) -> tuple[str, ...]:
        """See Conversation.echoes."""
        return tuple(self._echoes)

    @property
    def ignored(self) -> tuple[str, ...]:
        """See Conversation.fidelity."""
        return tuple(self._ignored)


def text_parts(owner: Fields, name: str, kinds: Mapping[str, str]) -> tuple[Text, ...]:
    """The Text parts of a content that is null, a string, or a list of parts.

    `kinds` gives, for each type of part that is text, the field that holds it. Raises BadRequest for any other type.
    """
    content = owner.value(name)
    if isinstance(content, str):
        return (Text(content),)
    return tuple(Text(part.text(kinds[kind_of(part, kinds)])) for part in owner.children(name))


def kind_of(part: Fields, kinds: Collection[str]) -> str:
    """The part's type, when it is one of `kinds`. Raises BadRequest for any other."""
    kind = part.text("type")
    if kind not in kinds:
        raise part.wrong("type", f"only {', '.join(kinds)} is supported here")
    return kind


def joined(parts: tuple[Part, ...]) -> str:
    """The text of Text parts as one string."""
    return "".join(part.text for part in parts if isinstance(part, Text))


def fidelity(history: History, request: Fields) -> tuple[str, ...]:
    """Names of all fields that were ignored: of the request, then the dotted ones found inside."""
    return tuple(dict.fromkeys((*request.unread(), *history.ignored)))
