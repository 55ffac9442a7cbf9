"""Messages whose parts take too long to be read on the event loop."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from troupellm.protocol.api.anthropic import InputMessage
from troupellm.protocol.api.chat import ChatMessage
from troupellm.server.base.body import is_large
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload
from troupellm.server.openai.messages import has_many_parts

T = TypeVar("T")
_Messages = Sequence[ChatMessage] | Sequence[InputMessage]


def has_slow_parts(exchange: Exchange, messages: _Messages) -> bool:
    nested = is_large(exchange) and any(isinstance(message.content, list | dict) for message in messages)
    return nested or has_many_parts(messages)


async def read_parts(exchange: Exchange, messages: _Messages, work: Callable[[], T]) -> T:
    """The result of work that reads every part of the messages: on a thread where that takes long.

    Raises:
        HttpError: 503, the machine gives no more threads.
    """
    return await offload(work) if has_slow_parts(exchange, messages) else work()
