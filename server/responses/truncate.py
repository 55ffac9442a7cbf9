"""`truncation: auto`: a conversation that does not fit the context loses its oldest turns, and nothing else does."""

from collections.abc import Sequence

import msgspec

from troupellm.protocol.errors import ContextLengthExceeded
from troupellm.protocol.openai import ChatMessage, ChatRequest
from troupellm.server.host import EngineHost
from troupellm.server.turn import prepare


async def truncated(host: EngineHost, tenant: str, chat: ChatRequest) -> ChatRequest:
    """The request with as many of its last turns as fit beside the answer that it allows.

    System messages at the start stay. A turn goes whole, from a user's message to the next one, so no tool's result is
    left without its call; the last turn stays even where it does not fit, and is refused then. Costs as many
    renderings as the number of turns has binary digits, none of them of more text than could fit.
    """
    engine, messages = host.require(), chat.messages
    room = engine.limits.max_model_len - (chat.max_completion_tokens or 1)

    async def fits(kept: Sequence[ChatMessage]) -> bool:
        prompt, *_ = await prepare(host, msgspec.structs.replace(chat, messages=list(kept)))
        try:
            return await host.counting.number(engine, tenant, prompt, room) <= room
        except ContextLengthExceeded:
            return False

    if await fits(messages):
        return chat
    begin = next((place for place, message in enumerate(messages) if message.role != "system"), len(messages))
    turns = [place for place, message in enumerate(messages) if message.role == "user" and place > begin]
    low, high = 0, len(turns) - 1  # of the turns, the first that may stay
    while low < high:
        middle = (low + high) // 2
        if await fits([*messages[:begin], *messages[turns[middle] :]]):
            high = middle
        else:
            low = middle + 1
    if not turns:
        return chat
    return msgspec.structs.replace(chat, messages=[*messages[:begin], *messages[turns[low] :]])
