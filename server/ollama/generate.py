"""POST /api/chat and /api/generate: Ollama's form of a chat turn."""

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast

import msgspec

from troupellm.protocol.api.chat import ChatRequest, CompletionRequest
from troupellm.protocol.api.ollama import OllamaChatRequest, OllamaFields, OllamaGenerateRequest
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.messages.input import TextPrompt
from troupellm.server.base.body import is_large
from troupellm.server.base.errors import ErrorAnswer
from troupellm.server.base.exchange import LINES, Exchange
from troupellm.server.base.sse import open_events
from troupellm.server.base.threads import offload
from troupellm.server.host.server_state import ServerState
from troupellm.server.ollama.lines import Lines, Shape, chat_line, generate_line
from troupellm.server.ollama.translate import (
    NAMES,
    chat_of,
    chat_of_prompt,
    completion_of,
    plain_name,
    refuse_unsupported,
    skipped_options,
)
from troupellm.server.openai.chat_turn import ServedTurn, open_turn
from troupellm.server.openai.parameters import sampling_params, truncation_of
from troupellm.server.openai.streaming import options
from troupellm.server.openai.translated import answer_within, bounded, chunks_of, relabelled

_Open = Callable[..., AbstractAsyncContextManager[ServedTurn]]


async def chat(host: ServerState, exchange: Exchange, request: OllamaChatRequest) -> None:
    name = await _begin(host, exchange, request)
    if not request.messages:
        await _loaded(exchange, request, chat_line, name)
        return
    translate = partial(chat_of, request, name, **_thinking_of(host))
    await _answer_chat(host, exchange, request, chat_line, translate)


async def generate(host: ServerState, exchange: Exchange, request: OllamaGenerateRequest) -> None:
    name = await _begin(host, exchange, request)
    refuse_unsupported(request)
    if not request.prompt and not request.images:
        await _loaded(exchange, request, generate_line, name)
        return
    if not request.raw:
        translate = partial(chat_of_prompt, request, name, **_thinking_of(host))
        await _answer_chat(host, exchange, request, generate_line, translate)
        return
    with _relabelling(exchange):
        completion = completion_of(request, name)
        await _answer(host, exchange, request, generate_line, partial(_open_raw, host, exchange, completion))


async def _begin(host: ServerState, exchange: Exchange, request: OllamaFields) -> str:
    """The served name of the model that the request is for.

    Raises:
        ModelNotFound: there is none.
    """
    host.skipped.report(exchange, skipped_options(request.options))
    return await host.check_model(exchange, plain_name(request.model, host.require().model_names))


def _thinking_of(host: ServerState) -> dict[str, Any]:
    engine = host.require()
    if not engine.ready.generates:
        return {"switches": (), "thinks": False}
    thinking = engine.chat_format.chat_syntax.thinking
    return {"switches": thinking.switches if thinking else (), "thinks": engine.chat_format.thinks}


async def _answer_chat(
    host: ServerState,
    exchange: Exchange,
    request: OllamaFields,
    shape: Shape,
    translate: Callable[[], ChatRequest],
) -> None:
    with _relabelling(exchange):
        translated = await offload(translate) if is_large(exchange) else translate()

        async def answer(chat: ChatRequest) -> None:
            open_chat = partial(open_turn, host, exchange, chat)
            await _answer(host, exchange, request, shape, open_chat)

        await answer_within(exchange, bounded(host, translated), answer)


async def _answer(host: ServerState, exchange: Exchange, request: OllamaFields, shape: Shape, open_one: _Open) -> None:
    """Lines as the turn brings them; one text with `stream: false`."""
    streaming = request.stream is not False
    async with open_one(streaming=streaming, request_id=f"ollama-{secrets.token_hex(16)}") as turn:
        lines = Lines(shape, request.model or turn.model)
        if streaming:
            await _stream(host, exchange, turn, lines)
            return
        answer = await turn.collect()
        body = lines.whole(chunks_of(answer.choices[0]), answer.usage, answer.completion.timing)
        await exchange.respond(200, body)


async def _stream(host: ServerState, exchange: Exchange, turn: ServedTurn, lines: Lines) -> None:
    """From here on the app reports a failure as a line of this API."""
    await turn.opened()
    exchange.error_event = _error_line
    interval = host.config.sse_keep_alive_interval
    async with open_events(exchange, interval, lines.silent(), LINES) as events:
        events.write_at_once(turn, lambda deltas: lines.feed(turn.events(deltas)))
        data = b""
        async for pieces in turn:
            data = lines.feed(pieces)
            if data and not turn.ended:
                await events.send(data)
                data = b""
        await events.finish(data + lines.end(turn.usage, turn.timing), b"")


def _error_line(answer: ErrorAnswer) -> bytes:
    return answer.body + b"\n"


async def _loaded(exchange: Exchange, request: OllamaFields, shape: Shape, name: str) -> None:
    """The model is in memory already, and stays there for the other clients."""
    unloads = request.keep_alive is not None and str(request.keep_alive).rstrip("nsuµmh") in ("0", "0.0")
    line = Lines(shape, request.model or name).loaded("unload" if unloads else "load")
    if request.stream is False:
        await exchange.respond(200, line.rstrip(b"\n"))
    else:
        await exchange.respond(200, line, content_type=LINES)


@asynccontextmanager
async def _open_raw(
    host: ServerState, exchange: Exchange, completion: CompletionRequest, *, streaming: bool, request_id: str
) -> AsyncIterator[ServedTurn]:
    """Open a completion as a turn whose text is its content."""
    engine = host.require()
    params = sampling_params(completion, engine)
    if completion.max_tokens is None and "max_tokens" not in engine.defaults:
        params = msgspec.structs.replace(params, max_tokens=None)
        params.check_against(engine.limits)
    prompt = TextPrompt(cast(str, completion.prompt), True, truncation_of(completion))
    given = options(exchange, completion)
    async with engine.stream(prompt, params, request_id=request_id, streaming=streaming, **given) as stream:
        exchange.quota = stream.quota
        yield ServedTurn(exchange, stream, params, completion.model or engine.model_names[0])


@contextmanager
def _relabelling(exchange: Exchange) -> Iterator[None]:
    """Errors name fields as this API does."""
    try:
        yield
    except TroupeError as error:
        raise relabelled(exchange, error, NAMES) from None
