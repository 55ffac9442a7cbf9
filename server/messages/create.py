"""POST /v1/messages and /v1/messages/count_tokens."""

import secrets
from functools import partial

import msgspec

from troupellm.protocol.anthropic import CountTokensRequest, Message, MessagesRequest, MessageUsage, TokenCount
from troupellm.protocol.dialect import TurnEvent
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.kv_hints import CacheMark
from troupellm.protocol.openai import ChatRequest
from troupellm.server.body import is_large
from troupellm.server.bounded import answer_within, bounded
from troupellm.server.cache_marks import marks_of_message
from troupellm.server.exchange import Exchange
from troupellm.server.host import EngineHost
from troupellm.server.messages.builder import PING, MessageBuilder, encoded
from troupellm.server.messages.threads import counted_from, hold, joined
from troupellm.server.messages.translate import Translated, translate
from troupellm.server.offload import offload
from troupellm.server.pieces import pieces_of
from troupellm.server.relabel import relabelled
from troupellm.server.sse import open_events
from troupellm.server.turn import Turn, open_turn, prepare


async def create(host: EngineHost, exchange: Exchange, request: MessagesRequest) -> None:
    request, first = await joined(host.threads, exchange, request, host.held_limits)
    with counted_from(first):
        translated = await _translated(host, exchange, request)
        try:
            marks = marks_of_message(request)
            answer = partial(_answer, host, exchange, request, marks)
            await answer_within(exchange, bounded(host, translated.chat), answer)
        except TroupeError as error:
            raise relabelled(exchange, error, translated.names) from None


async def count_tokens(host: EngineHost, exchange: Exchange, request: CountTokensRequest) -> None:
    engine = host.require()
    host.check_model(request.model)
    request, first = await joined(host.threads, exchange, request, host.held_limits)
    with counted_from(first):
        translated = await _translated(host, exchange, request)
        try:
            prepared = await prepare(host, exchange, translated.chat)
            host.skipped.report(exchange, prepared.skipped)
            tokens = await host.counting.number(engine, exchange.key, prepared.prompt)
        except TroupeError as error:
            raise relabelled(exchange, error, translated.names) from None
    await exchange.respond(200, msgspec.json.encode(TokenCount(tokens)))


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
    host: EngineHost, exchange: Exchange, request: MessagesRequest, marks: tuple[CacheMark, ...], chat: ChatRequest
) -> None:
    name = f"msg_{request.request_id or secrets.token_hex(16)}"
    streaming = bool(request.stream)
    async with open_turn(host, exchange, chat, streaming=streaming, request_id=name, marks=marks) as turn:
        usage = MessageUsage(input_tokens=0, output_tokens=0)
        message = Message(id=name, model=turn.model, content=[], usage=usage)
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
