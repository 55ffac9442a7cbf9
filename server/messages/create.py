"""POST /v1/messages and /v1/messages/count_tokens."""

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import msgspec

from troupellm.actors.admission.prompts import estimate_tokens
from troupellm.protocol.api.anthropic import (
    AppliedEdits,
    CountTokensRequest,
    Message,
    MessagesRequest,
    MessageUsage,
    OriginalTokens,
    PromptFields,
    TokenCount,
)
from troupellm.protocol.api.chat import ChatRequest
from troupellm.protocol.config.kv_hints import CacheMark
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.params.chat_events import TurnEvent
from troupellm.server.base.body import is_large
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.sse import open_events
from troupellm.server.base.threads import offload
from troupellm.server.host.counting import Charge, charged, charged_anew
from troupellm.server.host.server_state import ServerState
from troupellm.server.messages.builder import PING, MessageBuilder, encoded
from troupellm.server.messages.context_edits import Edited, edited
from troupellm.server.messages.translate import Translated, translate
from troupellm.server.openai.cache_marks import marks_of_message
from troupellm.server.openai.chat_turn import ServedTurn, open_turn, prepare, read_parts
from troupellm.server.openai.kv_transfer import remote_blocks
from troupellm.server.openai.translated import answer_within, bounded, chunks_of, relabelled
from troupellm.server.storage.message_threads import counted_from, hold, joined

_Request = MessagesRequest | CountTokensRequest


async def create(host: ServerState, exchange: Exchange, request: MessagesRequest) -> None:
    await _marks(exchange, request)
    request, first = await joined(host.threads, exchange, request, host.held_limits)
    with counted_from(first):
        async with _counting(host, exchange) as count:
            made = await _edited(host, exchange, request, count)
    with charged_anew(host.require(), exchange, count.charge):
        translated = await _translated(host, exchange, made.request)
        try:
            marks = await _marks(exchange, made.request, last=True)
            answer = partial(_answer, host, exchange, request, made, marks)
            await answer_within(exchange, bounded(host, translated.chat), answer)
        except TroupeError as error:
            raise relabelled(exchange, error, translated.names) from None


async def count_tokens(host: ServerState, exchange: Exchange, request: CountTokensRequest) -> None:
    await host.check_model(exchange, request.model)
    await _marks(exchange, request)
    request, first = await joined(host.threads, exchange, request, host.held_limits)
    with counted_from(first):
        async with _counting(host, exchange) as count:
            made = await _edited(host, exchange, request, count)
            body = TokenCount(await count(made.request) if made.tokens is None else made.tokens)
    if request.context_management is not None:
        before = body.input_tokens if made.tokens_before is None else made.tokens_before
        body.context_management = OriginalTokens(original_input_tokens=before)
    await exchange.respond(200, msgspec.json.encode(body))


async def _edited(host: ServerState, exchange: Exchange, request: _Request, count: "_Count") -> Edited:
    made = await edited(request, count, partial(read_parts, exchange, request.messages))
    host.skipped.report(exchange, made.skipped)
    return made


class _Count:
    """Counts the tokens of prompts. All counts are one call of the key, with the largest of them."""

    def __init__(self, host: ServerState, exchange: Exchange, stack: AsyncExitStack) -> None:
        self.charge: Charge | None = None
        """None until something is counted."""
        self._host = host
        self._exchange = exchange
        self._stack = stack

    async def __call__(self, request: _Request) -> int:
        host, exchange = self._host, self._exchange
        engine = host.require()
        translated = await _translated(host, exchange, request)
        try:
            prepared = await prepare(host, exchange, translated.chat)
            host.skipped.report(exchange, prepared.skipped)
            if self.charge is None:
                estimate = estimate_tokens(prepared.prompt)
                self.charge = await self._stack.enter_async_context(charged(engine, exchange, estimate))
            number = await host.counting.number(engine, exchange.key, prepared.prompt)
        except TroupeError as error:
            raise relabelled(exchange, error, translated.names) from None
        self.charge.tokens = max(self.charge.tokens, number)
        return number


@asynccontextmanager
async def _counting(host: ServerState, exchange: Exchange) -> AsyncIterator[_Count]:
    async with AsyncExitStack() as stack:
        yield _Count(host, exchange, stack)


async def _marks(exchange: Exchange, request: PromptFields, *, last: bool = False) -> tuple[CacheMark, ...]:
    work = partial(marks_of_message, request, last=last)
    return await offload(work) if is_large(exchange) else await read_parts(exchange, request.messages, work)


async def _translated(host: ServerState, exchange: Exchange, request: _Request) -> Translated:
    chat_format = host.require().chat_format
    thinking = chat_format.chat_syntax.thinking
    work = partial(
        translate,
        request,
        switches=thinking.switches if thinking else (),
        thinks=chat_format.thinks,
        sees=host.require().ready.media is not None,
    )
    translated = await offload(work) if is_large(exchange) else work()
    host.skipped.report(exchange, translated.skipped)
    return translated


async def _answer(
    host: ServerState,
    exchange: Exchange,
    request: MessagesRequest,
    made: Edited,
    marks: tuple[CacheMark, ...],
    chat: ChatRequest,
) -> None:
    name = f"msg_{request.request_id or secrets.token_hex(16)}"
    streaming = bool(request.stream)
    blocks = remote_blocks(host, exchange, chat, streaming=streaming)
    async with open_turn(host, exchange, chat, streaming=streaming, request_id=name, marks=marks) as turn:
        usage = MessageUsage(input_tokens=0, output_tokens=0)
        message = Message(id=name, model=turn.model, content=[], usage=usage)
        if request.context_management is not None:
            message.context_management = AppliedEdits(applied_edits=made.applied)
        show = request.thinking is None or request.thinking.display != "omitted"
        context = host.require().limits.max_model_len
        builder = MessageBuilder(message, max_tokens=request.max_tokens, context=context, show_thinking=show)
        if streaming:
            await _stream(host, exchange, turn, builder, request)
            return
        given = await turn.collect()
        builder.feed(chunks_of(given.choices[0]))
        builder.finish(given.usage)
        builder.message.kv_transfer_params = blocks
        await hold(host.threads, exchange, request, name, builder.message.content)
        await exchange.respond(200, msgspec.json.encode(builder.message))


async def _stream(
    host: ServerState, exchange: Exchange, turn: ServedTurn, builder: MessageBuilder, request: MessagesRequest
) -> None:
    """From here on the app reports a failure as an event of this API."""
    await turn.opened()
    async with open_events(exchange, host.config.sse_keep_alive_interval, PING) as events:
        begun = False

        def encode(pieces: list[TurnEvent]) -> bytes:
            nonlocal begun
            begin = b""
            if not begun:  # not before: it travels with the first piece, and an answer that is whole has its usage
                cached = turn.usage.cached_tokens if turn.ended else 0
                begin, begun = encoded(builder.begin(len(turn.prompt_token_ids), cached)), True
            return begin + encoded(builder.feed(pieces))

        events.write_at_once(turn, lambda deltas: encode(turn.events(deltas)))
        data = b""
        async for pieces in turn:
            data = encode(pieces)
            if data and not turn.ended:
                await events.send(data)
                data = b""
        data += encoded(builder.finish(turn.usage))
        await hold(host.threads, exchange, request, builder.message.id, builder.message.content)
        await events.finish(data, b"")
