"""The routes of Anthropic's messages API."""

from functools import partial
from typing import Any

from troupellm.protocol.api.anthropic import MESSAGE_EVENTS, CountTokensRequest, Message, MessagesRequest, TokenCount
from troupellm.protocol.api.message_batches import (
    MessageBatch,
    MessageBatchDeleted,
    MessageBatchesQuery,
    MessageBatchList,
    MessageBatchRequest,
)
from troupellm.server.base.router import Route
from troupellm.server.host.server_state import ServerState
from troupellm.server.messages import batches, create


def routes(host: ServerState, prefix: str) -> list[Route]:
    return [
        Route(
            method="POST",
            path=f"{prefix}/messages",
            handler=partial(create.create, host),
            body=MessagesRequest,
            summary="Answer a conversation (Anthropic's API).",
            response=Message,
            streams=True,
            events=MESSAGE_EVENTS,
            error_shape="anthropic",
        ),
        Route(
            method="POST",
            path=f"{prefix}/messages/count_tokens",
            handler=partial(create.count_tokens, host),
            body=CountTokensRequest,
            summary="Count the tokens of a message's prompt (Anthropic's API).",
            response=TokenCount,
            error_shape="anthropic",
        ),
        *_batch_routes(host, prefix),
    ]


def _batch_routes(host: ServerState, prefix: str) -> list[Route]:
    base, one = f"{prefix}/messages/batches", f"{prefix}/messages/batches/{{batch_id}}"

    def route(method: str, path: str, handler: Any, summary: str, response: Any, **more: Any) -> Route:
        bound, problems = partial(handler, host, prefix), (404, *more.pop("problems", ()))
        return Route(
            method=method,
            path=path,
            handler=bound,
            summary=f"{summary} (Anthropic's API).",
            response=response,
            error_shape="anthropic",
            problems=problems,
            **more,
        )

    return [
        route(
            "POST",
            base,
            batches.create,
            "Answer many messages, when there is room",
            MessageBatch,
            body=MessageBatchRequest,
        ),
        route("GET", base, batches.listing, "Batches of messages", MessageBatchList, query=MessageBatchesQuery),
        route("GET", one, batches.retrieve, "How far a batch of messages is", MessageBatch),
        route("DELETE", one, batches.delete, "Forget a batch of messages", MessageBatchDeleted, problems=(409,)),
        route("POST", f"{one}/cancel", batches.cancel, "Answer no more of a batch", MessageBatch, problems=(409,)),
        route("GET", f"{one}/results", batches.results, "Results of a batch", None, answers="application/x-jsonl"),
    ]
