"""The error tree. Every error that a user can see is one of these.

Two texts never mix: `message` is safe for a client (no paths, addresses, other users' text); what the log needs goes
into the exception's notes and cause. HTTP status is decided in `server/base/errors.py` alone.
"""

from typing import ClassVar

import msgspec

from troupellm.protocol.quota import Quota


class TroupeError(Exception):
    """Root of all errors raised to users.

    Attributes:
        message: client-safe text, names the field and the allowed range where there is one.
        param: the request field at fault, as a JSON path without the leading `$.`, or None.
        code: a stable string for programs.
        retryable: the same request may succeed later.
        entry: which prompt of a call with many it is about; None where that is not told.
    """

    default_code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    entry: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code


class InvalidRequest(TroupeError, ValueError):
    """The request can never succeed as it is."""

    default_code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and wanted tokens do not fit the context (or the whole KV cache).

    Clients search the message for "maximum context length is N tokens" and compact the conversation when they find it:
    every message of this class begins with that sentence. See `context_sentence`.

    Attributes:
        limit: tokens that prompt and answer may have together.
        got: tokens of the prompt and the answer, as far as they are known.
        answer_tokens: those of `got` that the answer may have; 0 where the prompt is too long by itself.
    """

    default_code = "context_length_exceeded"

    def __init__(self, message: str, *, limit: int, got: int, param: str | None = None, answer_tokens: int = 0) -> None:
        super().__init__(message, param=param)
        self.limit = limit
        self.got = got
        self.answer_tokens = answer_tokens


def context_sentence(limit: int, reason: str = "") -> str:
    """The sentence that clients recognize.

    Args:
        limit: tokens.
        reason: the cause, where the model itself could take more.
    """
    return f"This model's maximum context length is {limit} tokens{f' ({reason})' if reason else ''}."


class ModelNotFound(TroupeError):
    default_code = "model_not_found"


class EngineOverloaded(TroupeError):
    """The waiting queue is full; nothing was started. Try again after `retry_after` seconds."""

    default_code = "slow_down"
    retryable = True

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimited(EngineOverloaded):
    """An API key has used what it may use for now; others are not concerned."""

    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float = 1.0, quota: Quota | None = None) -> None:
        super().__init__(message, retry_after=retry_after)
        for name, value in msgspec.structs.asdict(quota or Quota()).items():  # plain, so that errors cross processes
            setattr(self, name, value)

    @property
    def quota(self) -> Quota:
        """The rest of the key's limits."""
        return Quota(**{name: getattr(self, name) for name in Quota.__struct_fields__})


class EngineStopped(TroupeError):
    """The engine is starting, draining or gone."""

    default_code = "draining"
    retryable = True


class RequestFailed(TroupeError):
    """The engine could not execute this one request; the same request would fail again."""

    default_code = "engine_request_failed"


class RequestAborted(TroupeError):
    """The request was ended by its owner or by the server (stalled reader, deadline)."""

    default_code = "request_aborted"


REFUSED = "invalid_parameter"
"""Code of a row's failure that is its request's own fault."""
INVALID_GUIDE = "invalid_schema"
"""The same of its guide's."""
GUIDE_SPENT = "guide_spent"
"""The same, where the row goes on once its guide has been built again."""


def row_failure(message: str, code: str) -> TroupeError:
    """The error for the owner of a failed row. A refusal's text begins with the name of its field."""
    if code == REFUSED:
        return InvalidRequest(message, param=message.partition(":")[0])
    if code in (INVALID_GUIDE, GUIDE_SPENT):
        return InvalidRequest(message, param=message.partition(":")[0], code=INVALID_GUIDE)
    return RequestFailed(message, code=code)


class KVLoadFailed(TroupeError):
    """A connector did not give the KV blocks that it said it has, and its policy is to fail rather than to compute."""

    default_code = "kv_load_failed"
    retryable = True


class QueueTimeout(RequestAborted):
    """The request waited longer than it may before it began; nothing was computed for it."""

    default_code = "server_is_overloaded"
    retryable = True


class WorkerCrashed(TroupeError):
    """The worker died while it had this request. `__cause__` is the root cause."""

    default_code = "engine_restarting"
    retryable = True


class GraphCaptureError(WorkerCrashed):
    """A CUDA graph could not be captured, after which the device's memory is in no known state: the worker is lost, and
    the next one does without graphs."""


class ModelLoadError(TroupeError):
    """The model cannot be served. `message` is one line that names file and field; `hint` says what to do."""

    default_code = "model_load_failed"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")


class WeightsChanged(ModelLoadError):
    """The weights on disk are others than those that the engine serves. Answers that are under way would mix both."""

    default_code = "weights_changed"


class AdapterError(InvalidRequest):
    """An adapter cannot be served. `message` names file, tensor or key, and value; `hint` says what would work."""

    default_code = "invalid_adapter"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}; {hint}")
        self.hint = hint


class Conflict(TroupeError):
    """The request conflicts with the present state of its object."""

    default_code = "conflict"


class WrongEventLoop(TroupeError, RuntimeError):
    """The call came from another event loop, thread or process than the engine lives in; nothing was started."""

    default_code = "wrong_event_loop"


class ConfigError(TroupeError, ValueError):
    """A setting is wrong; `param` names it."""

    default_code = "invalid_config"
