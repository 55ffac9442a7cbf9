"""The routes of Anthropic's messages API."""

from functools import partial

from troupellm.protocol.anthropic import MESSAGE_EVENTS, CountTokensRequest, Message, MessagesRequest, TokenCount
from troupellm.server.host import EngineHost
from troupellm.server.messages import create
from troupellm.server.router import Route


def routes(host: EngineHost, prefix: str) -> list[Route]:
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
    ]
