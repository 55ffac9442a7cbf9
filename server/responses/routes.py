"""The routes of the responses API."""

from functools import partial
from typing import Any

from troupellm.protocol.response_events import EVENTS
from troupellm.protocol.response_objects import (
    CompactedResponse,
    DeletedResponse,
    InputItemList,
    InputTokens,
    ResponseObject,
)
from troupellm.protocol.responses import CompactRequest, InputTokensRequest, ResponsesRequest
from troupellm.server.host import EngineHost
from troupellm.server.responses import create, stored
from troupellm.server.responses.jobs import Jobs
from troupellm.server.router import Route


def routes(host: EngineHost, prefix: str) -> list[Route]:
    jobs = Jobs(host)
    base = f"{prefix}/responses"
    one = f"{base}/{{response_id}}"

    def of_one(method: str, path: str, handler: Any, summary: str, response: Any, **more: Any) -> Route:
        bound = partial(handler, host, jobs)
        return Route(method=method, path=path, handler=bound, summary=summary, response=response, **more)

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
        of_one(
            "GET", one, stored.retrieve, "A response that was kept", ResponseObject,
            query=stored.RetrieveQuery, streams=True, events=EVENTS, own_end=True,
        ),
        of_one("DELETE", one, stored.delete, "Forget a response", DeletedResponse),
        of_one("POST", f"{one}/cancel", stored.cancel, "Cancel a background response", ResponseObject),
        of_one(
            "GET", f"{one}/input_items", stored.input_items, "What a response was made from", InputItemList,
            query=stored.ItemsQuery,
        ),
    ]  # fmt: skip
