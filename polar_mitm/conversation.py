"""The canonical values between the wire and the tokens: what was said, asked for, and answered.

Invariant: values are immutable, hold no provider's field names, and keep text exactly as it came. What makes two
histories "the same" is defined here once, in `canonical`. This module does no I/O and knows no token ids.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "tool_calls"]
Framing = Literal["sse", "array"]
"""Server-sent events, or one JSON array written piece by piece (Gemini without `alt=sse`)."""
Compaction = Literal["item", "history"]
"""How a summary is given back: as the one item of an answer, or as the whole compacted history (`/compact`)."""


@dataclass(frozen=True, slots=True)
class Text:
    """Visible text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thinking that the model wrote before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The model's call of a tool."""

    id: str
    """The id the harness must echo; minted by us in a reply, as received in a request."""
    name: str
    arguments: str
    """JSON text as sampled or as received; for a `custom` tool, the free-form input."""
    custom: bool = False
    """True when the harness declared a free-form tool (OpenAI `custom`)."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the harness answered to a ToolCall."""

    call_id: str
    text: str
    is_error: bool = False


Part = Text | Reasoning | ToolCall | ToolResult


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the history. Adjacent assistant items of a protocol are one Message."""

    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the harness offers."""

    name: str
    description: str
    parameters: str
    """JSON schema as compact JSON text (so that the value is hashable); '' for a free-form tool."""
    custom: bool = False
    namespace: str = ""
    """The harness's name space, when it declared one; needed to answer in the same form."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the harness asked for; None where it asked for nothing. What is applied belongs to the run."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    json_schema: str | None = None
    """JSON text of the schema that the answer must satisfy."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; it is cut before the first of them."""
    choices: int = 1
    """How many answers of the same prompt are wanted (OpenAI `n`, Gemini `candidateCount`)."""
    logprobs: bool = False
    """Whether the client wants the logprobs of the sampled tokens back."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A decoded request."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False
    framing: Framing = "sse"
    """How a streamed answer is framed."""
    stream_usage: bool = True
    """Whether a streamed answer tells its token counts (OpenAI `stream_options.include_usage`)."""
    asked_at: int = 0
    """When it arrived, in unix seconds, set by the core: the `created` of an answer."""
    forced_tool: str | None = None
    """None: the model chooses; "": it must call one of the tools; else it must call this one."""
    continues: str | None = None
    """Id of an earlier answer whose history and reply come before `messages` (Responses `previous_response_id`)."""
    compacts: Compaction | None = None
    """Set when the answer is to stand for the history from now on (Responses `compaction_trigger`, `/compact`)."""
    shows_reasoning: bool = True
    """Whether the answer may show the model's reasoning (Gemini `includeThoughts`)."""
    thread: str | None = None
    """The harness's own id of the thread of this call (agent id, thread id, cache key), when it names one."""
    echoes: tuple[str, ...] = ()
    """Id strings that we may have minted, in the order of the history, from the listed id fields only."""
    fidelity: tuple[str, ...] = ()
    """Names of request fields that were read and deliberately ignored."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a call."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Scored:
    """A sampled token as the client is told of it."""

    text: bytes
    """The token's bytes, which need not be whole characters."""
    logprob: float


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished answer, from which the streamed and the plain form are both encoded."""

    id: str
    """Core of every id that the answer carries: `identity.mint(call_id, choice)`, characters [A-Za-z0-9_-]."""
    parts: tuple[Part, ...]
    """Reasoning, Text and ToolCall in the order in which they were sampled."""
    finish: Finish
    usage: Usage = field(default_factory=Usage)
    """Of this choice; the prompt counts once for all choices."""
    stopped_by: str | None = None
    """The string of `Sampling.stop` that ended it."""
    scored: tuple[Scored, ...] = ()
    """The tokens of its visible text, when the request wants logprobs."""
    others: tuple[Reply, ...] = ()
    """The further choices, in order, when the request wants several; this one is choice 0."""

    @property
    def choices(self) -> tuple[Reply, ...]:
        """All choices, this one first."""
        return (self, *self.others)

    @property
    def message(self) -> Message:
        """The reply as the assistant message that a faithful harness would send back."""
        return Message("assistant", self.parts)


def part_json(part: Part) -> dict[str, Any]:  # Any: JSON
    """A part as JSON, for the calls table: its fields and its kind."""
    return {"kind": type(part).__name__.lower(), **asdict(part)}


def message_json(message: Message) -> dict[str, Any]:  # Any: JSON
    """A message as JSON, for the calls table."""
    return {"role": message.role, "parts": [part_json(p) for p in message.parts]}


def part_from_json(value: dict[str, Any]) -> Part:  # Any: JSON
    """The part that `part_json` wrote."""
    kinds: dict[str, type[Part]] = {kind.__name__.lower(): kind for kind in (Text, Reasoning, ToolCall, ToolResult)}
    return kinds[value["kind"]](**{name: field for name, field in value.items() if name != "kind"})


def message_from_json(value: dict[str, Any]) -> Message:  # Any: JSON
    """The message that `message_json` wrote."""
    return Message(value["role"], tuple(part_from_json(part) for part in value["parts"]))


def canonical_json(text: str) -> str:
    """JSON text with sorted keys and no spaces; the stripped text itself when it is not JSON."""
    try:
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):  # RecursionError: brackets nested thousands deep
        return text.strip()


def canonical(message: Message) -> str:
    """The part of a message that must not change for its history to count as unchanged.

    For assistant messages only, what harnesses were seen to do to our replies does not count, since none of it changes
    what was said: docs/equivalences.md lists it. Reasoning is not in it: `thinking.is_trimmed` says what may become of
    it. Everything else counts, to the byte.
    """
    if message.role != "assistant":
        results = [[p.text, p.is_error] for p in message.parts if isinstance(p, ToolResult)]
        return json.dumps([message.role, joined_text(message), results], ensure_ascii=False)
    said = joined_text(message).strip()
    calls = [
        [p.name, p.arguments.strip() if p.custom else canonical_json(p.arguments)]
        for p in message.parts
        if isinstance(p, ToolCall)
    ]
    shown = [isinstance(p, Text) for p in message.parts if isinstance(p, ToolCall) or (isinstance(p, Text) and p.text)]
    mixed = shown != sorted(shown, reverse=True)  # no reply of ours has text behind a call
    return json.dumps(["assistant", said, calls, *([shown] if mixed else [])], ensure_ascii=False)


def joined_text(message: Message) -> str:
    """The visible text that the model is shown: blocks of the harness by blank lines, the model's own as sampled."""
    return ("" if message.role == "assistant" else "\n\n").join(p.text for p in message.parts if isinstance(p, Text))


def history_keys(messages: tuple[Message, ...], start: bytes = b"") -> list[bytes]:
    """Chained hashes at each message boundary: key i covers messages[:i+1]. 16 bytes each."""
    keys: list[bytes] = []
    for message in messages:
        start = extend_key(start, message)
        keys.append(start)
    return keys


def extend_key(key: bytes, message: Message) -> bytes:
    """The key of a history extended by one message."""
    return blake2b(key + canonical(message).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def tools_key(tools: tuple[Tool, ...]) -> bytes:
    """Hash of the offered tools; a change of tools changes the prompt and so forks the history."""
    return blake2b(repr(tools).encode("utf-8", "surrogatepass"), digest_size=16).digest()
