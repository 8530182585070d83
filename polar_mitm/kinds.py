"""What kind of call a request is, from the evidence of the request and of the session's other requests.

Invariant: what a harness declares beats what its request looks like, and a call without tools is something else than
the agent only in a session whose other calls have tools. It looks at headers, words and shapes of requests, never at
the name of a harness. Nothing is looked up or kept but what the sessions showed.

| evidence | kind |
|---|---|
| fingerprint: a registered session's credentials from another program | foreign |
| header: the harness says so | what it says |
| request: the answer is to stand for the history | compaction |
| tree: the parent, with the same tools, is a sub-agent | subagent |
| prompt: the first words are the argument of a tool call of this session | subagent |
| shape: no tools, JSON by a schema | auxiliary (a router) |
| shape: no tools where others have some, asked to sum the conversation up | compaction |
| shape: no tools where others have some, none called before | auxiliary (a title) |
| default | agent |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from polar_mitm.conversation import Conversation, Message, Part, ToolCall, joined_text
from polar_mitm.identity import Kind, Session
from polar_mitm.tips import Parent

_CLAUDE_CLASSES: dict[str, Kind] = {  # Claude Code 2.1.332; its "main" says nothing of titles and the like
    "subagent": "subagent",
    "workflow": "subagent",
    "compaction": "compaction",
    "auxiliary": "auxiliary",
    "side_reply": "auxiliary",
}
_HEAD, _NEAR = 500, 160  # characters: where an instruction says what it is about, and how close its words stand
_SUMMING = r"(?:summar\w*|compact\w*|compress\w*|condens\w*|checkpoint\w*|hand-?off)"
_HISTORY = r"(?:conversation|context|history|session|chat|transcript|messages above)"
_SUMMARY = re.compile(
    rf"\b{_SUMMING}\b.{{0,{_NEAR}}}\b{_HISTORY}\b|\b{_HISTORY}\b.{{0,{_NEAR}}}\b{_SUMMING}\b",
    re.IGNORECASE | re.DOTALL,
)
_TITLE = re.compile(r"\btitle\b", re.IGNORECASE)
_LEAST_PROMPT = 12  # characters of a tool's argument that can be the whole prompt of a sub-agent
_MOST_SESSIONS = 10_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """A kind and the evidence for it."""

    kind: Kind
    evidence: str
    """A word of the module's table."""

    @property
    def columns(self) -> dict[str, str]:
        """The columns of the calls table."""
        return {"kind": self.kind, "kind_evidence": self.evidence}


AGENT = Verdict("agent", "default")


@dataclass(slots=True)
class _Seen:
    """What a session's requests showed so far."""

    product: str | None = None
    tools: bool = False
    spawned: set[bytes] = field(default_factory=set[bytes])
    """Hashes of the arguments of its tool calls."""


class Kinds:
    """What the sessions of a run showed; the newest sessions are remembered."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Seen] = {}

    def declared(self, session: Session, headers: Mapping[str, str]) -> Verdict:
        """What the headers alone say (names in lower case).

        A registered session's harness is told from other programs with its credentials (the agent's shell inherits
        them) by its first request. The session of an interactive run is nobody's in particular.
        """
        product = headers.get("user-agent", "").split("/", 1)[0].strip().lower()
        seen = self._of(session.session_id)
        seen.product = product if seen.product is None else seen.product
        if session.registered and seen.product != product:
            return Verdict("foreign", "fingerprint")
        kind = _declared(headers)
        return Verdict(kind, "header") if kind else AGENT

    def judge(self, session_id: str, request: Conversation, declared: Verdict, parent: Parent | None) -> Verdict:
        """What a call is, as far as the session's requests have shown by now. Remembers that this one has tools."""
        seen = self._of(session_id)
        seen.tools |= bool(request.tools) and declared.kind != "foreign"
        if declared != AGENT:
            return declared
        if request.compacts:
            return Verdict("compaction", "request")
        if not request.tools:
            return _toolless(request, others_have_tools=seen.tools)
        if parent is not None and parent.tip.kind == "subagent":
            return Verdict("subagent", "tree")
        return Verdict("subagent", "prompt") if parent is None and _asked(request) in seen.spawned else AGENT

    def shows_tools(self, session_id: str) -> bool:
        """Whether a call of this session had tools."""
        return self._of(session_id).tools

    def spawns(self, session_id: str, parts: Iterable[Part]) -> None:
        """Remember what a reply's tool calls say: a sub-agent is often asked in just these words."""
        seen = self._of(session_id)
        texts = {text for part in parts if isinstance(part, ToolCall) for text in _arguments(part.arguments)}
        seen.spawned.update(map(_hash, texts))

    def _of(self, session_id: str) -> _Seen:
        seen = self._sessions.setdefault(session_id, _Seen())
        if len(self._sessions) > _MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return seen


def _declared(headers: Mapping[str, str]) -> Kind | None:
    """The kind that a harness names."""
    if kind := _CLAUDE_CLASSES.get(headers.get("x-claude-code-request-class", "")):
        return kind
    codex = _object(headers.get("x-codex-turn-metadata", ""))  # Codex 0.171.0
    if codex.get("request_kind") == "compaction" or headers.get("x-openai-subagent") == "compact":
        return "compaction"
    if any(map(headers.get, ("x-claude-code-agent-id", "x-openai-subagent", "x-codex-parent-thread-id"))):
        return "subagent"
    return "subagent" if codex.get("subagent_kind") else None


def _toolless(request: Conversation, *, others_have_tools: bool) -> Verdict:
    if request.sampling.json_schema is not None:  # Gemini CLI 0.61.0 asks its router before any call has tools
        return Verdict("auxiliary", "shape")
    if not others_have_tools:
        return AGENT
    if _sums_up(request.messages):
        return Verdict("compaction", "shape")
    called = any(isinstance(part, ToolCall) for message in request.messages for part in message.parts)
    return AGENT if called else Verdict("auxiliary", "shape")  # an agent may be asked for its last words without tools


def _sums_up(messages: tuple[Message, ...]) -> bool:
    """Whether the system's or the last user's words ask for a summary of the conversation.

    Codex 0.171.0 and Pi 1.6.0 say so in the last message, behind the history; opencode 1.18.33 in the system's.
    """
    systems = [joined_text(m)[:_HEAD] for m in messages if m.role == "system"]
    last = next((joined_text(m) for m in reversed(messages) if m.role == "user"), "")
    said = [*systems[:1], last[:_HEAD], last[-_HEAD:]]
    if any(_TITLE.search(text[:_NEAR]) for text in said):  # opencode 1.18.33: a title is to sum the conversation up too
        return False
    return any(map(_SUMMARY.search, said))


def _asked(request: Conversation) -> bytes:
    """Hash of what the last user message asks for, when nothing was answered yet."""
    if any(m.role == "assistant" for m in request.messages):
        return b""
    return _hash(next((joined_text(m) for m in reversed(request.messages) if m.role == "user"), ""))


def _arguments(text: str) -> list[str]:
    """The string values of a tool call's arguments that are long enough to be a prompt."""
    return [v for v in _object(text).values() if isinstance(v, str) and len(v.strip()) >= _LEAST_PROMPT]


def _object(text: str) -> dict[str, Any]:  # Any: JSON
    """A JSON object; an empty one for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _hash(text: str) -> bytes:
    return blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest()
