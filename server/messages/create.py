"""POST /v1/messages and /v1/messages/count_tokens."""

import secrets
from functools import partial

import msgspec

from troupellm.actors.demand import estimate_tokens
from troupellm.protocol.anthropic import (
    AppliedEdits,
    CountTokensRequest,
    Message,
    MessagesRequest,
    MessageUsage,
    OriginalTokens,
    PromptFields,
    TokenCount,
)
from troupellm.protocol.dialect import TurnEvent
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.kv_hints import CacheMark
from troupellm.protocol.openai import ChatRequest
from troupellm.server.body import is_large
from troupellm.server.bounded import answer_within, bounded
from troupellm.server.cache_marks import marks_of_message
from troupellm.server.counting import charged
from troupellm.server.exchange import Exchange
from troupellm.server.host import EngineHost
from troupellm.server.messages.builder import PING, MessageBuilder, encoded
from troupellm.server.messages.context_edits import Edited, edited
from troupellm.server.messages.threads import counted_from, hold, joined
from troupellm.server.messages.translate import Translated, translate
from troupellm.server.offload import offload
from troupellm.server.pieces import pieces_of
from troupellm.server.relabel import relabelled
from troupellm.server.sse import open_events
from troupellm.server.turn import Turn, open_turn, prepare


async def create(host: EngineHost, exchange: Exchange, request: MessagesRequest) -> None:
    await _check_marks(exchange, request)
    request, first = await joined(host.threads, exchange, request, host.held_limits)
    with counted_from(first):
        made = await _edited(host, exchange, request)
        translated = await _translated(host, exchange, made.request)
        try:
            marks = marks_of_message(made.request, last=True)
            answer = partial(_answer, host, exchange, request, made, marks)
            await answer_within(exchange, bounded(host, translated.chat), answer)
        except TroupeError as error:
            raise relabelled(exchange, error, translated.names) from None


async def count_tokens(host: EngineHost, exchange: Exchange, request: CountTokensRequest) -> None:
    host.check_model(request.model)
    await _check_marks(exchange, request)
    request, first = await joined(host.threads, exchange, request, host.held_limits)
    with counted_from(first):
        made = await _edited(host, exchange, request)
        body = TokenCount(await _count(host, exchange, made.request, charging=True))
    if request.context_management is not None:
        before = body.input_tokens if made.tokens_before is None else made.tokens_before
        body.context_management = OriginalTokens(original_input_tokens=before)
    await exchange.respond(200, msgspec.json.encode(body))


async def _edited(host: EngineHost, exchange: Exchange, request: MessagesRequest | CountTokensRequest) -> Edited:
    made = await edited(request, partial(_count, host, exchange))
    host.skipped.report(exchange, made.skipped)
    return made


async def _count(
    host: EngineHost, exchange: Exchange, request: MessagesRequest | CountTokensRequest, *, charging: bool = False
) -> int:
    """The tokens of a request's prompt, which may count for its key."""
    engine = host.require()
    translated = await _translated(host, exchange, request)
    try:
        prepared = await prepare(host, exchange, translated.chat)
        host.skipped.report(exchange, prepared.skipped)
        if not charging:
            return await host.counting.number(engine, exchange.key, prepared.prompt)
        async with charged(engine, exchange, estimate_tokens(prepared.prompt)) as charge:
            charge.tokens = await host.counting.number(engine, exchange.key, prepared.prompt)
            return charge.tokens
    except TroupeError as error:
        raise relabelled(exchange, error, translated.names) from None


async def _check_marks(exchange: Exchange, request: PromptFields) -> None:
    if is_large(exchange):
        await offload(partial(marks_of_message, request))
    else:
        marks_of_message(request)


async def _translated(
    host: EngineHost, exchange: Exchange, request: MessagesRequest | CountTokensRequest
) -> Translated:
    speaker = host.require().speaker
    thinking = speaker.dialect.thinking
    work = partial(translate, request, switches=thinking.switches if thinking else (), thinks=speaker.thinks)
    translated = await offload(work) if is_large(exchange) else work()
    host.skipped.report(exchange, translated.skipped)
    return translated


async def _answer(
    host: EngineHost,
    exchange: Exchange,
    request: MessagesRequest,
    made: Edited,
    marks: tuple[CacheMark, ...],
    chat: ChatRequest,
) -> None:
    name = f"msg_{request.request_id or secrets.token_hex(16)}"
    streaming = bool(request.stream)
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
        builder.feed(pieces_of(given.choices[0]))
        builder.finish(given.usage)
        await hold(host.threads, exchange, request, name, builder.message.content)
        await exchange.respond(200, msgspec.json.encode(builder.message))


async def _stream(
    host: EngineHost, exchange: Exchange, turn: Turn, builder: MessageBuilder, request: MessagesRequest
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

        events.write_at_once(turn, encode)
        data = b""
        async for pieces in turn:
            data = encode(pieces)
            if data and not turn.ended:
                await events.send(data)
                data = b""
        data += encoded(builder.finish(turn.usage))
        await hold(host.threads, exchange, request, builder.message.id, builder.message.content)
        await events.finish(data, b"")
