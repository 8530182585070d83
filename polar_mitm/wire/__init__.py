"""Provider protocols: bytes of a request to a Conversation, a Reply to bytes. Pure: no I/O, no clock, no randomness.

A protocol is one module with one `Dialect`, listed in `DIALECTS`, and the modules beside it that it uses, split by
direction; `dialect` declares the interfaces. What the protocols share is split likewise: `frame`, `fields` and
`history` read a request, `answer` orders a reply, `sse` frames it.
"""

from __future__ import annotations

from polar_mitm.wire.anthropic import AnthropicMessages
from polar_mitm.wire.dialect import Dialect, Kind, StreamEncoder
from polar_mitm.wire.gemini import Gemini
from polar_mitm.wire.openai_chat import OpenAIChat
from polar_mitm.wire.openai_responses import OpenAIResponses

__all__ = ["DIALECTS", "Dialect", "Kind", "StreamEncoder"]

DIALECTS: tuple[Dialect, ...] = (OpenAIResponses(), OpenAIChat(), AnthropicMessages(), Gemini())
