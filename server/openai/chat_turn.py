"""The chat turn, which every chat API goes through: from a checked body to parsed pieces of the answer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from troupellm.actors.client.chat_turn import ChatTurn, TurnAnswer
from troupellm.actors.client.stream import Stream
from troupellm.models.chat_parsers.served_parser import ChatParser
from troupellm.protocol.api.chat import ChatRequest
from troupellm.protocol.config.kv_hints import CacheMark
from troupellm.protocol.messages.input import ChatPrompt
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.params.tools import by_name
from troupellm.server.base.body import is_large
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload
from troupellm.server.host.served_engine import ServedEngine
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.cache_marks import marks_of_chat
from troupellm.server.openai.kv_sessions import keep_session
from troupellm.server.openai.messages import has_long_tools, has_slow_parts, read_parts, tool_use_of
from troupellm.server.openai.parameters import chat_prompt, refuse_unsupported, renames, sampling_params
from troupellm.server.openai.past_messages import plain_messages
from troupellm.server.openai.sessions import Session, session_of
from troupellm.server.openai.streaming import account, options

__all__ = ["ServedTurn", "TurnAnswer", "open_turn", "prepare"]


class ServedTurn(ChatTurn):
    """A turn that keeps the books of its exchange: tokens and times for the access line, what is left of a quota."""

    def __init__(
        self,
        exchange: Exchange,
        stream: Stream,
        params: SamplingParams,
        model: str,
        chat_parser: ChatParser | None = None,
    ) -> None:
        super().__init__(stream, params.n, chat_parser, exchange.delivered)
        self._exchange = exchange
        self.params = params
        self.model = model
        """The name to report, of those that the model is served under."""

    async def opened(self) -> None:
        await super().opened()
        self._exchange.prompt_made(len(self.prompt_token_ids))

    async def collect(self) -> TurnAnswer:
        if self._exchange.room is not None and is_large(self._exchange):
            await self.opened()
        answer = await super().collect()
        account(self._exchange, [answer.completion])
        return answer


@asynccontextmanager
async def open_turn(
    host: ServerState,
    exchange: Exchange,
    request: ChatRequest,
    *,
    streaming: bool,
    request_id: str | None = None,
    marks: tuple[CacheMark, ...] | None = None,
) -> AsyncIterator[ServedTurn]:
    """Check a chat request and open it in the engine; leaving the block ends it.

    Args:
        marks: up to where the prompt is to be kept in the KV cache; None: as the request's parts say.
        streaming: False when only `collect` is used: one wake at the end.
        request_id: the engine's name for it, which shows in logs; the engine makes one otherwise.

    Raises:
        TroupeError: it was refused, or (from the turn, once it is read) failed.
    """
    engine = host.require()
    model = await host.check_model(exchange, request.model)
    exchange.renames = renames(request)
    prepared = await prepare(host, exchange, request)
    host.skipped.report(exchange, prepared.skipped)
    params = prepared.params
    if marks is None:
        marks = await read_parts(exchange, request.messages, partial(marks_of_chat, request.messages))
    prompt = msgspec.structs.replace(prepared.prompt, cache_marks=marks)
    given = options(exchange, request)
    async with engine.stream(prompt, params, request_id=request_id, streaming=streaming, **given) as stream:
        exchange.quota = stream.quota
        turn = ServedTurn(exchange, stream, params, model, prepared.chat_parser)
        try:
            yield turn
        finally:
            if turn.called and given["hints"].session:
                await keep_session(host, exchange, given["hints"].session)


class Prepared(msgspec.Struct, frozen=True):
    """A chat request that is ready for the engine."""

    prompt: ChatPrompt
    params: SamplingParams
    chat_parser: ChatParser | None
    skipped: list[str]
    """Parts that the model does not get as they were sent; see `skipped_names`."""


async def prepare(host: ServerState, exchange: Exchange, request: ChatRequest) -> Prepared:
    """Everything that is checked and made before the engine hears of the request.

    Raises:
        InvalidRequest: names the field.
    """
    engine = host.require()
    refuse_unsupported(request, trust_chat_template=host.config.trust_request_chat_template)
    session = session_of(exchange, request)
    kwargs = engine.chat_format.with_effort(request.chat_template_kwargs, request.reasoning_effort)
    slow = not engine.chat_format.knows_opening(kwargs)
    if slow or has_slow_parts(exchange, request.messages) or has_long_tools(request, request.messages):
        return await offload(partial(_prepare, host, engine, session, request))
    return _prepare(host, engine, session, request)


def _prepare(host: ServerState, engine: ServedEngine, session: Session, request: ChatRequest) -> Prepared:
    use = tool_use_of(request, automatic=engine.config.model.enable_auto_tool_choice)
    chat = plain_messages(request.messages)
    messages = host.volatile_lines.moved(chat.messages)
    prompt = chat_prompt(request, messages, use.tools if session.id is None else by_name(use.tools))
    kwargs = engine.chat_format.with_effort(prompt.template_kwargs, request.reasoning_effort)
    prompt = msgspec.structs.replace(prompt, template_kwargs=kwargs)
    chat_parser = engine.chat_parser(prompt, use, show_reasoning=request.include_reasoning is not False)
    params = sampling_params(request, engine)
    params = params if chat_parser is None else chat_parser.applied(params)
    return Prepared(prompt, params, chat_parser, [*session.skipped, *chat.skipped])
