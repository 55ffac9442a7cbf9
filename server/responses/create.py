"""POST /v1/responses: whole, streamed, or in the background; and what a request would cost."""

from functools import partial

import msgspec
from msgspec import UnsetType

from troupellm.actors.admission.prompts import estimate_tokens
from troupellm.protocol.api.chat import ChatRequest
from troupellm.protocol.api.kv_transfer import RemoteBlocks
from troupellm.protocol.api.response_events import ResponseEvent
from troupellm.protocol.api.response_objects import CompactedResponse, CompactionItem, InputTokens
from troupellm.protocol.api.responses import CompactRequest, InputTokensRequest, ResponsesRequest
from troupellm.protocol.errors import ContextLengthExceeded, TroupeError
from troupellm.protocol.params.chat_events import TurnEvent
from troupellm.server.base.errors import ClientGone, flatten
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.sse import open_events
from troupellm.server.host.counting import charged
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.chat_turn import ServedTurn, open_turn, prepare
from troupellm.server.openai.kv_transfer import remote_blocks
from troupellm.server.openai.translated import answer_within, bounded, chunks_of, relabelled
from troupellm.server.responses.builder import ResponseBuilder, encoded, item_id, usage_of
from troupellm.server.responses.compact import (
    Summary,
    compacted,
    is_longer,
    summarize,
    threshold_of,
    together,
    without_trigger,
)
from troupellm.server.responses.follow import follow
from troupellm.server.responses.generate import failure, keep
from troupellm.server.responses.jobs import Jobs
from troupellm.server.responses.prepare import Plan, make_plan
from troupellm.server.responses.truncate import truncated


async def create(host: ServerState, jobs: Jobs, exchange: Exchange, request: ResponsesRequest) -> None:
    request, wanted = without_trigger(request)
    threshold = threshold_of(request)
    plan = await make_plan(host, exchange, request)
    try:
        chat = bounded(host, plan.chat)
        if request.truncation == "auto":
            cut = await truncated(host, exchange, chat, plan.border)
            plan, chat = msgspec.structs.replace(plan, border=cut.border), cut.chat
        if wanted:
            await prepare(host, exchange, chat)  # refuses wrong values, also those that the summary does not use
            await _compact(host, exchange, plan, chat)
            return
        summary = None
        if threshold is not None and await is_longer(host, exchange, chat, threshold):
            summary = await summarize(host, exchange, chat)
            chat = compacted(chat, summary)
        await answer_within(exchange, chat, partial(_answer, host, jobs, exchange, plan, summary))
    except ContextLengthExceeded as error:
        if exchange.status or not plan.streaming:
            raise relabelled(exchange, error, plan.names) from None
        await _refuse_in_stream(exchange, plan, error)
    except TroupeError as error:
        raise relabelled(exchange, error, plan.names) from None


async def compact(host: ServerState, exchange: Exchange, request: CompactRequest) -> None:
    """A conversation as one item, without an answer."""
    given, _ = without_trigger(request)
    plan = await make_plan(host, exchange, given)
    try:
        await prepare(host, exchange, plan.chat)  # as above
        summary = await summarize(host, exchange, plan.chat)
    except TroupeError as error:
        raise relabelled(exchange, error, plan.names) from None
    item = CompactionItem(id=item_id(CompactionItem, plan.frame.id, 0), encrypted_content=summary.sealed)
    body = CompactedResponse(
        id=plan.frame.id, created_at=plan.frame.created_at, output=[item], usage=usage_of(summary.usage)
    )
    await exchange.respond(200, msgspec.json.encode(body))


async def _compact(host: ServerState, exchange: Exchange, plan: Plan, chat: ChatRequest) -> None:
    """A response whose only item is the compaction of what came before."""
    builder = ResponseBuilder(plan.frame)

    def summary_events(summary: Summary) -> list[ResponseEvent]:
        return builder.begin() + builder.compact(summary.sealed) + builder.finish(summary.usage, host.now())

    if not plan.streaming:
        summary_events(await summarize(host, exchange, chat))
        response = await keep(host, exchange, plan, builder.response)
        await exchange.respond(200, msgspec.json.encode(response))
        return
    failed: BaseException | None = None
    async with open_events(exchange, host.config.sse_keep_alive_interval) as events:
        try:
            data = summary_events(await summarize(host, exchange, chat))
        except (Exception, BaseExceptionGroup) as error:
            failed = flatten(error)
        else:
            data[-1] = msgspec.structs.replace(data[-1], response=await keep(host, exchange, plan, builder.response))
            await events.finish(encoded(data), b"")
    if failed is None:
        return
    if isinstance(failed, ClientGone) or not exchange.status:  # else the keep-alive has begun the stream
        raise failed
    await exchange.write(encoded(builder.begin() + failure(builder, plan, failed)), last=True)


async def _answer(
    host: ServerState, jobs: Jobs, exchange: Exchange, plan: Plan, summary: Summary | None, chat: ChatRequest
) -> None:
    plan = msgspec.structs.replace(plan, chat=chat)
    blocks = remote_blocks(host, exchange, chat, streaming=plan.streaming, background=plan.background)
    if plan.background:
        response = await jobs.start(exchange, plan)
        if plan.streaming:
            await follow(host, jobs, exchange, plan.owner, response.id)
        else:
            await exchange.respond(200, msgspec.json.encode(response))
        return
    async with open_turn(host, exchange, chat, streaming=plan.streaming, request_id=plan.frame.id) as turn:
        if plan.streaming:
            await _stream(host, exchange, plan, turn, summary)
        else:
            await _whole(host, exchange, plan, turn, summary, blocks)


async def _refuse_in_stream(exchange: Exchange, plan: Plan, error: ContextLengthExceeded) -> None:
    """A conversation that is too long, as a response that has failed: after an error status Codex ends the turn, and
    after this event it compacts the conversation."""
    builder = ResponseBuilder(msgspec.structs.replace(plan.frame, store=False))
    out = builder.begin() + failure(builder, plan, error)
    exchange.failure = (error.code, error.param)
    async with open_events(exchange, 0) as events:
        await events.finish(encoded(out), b"")


async def input_tokens(host: ServerState, exchange: Exchange, request: InputTokensRequest) -> None:
    """How many tokens the prompt of a response has, without making one."""
    plan = await make_plan(host, exchange, request)
    try:
        prepared = await prepare(host, exchange, plan.chat)
        host.skipped.report(exchange, prepared.skipped)
        engine = host.require()
        async with charged(engine, exchange, estimate_tokens(prepared.prompt)) as charge:
            tokens = charge.tokens = await host.counting.number(engine, exchange.key, prepared.prompt)
    except TroupeError as error:
        raise relabelled(exchange, error, plan.names) from None
    await exchange.respond(200, msgspec.json.encode(InputTokens(input_tokens=tokens)))


async def _whole(
    host: ServerState,
    exchange: Exchange,
    plan: Plan,
    turn: ServedTurn,
    summary: Summary | None,
    blocks: RemoteBlocks | UnsetType,
) -> None:
    given = await turn.collect()
    builder = ResponseBuilder(plan.frame, plan.namespaced, sealing=plan.sealing)
    if summary is not None:
        builder.compact(summary.sealed)
    builder.feed(chunks_of(given.choices[0]))
    builder.finish(given.usage if summary is None else together(summary.usage, given.usage), host.now())
    response = await keep(host, exchange, plan, builder.response)
    told = msgspec.structs.replace(response, kv_transfer_params=blocks)
    await exchange.respond(200, msgspec.json.encode(told))


async def _stream(host: ServerState, exchange: Exchange, plan: Plan, turn: ServedTurn, summary: Summary | None) -> None:
    await turn.opened()
    builder = ResponseBuilder(plan.frame, plan.namespaced, sealing=plan.sealing)
    exchange.error_event = builder.error_event
    async with open_events(exchange, host.config.sse_keep_alive_interval) as events:
        last = encoded(builder.begin() + (builder.compact(summary.sealed) if summary is not None else []))

        def encode(pieces: list[TurnEvent]) -> bytes:
            nonlocal last
            data, last = last + encoded(builder.feed(pieces)), b""
            return data

        events.write_at_once(turn, lambda deltas: encode(turn.events(deltas)))
        try:
            async for pieces in turn:
                data = encode(pieces)
                if turn.ended:
                    last = data
                elif data:
                    await events.send(data)
            usage = turn.usage if summary is None else together(summary.usage, turn.usage)
            out = builder.finish(usage, host.now())
        except ClientGone:
            raise
        except (Exception, BaseExceptionGroup) as error:
            if not exchange.status:  # it can still be the answer
                raise
            out = failure(builder, plan, error)
        out[-1] = msgspec.structs.replace(out[-1], response=await keep(host, exchange, plan, builder.response))
        await events.finish(last + encoded(out), b"")
