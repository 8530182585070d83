"""What can go wrong at each boundary, what the harness is told, and who tries again.

| boundary | class | status | who retries |
|---|---|---|---|
| harness -> gateway: the request cannot be understood | BadRequest | 400 | nobody: the request is wrong |
| harness -> gateway: the prompt does not fit | ContextOverflow | 400 | the harness, after compacting |
| harness -> gateway: the body is larger than any prompt | TooLarge | 413 | nobody |
| harness -> gateway: unknown session or wrong secret | Unauthorized | 401 | nobody |
| harness -> gateway: the session has used its turns or tokens | BudgetUsed | 429 | nobody: the harness ends |
| harness -> gateway: the session is over | Sealed | 403 | nobody: the call is a straggler |
| harness -> gateway: not a route we answer | NotFound | 404 | nobody |
| gateway -> engine: down, restarting, full | EngineUnavailable | 503 | the gateway waits first, then the harness |
| gateway -> engine: refuses or answers nonsense | EngineError | 500 | the harness |
| gateway: tokenizer is not the engine's | TokenizerMismatch | 500 | nobody: the run is misconfigured |
| gateway -> disk: the journal cannot be written | JournalError | 500 | the harness; the session is marked |

Codex, Claude Code and Gemini CLI retry 5xx for minutes; a 400 ends their run at once (observed 2026-11-29). So
EngineUnavailable is raised only after `polar_wait` seconds of waiting.

Each dialect in `wire` turns these into its provider's own shape; this module knows no protocol.
"""

from __future__ import annotations


class PolarError(Exception):
    """Base of all errors that a harness may be told about."""

    status: int = 500
    """HTTP status of a plain answer."""
    kind: str = "internal"
    """Stable name, recorded in the call's `error_kind` column."""


class BadRequest(PolarError):
    """The request is malformed, or asks for something that would change its meaning if ignored."""

    status = 400
    kind = "bad_request"

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        """Path of the offending field, where one field is to blame: OpenAI's `param`."""
        self.code = code
        """OpenAI's stable name of the mistake, where it has one."""


class ContextOverflow(PolarError):
    """The prompt does not fit the model's context; worded by each dialect so that harnesses compact."""

    status = 400
    kind = "context_overflow"

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {prompt_tokens} tokens, the model's context holds {limit}")
        self.prompt_tokens = prompt_tokens
        """Length of the rendered prompt, in tokens."""
        self.limit = limit
        """Length of the engine's context, in tokens."""


class TooLarge(PolarError):
    """The body is larger than any prompt can be, perhaps only once it is decompressed."""

    status = 413
    kind = "too_large"


class Unauthorized(PolarError):
    """Sessions are registered, and this call's name or secret is not one of theirs."""

    status = 401
    kind = "unauthorized"


class BudgetUsed(PolarError):
    """The session has used its turns or tokens; worded by each dialect as by a provider whose account is used up."""

    status = 429
    kind = "budget_used"


class Sealed(PolarError):
    """The session is over: its harness was ended, and this call comes from what it left behind."""

    status = 403
    kind = "sealed"


class NotFound(PolarError):
    """A provider's route that this gateway does not answer."""

    status = 404
    kind = "not_found"


class EngineUnavailable(PolarError):
    """The engine could not be reached, or stayed overloaded, for as long as we were willing to wait."""

    status = 503
    kind = "engine_unavailable"


class EngineError(PolarError):
    """The engine answered with an error, or with something that is not the contract."""

    status = 500
    kind = "engine_error"


class TokenizerMismatch(PolarError):
    """The tokenizer given by `polar_tokenizer` does not agree with the engine's."""

    status = 500
    kind = "tokenizer_mismatch"


class JournalError(PolarError):
    """The finished call could not be made durable, so it must not be answered."""

    status = 500
    kind = "journal_error"
