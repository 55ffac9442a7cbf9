"""`truncation: auto`: a conversation that does not fit the context loses its oldest turns, and nothing else does.

It loses so many that the next turns fit too, and later turns begin at the same place: prompts of a conversation have a
common beginning, which the prefix cache holds.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from troupellm.protocol.api.chat import ChatMessage, ChatRequest
from troupellm.protocol.errors import ContextLengthExceeded
from troupellm.server.base.exchange import Exchange
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.chat_turn import prepare

PART_KEPT: Final = 0.6
"""Part of the room for a prompt that a cut conversation may fill."""


class Truncated(msgspec.Struct, frozen=True):
    chat: ChatRequest
    border: int
    """How many of the oldest turns are left out."""


async def truncated(host: ServerState, exchange: Exchange, chat: ChatRequest, border: int) -> Truncated:
    """The request without its oldest turns, if it does not fit beside the answer that it allows.

    System messages at the start stay. A turn goes whole, from a user's message to the next one, so no tool's result is
    left without its call; the last turn stays even where it does not fit, and is refused then. Costs as many
    renderings as the number of turns has binary digits, none of them of more text than could fit.

    Args:
        border: how many turns the response before this one has left out: they stay out.
    """
    engine, messages = host.require(), chat.messages
    room = engine.limits.max_model_len - (chat.max_completion_tokens or 1)

    async def fits(kept: Sequence[ChatMessage], most: int) -> bool:
        prepared = await prepare(host, exchange, msgspec.structs.replace(chat, messages=list(kept)))
        try:
            return await host.counting.number(engine, exchange.key, prepared.prompt, room) <= most
        except ContextLengthExceeded:
            return False

    begin = next((place for place, message in enumerate(messages) if message.role != "system"), len(messages))
    later = [place for place, message in enumerate(messages) if message.role == "user" and place > begin]
    turns = [begin, *later]

    def behind(number: int) -> list[ChatMessage]:
        return [*messages[:begin], *messages[turns[number] :]]

    border = min(border, len(later))
    if not await fits(behind(border), room):
        low, high = min(border + 1, len(later)), len(later)  # of the turns, the first that may stay
        while low < high:
            middle = (low + high) // 2
            if await fits(behind(middle), int(room * PART_KEPT)):
                high = middle
            else:
                low = middle + 1
        border = low
    return Truncated(msgspec.structs.replace(chat, messages=behind(border)) if border else chat, border)
