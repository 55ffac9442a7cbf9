"""Parts of APIs that are translated to a chat turn: upper bounds as limits, errors in their words, whole answers."""

import re
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from troupellm.protocol.api.chat import ChatRequest
from troupellm.protocol.errors import ContextLengthExceeded, InvalidRequest, TroupeError
from troupellm.protocol.params.chat_events import (
    CallArguments,
    CallStart,
    Content,
    Finished,
    Reasoning,
    TurnChoice,
    TurnEvent,
)
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


Names = Iterable[tuple[str, str]]
"""The chat API's name of a field, and this API's; the first that fits is taken."""


def relabel(error: TroupeError, names: Names) -> TroupeError:
    """The same error, of the field that the client has sent."""
    if not isinstance(error, InvalidRequest) or error.param is None:
        return error
    for theirs, ours in names:
        rest = error.param[len(theirs) :]
        if error.param.startswith(theirs) and rest[:1] in ("", ".", "["):
            error.message = ours.join(_field(theirs).split(error.message))
            error.args = (error.message,)
            error.param = ours + rest
            break
    return error


def _field(name: str) -> re.Pattern[str]:
    """Where a text names a field. Names that are English words too do so where a sentence begins, or with a path."""
    whole = rf"(?<![\w.]){re.escape(name)}(?!\w)"
    return re.compile(rf"(?:^|(?<=: )){re.escape(name)}(?!\w)|{whole}(?=\[|\.\w)" if name.isalpha() else whole)


def relabelled(exchange: Exchange, error: TroupeError, names: Names) -> TroupeError:
    """The same for an error that ends an exchange, which no other names are put into then."""
    exchange.renames = {}
    return relabel(error, names)


def chunks_of(choice: TurnChoice) -> list[TurnEvent]:
    """A whole answer as a stream that brings it in one go."""
    events = []
    if choice.reasoning:
        events.append(TurnEvent(0, Reasoning(choice.reasoning)))
    if choice.content is not None:
        events.append(TurnEvent(0, Content(choice.content), choice.token_ids, choice.logprobs))
    for number, call in enumerate(choice.tool_calls):
        events.append(TurnEvent(0, CallStart(number, call.id, call.name)))
        events.append(TurnEvent(0, CallArguments(number, call.arguments)))
    events.append(TurnEvent(0, Finished(choice.finish_reason, choice.stop_reason)))
    return events
