"""POST /invocations, SageMaker's one door: the fields of the body say which route it is for."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from troupellm.protocol.api.chat import ChatRequest, CompletionRequest
from troupellm.protocol.api.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body import INLINE_BYTES, declared_bytes, invalid_field
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai import chat, completions
from troupellm.server.pooling import scoring, vectors

Handler = Callable[[ServerState, Exchange, Any], Awaitable[None]]
Kind = tuple[tuple[str, ...], type[msgspec.Struct], Handler]

_GENERATING: tuple[Kind, ...] = (
    (("messages",), ChatRequest, chat.create),
    (("prompt",), CompletionRequest, completions.create),
)
_SCORING: tuple[Kind, ...] = (
    (("query", "documents"), RerankRequest, scoring.rerank),
    (("text_1", "text_2"), ScoreRequest, scoring.score),
    (("queries", "documents"), ScoreRequest, scoring.score),
)
_BY_TASK: dict[str, tuple[type[msgspec.Struct], Handler]] = {
    "embed": (EmbeddingRequest, vectors.embeddings),
    "classify": (ClassifyRequest, vectors.classify),
}
"""Where the body has `input`, by the first task of the model."""


async def invoke(host: ServerState, exchange: Exchange, body: dict[str, Any]) -> None:
    """
    Raises:
        InvalidRequest: no route takes these fields, or the one that does refuses them.
    """
    kind, handler = _route_of(host, body)
    convert = partial(msgspec.convert, body, kind, str_keys=True)
    try:
        large = (declared_bytes(exchange) or 0) > INLINE_BYTES
        request = await offload(convert) if large else convert()
    except msgspec.ValidationError as error:
        raise invalid_field(error, kind, "the request body") from None
    await handler(host, exchange, request)


def _route_of(host: ServerState, body: dict[str, Any]) -> tuple[type[msgspec.Struct], Handler]:
    for fields, kind, handler in (*_GENERATING, *_SCORING):
        if all(body.get(field) is not None for field in fields):
            return kind, handler
    ready = host.require().ready
    if body.get("input") is not None and ready.pooling is not None:
        found = [_BY_TASK[task] for task in ready.pooling.tasks if task in _BY_TASK]
        return found[0] if found else (PoolingRequest, vectors.pooling)
    raise InvalidRequest(
        "the body must have messages, prompt, input (of a model that pools), query and documents, or text_1 and text_2",
        code="missing_required_parameter",
    )
