"""Limits on an answer's length that are upper bounds: clients set them without knowing how long the context is."""

from collections.abc import Awaitable, Callable

import msgspec

from troupellm.protocol.api.chat import ChatRequest
from troupellm.protocol.errors import ContextLengthExceeded
from troupellm.server.base.exchange import Exchange
from troupellm.server.host.server_state import ServerState


def bounded(host: ServerState, chat: ChatRequest) -> ChatRequest:
    """Without a limit that no answer can reach."""
    limit = chat.max_completion_tokens
    if limit is not None and limit >= host.require().limits.max_model_len:
        return _unbounded(chat)
    return chat


async def answer_within(
    exchange: Exchange, chat: ChatRequest, answer: Callable[[ChatRequest], Awaitable[None]]
) -> None:
    """Answer; where prompt and limit do not fit the context together, the answer may fill what the prompt leaves.

    Raises:
        ContextLengthExceeded: the prompt is too long by itself.
    """
    try:
        await answer(chat)
    except ContextLengthExceeded:
        if exchange.status or chat.max_completion_tokens is None:
            raise
        await answer(_unbounded(chat))


def _unbounded(chat: ChatRequest) -> ChatRequest:
    return msgspec.structs.replace(chat, max_completion_tokens=None)
