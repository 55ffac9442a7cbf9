"""The routes of the responses API."""

from functools import partial
from typing import Any

from troupellm.protocol.api.conversations import (
    AddItems,
    ConversationItems,
    ConversationObject,
    CreateConversation,
    DeletedConversation,
    UpdateConversation,
)
from troupellm.protocol.api.response_events import EVENTS
from troupellm.protocol.api.response_objects import (
    CompactedResponse,
    DeletedResponse,
    InputItemList,
    InputTokens,
    ResponseObject,
)
from troupellm.protocol.api.responses import CompactRequest, InputTokensRequest, ResponsesRequest
from troupellm.server.base.router import Route
from troupellm.server.host.server_state import ServerState
from troupellm.server.responses import conversations, create, retrieve
from troupellm.server.responses.jobs import Jobs
from troupellm.server.responses.listing import ItemsQuery


def routes(host: ServerState, prefix: str) -> list[Route]:
    jobs = Jobs(host)
    base = f"{prefix}/responses"
    return [
        Route(
            method="POST",
            path=base,
            handler=partial(create.create, host, jobs),
            body=ResponsesRequest,
            summary="Generate a response to a conversation",
            response=ResponseObject,
            streams=True,
            events=EVENTS,
            own_end=True,
            error_shape="responses",
        ),
        Route(
            method="POST",
            path=f"{base}/input_tokens",
            handler=partial(create.input_tokens, host),
            body=InputTokensRequest,
            summary="Count the tokens of a response's prompt",
            response=InputTokens,
            error_shape="responses",
        ),
        Route(
            method="POST",
            path=f"{base}/compact",
            handler=partial(create.compact, host),
            body=CompactRequest,
            summary="Summarize a conversation as one item",
            response=CompactedResponse,
            error_shape="responses",
        ),
        *_kept_routes(host, jobs, f"{base}/{{response_id}}"),
        *_conversation_routes(host, f"{prefix}/conversations"),
    ]


def _kept_routes(host: ServerState, jobs: Jobs, one: str) -> list[Route]:
    def route(method: str, path: str, handler: Any, summary: str, response: Any, **more: Any) -> Route:
        bound = partial(handler, host, jobs)
        return Route(method=method, path=path, handler=bound, summary=summary, response=response, **more)

    return [
        route(
            "GET",
            one,
            retrieve.retrieve,
            "A response that was kept",
            ResponseObject,
            query=retrieve.RetrieveQuery,
            streams=True,
            events=EVENTS,
            own_end=True,
        ),
        route("DELETE", one, retrieve.delete, "Forget a response", DeletedResponse),
        route("POST", f"{one}/cancel", retrieve.cancel, "Cancel a background response", ResponseObject),
        route(
            "GET",
            f"{one}/input_items",
            retrieve.input_items,
            "What a response was made from",
            InputItemList,
            query=ItemsQuery,
        ),
    ]


def _conversation_routes(host: ServerState, base: str) -> list[Route]:
    one, items = f"{base}/{{conversation_id}}", f"{base}/{{conversation_id}}/items"

    def route(method: str, path: str, handler: Any, summary: str, response: Any, **more: Any) -> Route:
        bound = partial(handler, host)
        return Route(
            method=method, path=path, handler=bound, summary=summary, response=response, problems=(404,), **more
        )

    kept = conversations
    return [
        route("POST", base, kept.create, "Keep a conversation", ConversationObject, body=CreateConversation),
        route("GET", one, kept.retrieve, "A conversation that is kept", ConversationObject),
        route("POST", one, kept.update, "Change its metadata", ConversationObject, body=UpdateConversation),
        route("DELETE", one, kept.delete, "Forget a conversation", DeletedConversation),
        route("GET", items, kept.list_items, "What a conversation holds", ConversationItems, query=ItemsQuery),
        route("POST", items, kept.add_items, "Add items to a conversation", ConversationItems, body=AddItems),
        route("GET", f"{items}/{{item_id}}", kept.retrieve_item, "An item of a conversation", dict[str, Any]),
        route("DELETE", f"{items}/{{item_id}}", kept.delete_item, "Remove an item", ConversationObject),
    ]
