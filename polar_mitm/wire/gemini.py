"""Gemini: `models/M:generateContent` and `:streamGenerateContent`, as Gemini CLI, Pi and Google's SDKs speak it.

Invariant: what stands in the path and the query of a call (`model`, `stream`, `alt`) is read as fields of the request.
Thoughts are shown only to a harness that asks for them. Reading is in `gemini_request`, answering in `gemini_answer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polar_mitm.conversation import Conversation, Reply
from polar_mitm.errors import PolarError
from polar_mitm.wire import gemini_answer, gemini_request
from polar_mitm.wire.dialect import Support

_SUPPORT = Support(
    supported=(
        "contents.role",
        "contents.parts.text",
        "contents.parts.thought",
        "contents.parts.thoughtSignature",
        "contents.parts.functionCall",
        "contents.parts.functionResponse",
        "contents.parts.executableCode",
        "contents.parts.codeExecutionResult",
        "systemInstruction",
        "tools.functionDeclarations",
        "toolConfig.functionCallingConfig.mode",
        "toolConfig.functionCallingConfig.allowedFunctionNames",
        "generationConfig.maxOutputTokens",
        "generationConfig.stopSequences",
        "generationConfig.candidateCount",
        "generationConfig.responseMimeType",
        "generationConfig.responseSchema",
        "generationConfig.responseJsonSchema",
        "generationConfig.responseLogprobs",
        "generationConfig.thinkingConfig.includeThoughts",
    ),
    ignored={
        "safetySettings": "nothing is blocked",
        "labels": "for Google's billing",
        "store": "for Google's logs",
        "serviceTier": "there is one tier",
        "tools.googleSearch": "runs at Google: the model is not offered it",
        "tools.googleSearchRetrieval": "runs at Google: the model is not offered it",
        "tools.googleMaps": "runs at Google: the model is not offered it",
        "tools.urlContext": "runs at Google: the model is not offered it",
        "tools.codeExecution": "runs at Google: the model is not offered it",
        "tools.fileSearch": "runs at Google: the model is not offered it",
        "tools.computerUse": "runs at Google: the model is not offered it",
        "tools.mcpServers": "run at Google: the model is not offered them",
        "toolConfig.retrievalConfig": "for search, which runs at Google",
        "toolConfig.includeServerSideToolInvocations": "there are none",
        "generationConfig.temperature": "recorded; sampling belongs to the run",
        "generationConfig.topP": "recorded; sampling belongs to the run",
        "generationConfig.topK": "recorded; sampling belongs to the run",
        "generationConfig.seed": "recorded; sampling belongs to the run",
        "generationConfig.presencePenalty": "sampling belongs to the run",
        "generationConfig.frequencyPenalty": "sampling belongs to the run",
        "generationConfig.thinkingConfig.thinkingBudget": "how much it thinks is the model's own",
        "generationConfig.thinkingConfig.thinkingLevel": "how much it thinks is the model's own",
        "generationConfig.mediaResolution": "there are no media",
        "generationConfig.speechConfig": "only text is generated",
        "generationConfig.imageConfig": "only text is generated",
    },
    refused={
        "cachedContent": "send the contents themselves",
        "contents.parts.inlineData": "send text only",
        "contents.parts.fileData": "send text only",
        "contents.parts.functionResponse.parts": "send text only",
        "generationConfig.logprobs": "set responseLogprobs alone: only the sampled tokens have logprobs",
        "generationConfig.responseFormat": "use responseMimeType with responseJsonSchema",
    },
)


class Gemini:
    """The dialect; see `wire.dialect.Dialect`."""

    name = "gemini"
    call_prefix = ""
    support = _SUPPORT

    def decode(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Conversation:  # Any: JSON
        """The canonical request. Raises BadRequest. No header names a thread: Gemini CLI's ids are per installation."""
        return gemini_request.read(body, _SUPPORT)

    def encoder(self, request: Conversation, reply_id: str) -> gemini_answer.GeminiStream:
        """A fresh encoder."""
        return gemini_answer.GeminiStream(request, reply_id)

    def encode(self, request: Conversation, reply: Reply) -> dict[str, Any]:  # Any: JSON
        """The plain answer."""
        return gemini_answer.whole(request, reply)

    def counted(self, tokens: int) -> dict[str, Any]:  # Any: JSON
        """The answer to `countTokens`."""
        return {"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]}

    def model(self, name: str, context: int) -> dict[str, Any]:  # Any: JSON
        """One model as the API describes it; prompt and answer share its context."""
        return {
            "name": f"models/{name.removeprefix('models/')}",
            "version": "001",
            "displayName": name.removeprefix("models/"),
            "description": "",
            "inputTokenLimit": context,
            "outputTokenLimit": context,
            "supportedGenerationMethods": ["generateContent", "countTokens"],
            "temperature": 1,
            "maxTemperature": 2,
            "topP": 0.95,
            "topK": 64,
            "thinking": True,
        }

    def models(self, names: Sequence[str], context: int) -> dict[str, Any]:  # Any: JSON
        """The list of models, whole: there is no next page."""
        return {"models": [self.model(name, context) for name in names]}

    def error(self, error: PolarError) -> dict[str, Any]:  # Any: JSON
        """The body of a plain error."""
        return gemini_answer.failure(error)

    def status(self, error: PolarError) -> int:
        """The HTTP status of a plain error."""
        return error.status
