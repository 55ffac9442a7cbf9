"""Errors as HTTP: the one place that knows status codes. The shape is OpenAI's, so that its clients understand it."""

import logging
import math
import secrets
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from troupellm.actors.runtime.thread_pool import clear_functions
from troupellm.protocol.api.chat import AnthropicErrorBody, AnthropicErrorObject, ErrorObject
from troupellm.protocol.errors import (
    Conflict,
    ContextLengthExceeded,
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
    KVLoadFailed,
    ModelLoadError,
    ModelNotFound,
    RateLimited,
    RequestAborted,
    RequestFailed,
    TroupeError,
    WorkerCrashed,
)
from troupellm.server.base.ratelimits import ratelimit_headers

logger = logging.getLogger("troupellm.server")

MAX_MESSAGE = 512
MAX_RETRY_AFTER = 60
"""Seconds. openai-python gives up at once when told to wait more than 120."""

Headers = tuple[tuple[bytes, bytes], ...]

ErrorShape = Literal["openai", "responses", "anthropic", "ollama"]
"""Whose error bodies a route has. `responses` is OpenAI's body with the statuses that clients of responses act on."""
OverloadStatus = Literal[429, 503]
"""503 lets a balancer try the next server."""
OVERLOADED = "server_is_overloaded"
"""The code after which Codex waits and tries again."""

_INVALID = "invalid_request_error"
_UNAVAILABLE = "service_unavailable_error"
_PERMISSION = "permission_error"
_SERVER = "server_error"
_RATE = "rate_limit_error"
_CLOSE: Headers = ((b"connection", b"close"),)
_FULL: dict[ErrorShape, tuple[int, str]] = {
    "openai": (429, _RATE),
    "responses": (503, _UNAVAILABLE),
    "anthropic": (529, _UNAVAILABLE),
    "ollama": (503, _UNAVAILABLE),
}
"""Status and type of a full waiting queue. Coding agents wait after 503 and 529, and end the turn after 429."""

_TABLE: tuple[tuple[type[TroupeError], int, str], ...] = (
    # error, status, type; the first match wins
    (ContextLengthExceeded, 400, _INVALID),
    (InvalidRequest, 400, _INVALID),
    (ModelNotFound, 404, _INVALID),
    (Conflict, 409, _INVALID),
    (EngineOverloaded, 429, _RATE),
    (EngineStopped, 503, _UNAVAILABLE),
    (WorkerCrashed, 503, _UNAVAILABLE),
    (KVLoadFailed, 503, _UNAVAILABLE),
    (RequestAborted, 503, _UNAVAILABLE),
    (ModelLoadError, 503, _UNAVAILABLE),
    (RequestFailed, 500, _SERVER),
)


_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
"""Anthropic's names of the statuses; the others are invalid_request_error below 500 and api_error above."""
_ANTHROPIC_CODES = frozenset({"thread_not_found"})
"""Those by which Anthropic's clients recover; the other codes are not of its API."""


class HttpError(TroupeError):
    """A refusal by HTTP itself, before or beside the engine."""

    def __init__(
        self, status: int, message: str, *, code: str, headers: Headers = (), retry: bool = False, kind: str = _INVALID
    ) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.headers = headers
        self.retry = retry
        self.kind = kind


class ClientGone(Exception):
    """The client hung up, or stopped reading for longer than allowed: nothing can be answered."""


class ErrorAnswer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    headers: Headers
    code: str
    param: str | None = None


def unknown_url() -> HttpError:
    return HttpError(404, "unknown URL: paths are exact, see /v1/models for what is served", code="unknown_url")


def method_not_allowed(allow: str) -> HttpError:
    headers = ((b"allow", allow.encode()),)
    return HttpError(405, f"this URL answers {allow} only", code="method_not_allowed", headers=headers)


def no_websockets() -> HttpError:
    """426: Codex goes on with plain HTTP after this status only."""
    message = "this URL speaks no WebSocket: send the request as plain HTTP"
    return HttpError(426, message, code="websockets_not_served", headers=_CLOSE)


def unauthorized() -> HttpError:
    message = "a valid API key is needed: send it as Authorization: Bearer KEY"
    return HttpError(401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))


def too_large(limit: int, *, continues: bool = False) -> HttpError:
    """
    Args:
        continues: the body is small enough, and the conversation that it continues is not.
    """
    message = f"the request body is larger than {limit} bytes"
    if continues:
        whole = "the request and the conversation that it continues are larger than"
        message = f"{whole} {limit} bytes together: send a shorter conversation whole"
    return HttpError(413, message, code="request_too_large", headers=_CLOSE)


def headers_too_large(limit: int) -> HttpError:
    message = f"the request's target and headers are larger than {limit} bytes"
    return HttpError(431, message, code="headers_too_large", headers=_CLOSE)


def bad_request_head(status: int) -> HttpError:
    """The error for bytes that are no request: 431 for too many of them, else 400, odd encodings too."""
    code = {431: "headers_too_large", 501: "unsupported_transfer_encoding"}.get(status, "invalid_http")
    texts = {431: "the request's headers are too large", 501: "the request's transfer encoding is not supported"}
    message = texts.get(status, "this is not a valid HTTP request")
    return HttpError(400 if status == 501 else status, message, code=code, headers=_CLOSE)


def body_timeout(seconds: float) -> HttpError:
    message = f"the request body did not arrive within {seconds:g} seconds"
    return HttpError(408, message, code="request_timeout", headers=_CLOSE, retry=True)


def head_timeout(seconds: float) -> HttpError:
    message = f"the request's head did not arrive within {seconds:g} seconds"
    return HttpError(408, message, code="request_timeout", headers=_CLOSE, retry=True)


def ambiguous_head(name: str) -> HttpError:
    return HttpError(400, f"the request has more than one header {name}", code="invalid_http", headers=_CLOSE)


def misdirected() -> HttpError:
    message = "the Host header does not name this server; --allowed-hosts says which names it goes by"
    return HttpError(421, message, code="host_not_allowed", headers=_CLOSE)


def origin_not_allowed() -> HttpError:
    message = "pages of another origin may not call this server; --allowed-origins says which may"
    return HttpError(403, message, code="origin_not_allowed", kind=_PERMISSION)


def unsupported_media_type(message: str, encodings: Sequence[str] = ()) -> HttpError:
    """`encodings` are those of a body that would be taken."""
    headers = ((b"accept-encoding", ", ".join(encodings).encode()),) if encodings else ()
    return HttpError(415, message, code="unsupported_media_type", headers=(*headers, *_CLOSE))


def not_ready(message: str, *, code: str, close: bool = False) -> HttpError:
    """The server is starting, draining or dead."""
    headers = _CLOSE if close else ()
    return HttpError(503, message, code=code, headers=headers, retry=True, kind=_UNAVAILABLE)


def invalid_json(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_json")


def flatten(error: BaseException) -> BaseException:
    """The one error inside nested groups (the first, where there are several)."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def clear_locals(error: BaseException) -> None:
    """Free what the frames of an error's traceback hold, a request's body among it.

    An error that its own frame names would keep all of it until the next garbage collection. The causes of an error may
    be those of other requests too, whose coroutines wait: of these only functions are cleared.
    """
    pending, causes = [error], list[BaseException | None]()
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        causes += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions
    while causes:
        cause = causes.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        clear_functions(cause)
        causes += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        causes += [cause.__cause__, cause.__context__]


def answer(
    error: BaseException,
    *,
    shape: ErrorShape = "openai",
    renames: Mapping[str, str] | None = None,
    extra: Mapping[str, object] | None = None,
    overload_status: OverloadStatus | None = None,
) -> ErrorAnswer:
    """Status, body and headers for an error. A foreign error is logged and shown as an internal error.

    `renames` gives the API's own names of sampling parameters; `extra` is added beside the error object;
    `overload_status` is that of a full waiting queue and of a key at its limit; None: the one that clients of the API
    act on (see `_FULL`), and 429 for a key.
    """
    error = flatten(error)
    if not isinstance(error, TroupeError):
        logger.error("internal error", exc_info=error)
        error = RequestFailed("internal error", code="internal_error")
    status, kind, retry, headers = _classify(error, shape, overload_status)
    message, param, code = error.message, error.param, error.code
    if status == 503 and shape == "responses" and isinstance(error, EngineOverloaded) and code == "slow_down":
        code = OVERLOADED
    if renames and param is not None and param in renames:
        message, param = message.replace(param, renames[param]), renames[param]
    if shape == "anthropic" and isinstance(error, ContextLengthExceeded):
        message = f"{_length_for_anthropic(error)} {message}"
    shown = ErrorObject(message=message[:MAX_MESSAGE], type=kind, param=param, code=code)
    if isinstance(error, RateLimited):
        headers = (*headers, *ratelimit_headers(error.quota, anthropic=shape == "anthropic"))
    if status in (429, 503, 529):
        headers = (*headers, *_retry_headers(error))
    headers = (*headers, (b"x-should-retry", b"true" if retry else b"false"))
    content = _shaped(shown, status, shape) | dict(extra or {})
    return ErrorAnswer(status, msgspec.json.encode(content), headers, code, param)


def in_stream(error_answer: ErrorAnswer) -> bytes:
    """The body of an error, in OpenAI's shape, as an event of a stream that has begun.

    Its message has the code too: clients that read chunks of two kinds keep nothing else of an error.
    """
    content = msgspec.json.decode(error_answer.body)
    content["error"]["message"] = with_code(content["error"]["message"], error_answer.code)
    return msgspec.json.encode(content)


def with_code(message: str, code: str | None) -> str:
    """A message for clients that drop the code beside it."""
    end = f" ({code})" if code else ""
    return message[: MAX_MESSAGE - len(end)] + end


def _shaped(error: ErrorObject, status: int, shape: ErrorShape) -> dict[str, Any]:
    if shape == "ollama":
        return {"error": error.message}
    if shape != "anthropic":
        return {"error": msgspec.to_builtins(error)}
    kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"error_code": error.code} if error.code in _ANTHROPIC_CODES else UNSET
    body = AnthropicErrorBody(error=AnthropicErrorObject(type=kind, message=error.message, details=details))
    return dict(msgspec.to_builtins(body))


def _length_for_anthropic(error: ContextLengthExceeded) -> str:
    """The sentence that Claude Code reads: it compacts by the gap between the numbers, or lowers max_tokens."""
    prompt = error.got - error.answer_tokens
    if error.answer_tokens and prompt < error.limit:
        return f"input length and `max_tokens` exceed context limit: {prompt} + {error.answer_tokens} > {error.limit}."
    most = max(1, min(error.limit, prompt - 1))  # a prompt that fills the context leaves no room for an answer
    return f"prompt is too long: {max(prompt, most + 1)} tokens > {most} maximum."


def _classify(
    error: TroupeError, shape: ErrorShape, overload_status: OverloadStatus | None
) -> tuple[int, str, bool, Headers]:
    if isinstance(error, HttpError):
        return error.status, error.kind, error.retry, error.headers
    if isinstance(error, EngineOverloaded):
        if overload_status == 503:
            return 503, _UNAVAILABLE, True, ()
        if overload_status is None and not isinstance(error, RateLimited):
            return *_FULL[shape], True, ()
    for family, status, kind in _TABLE:
        if isinstance(error, family):
            ending = isinstance(error, EngineStopped) and error.code in ("draining", "stopped")
            return status, kind, error.retryable or status == 503, _CLOSE if ending else ()
    logger.error("error without a status", exc_info=error)
    return 500, _SERVER, False, ()


def _retry_headers(error: TroupeError) -> Headers:
    """In milliseconds and in whole seconds, with jitter so that refused clients do not come back together."""
    wanted = error.retry_after if isinstance(error, EngineOverloaded) else 1.0
    milliseconds = min(math.ceil(wanted * 1000) + secrets.randbelow(1000), 1000 * MAX_RETRY_AFTER)
    seconds = math.ceil(milliseconds / 1000)
    return ((b"retry-after", str(seconds).encode()), (b"retry-after-ms", str(milliseconds).encode()))
