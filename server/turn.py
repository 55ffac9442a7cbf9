"""The chat turn, which every chat API goes through: from a checked body to parsed pieces of the answer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from troupellm.actors.stream import Stream
from troupellm.actors.turn import Turn as ParsedTurn, TurnAnswer
from troupellm.protocol.dialect import TurnEvent
from troupellm.protocol.openai import ChatRequest
from troupellm.protocol.sampling import SamplingParams
from troupellm.server.exchange import Exchange
from troupellm.server.host import EngineHost
from troupellm.server.parameters import chat_prompt, refuse_unsupported, renames, sampling_params
from troupellm.server.streaming import account, options

__all__ = ["Turn", "TurnAnswer", "open_turn"]


class Turn(ParsedTurn):
    """A turn that keeps the books of its exchange: tokens and times for the access line, what is left of a quota."""

    def __init__(self, exchange: Exchange, stream: Stream, params: SamplingParams, model: str) -> None:
        super().__init__(stream, params.n)
        self._exchange = exchange
        self.params = params
        self.model = model
        """The name to report, of those that the model is served under."""

    async def opened(self) -> None:
        await super().opened()
        self._exchange.prompt_tokens = len(self.prompt_token_ids)

    async def __anext__(self) -> list[TurnEvent]:
        events = await super().__anext__()
        self._exchange.delivered(sum([len(event.token_ids) for event in events]))
        return events

    async def collect(self) -> TurnAnswer:
        answer = await super().collect()
        account(self._exchange, [answer.completion])
        return answer

    def __aiter__(self) -> Self:
        return self


@asynccontextmanager
async def open_turn(
    host: EngineHost, exchange: Exchange, request: ChatRequest, *, streaming: bool, request_id: str | None = None
) -> AsyncIterator[Turn]:
    """Check a chat request and open it in the engine; leaving the block ends it.

    Args:
        streaming: False when only `collect` is used: one wake at the end.
        request_id: the engine's name for it, which shows in logs; the engine makes one otherwise.

    Raises:
        TroupeError: it was refused, or (from the turn, once it is read) failed.
    """
    engine = host.require()
    model = host.check_model(request.model)
    exchange.renames = renames(request)
    refuse_unsupported(request, trust_chat_template=host.config.trust_request_chat_template)
    prompt = chat_prompt(request, request.messages)
    params = sampling_params(request, engine)
    given = options(exchange, request)
    async with engine.stream(prompt, params, request_id=request_id, streaming=streaming, **given) as stream:
        exchange.quota = stream.quota
        yield Turn(exchange, stream, params, model)
