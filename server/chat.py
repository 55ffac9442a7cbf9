"""POST /v1/chat/completions."""

import secrets

import msgspec
from msgspec import UNSET

from troupellm.actors.stream import Stream
from troupellm.protocol.intake import ChatPrompt
from troupellm.protocol.openai import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatRequest,
    ChatResponse,
    UsageBody,
)
from troupellm.protocol.outputs import Completion, Delta, Usage
from troupellm.protocol.sampling import SamplingParams
from troupellm.server.exchange import Exchange
from troupellm.server.host import EngineHost
from troupellm.server.logprobs import chat_logprobs, prompt_logprobs
from troupellm.server.parameters import chat_prompt, refuse_unsupported, renames, sampling_params
from troupellm.server.served import ServedEngine
from troupellm.server.sse import ChunkEncoder, open_events
from troupellm.server.streaming import (
    account,
    continuous_usage,
    final_usage,
    finish_reason,
    include_usage,
    options,
    pump,
    usage_body,
)


async def create(host: EngineHost, exchange: Exchange, request: ChatRequest) -> None:
    engine = host.require()
    model = host.check_model(request.model)
    exchange.renames = renames(request)
    refuse_unsupported(request)
    prompt = chat_prompt(request, request.messages)
    params = sampling_params(request, engine)
    answer = _Answer(host, request, model)
    if request.stream:
        await _stream(host, exchange, engine, prompt, params, answer)
        return
    given = options(exchange, request)
    async with engine.stream(prompt, params, request_id=answer.id, streaming=False, **given) as stream:
        exchange.quota = stream.quota
        completion = await stream.collect()
    account(exchange, [completion])
    await exchange.respond(200, msgspec.json.encode(answer.whole(completion)))


async def _stream(
    host: EngineHost,
    exchange: Exchange,
    engine: ServedEngine,
    prompt: ChatPrompt,
    params: SamplingParams,
    answer: "_Answer",
) -> None:
    given = options(exchange, answer.request)
    async with engine.stream(prompt, params, request_id=answer.id, **given) as stream:
        exchange.quota = stream.quota
        await stream.opened()
        exchange.prompt_tokens = len(stream.prompt_token_ids)
        async with open_events(exchange, host.config.sse_keep_alive_interval) as events:
            chunks = _Chunks(answer, stream)
            rest = await pump(stream, events, chunks.encode, params.n)
            await events.finish(rest + chunks.end(final_usage(stream.usage)))


class _Answer:
    """What every piece of one answer repeats."""

    def __init__(self, host: EngineHost, request: ChatRequest, model: str) -> None:
        self.request = request
        self.model = model
        self.id = f"chatcmpl-{secrets.token_hex(16)}"
        self.created = host.now()
        self.fingerprint = host.fingerprint()

    def whole(self, completion: Completion) -> ChatResponse:
        show_ids = bool(self.request.return_token_ids)
        entries = completion.prompt_logprobs
        return ChatResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=AnswerMessage(content=choice.text),
                    logprobs=chat_logprobs(choice.logprobs),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if show_ids else UNSET,
                )
                for choice in completion.choices
            ],
            usage=usage_body([completion.usage]),
            system_fingerprint=self.fingerprint,
            prompt_logprobs=UNSET if entries is None else prompt_logprobs(entries),
            prompt_token_ids=completion.prompt_token_ids if show_ids else UNSET,
        )


class _Chunks:
    """Encodes the deltas of one stream. The first piece of each choice is its role, in the same send as its text."""

    def __init__(self, answer: _Answer, stream: Stream) -> None:
        request = answer.request
        self._fingerprint = answer.fingerprint
        self._include_usage = include_usage(request)
        self._continuous = continuous_usage(request)
        self._show_ids = bool(request.return_token_ids)
        self._stream = stream
        self._generated = 0
        self._introduced: set[int] = set()
        self._encoder = ChunkEncoder(
            response_id=answer.id,
            kind="chat.completion.chunk",
            created=answer.created,
            model=answer.model,
            include_usage=self._include_usage,
            text_before=b'"delta":{"content":',
            text_after=b'},"logprobs":null,"finish_reason":null',
        )

    def encode(self, delta: Delta) -> bytes:
        reason = finish_reason(delta)
        self._generated += len(delta.token_ids)
        usage = self._running_usage()
        data = b""
        if delta.index not in self._introduced:
            self._introduced.add(delta.index)
            role = ChatChunkChoice(index=delta.index, delta=ChatDelta(role="assistant", content=""))
            data = self._encoder.choice(role, usage=usage)
        if delta.logprobs or (self._show_ids and delta.token_ids):
            piece = ChatChunkChoice(
                index=delta.index,
                delta=ChatDelta(content=delta.text),
                logprobs=chat_logprobs(delta.logprobs),
                token_ids=delta.token_ids if self._show_ids else UNSET,
            )
            data += self._encoder.choice(piece, usage=usage)
        elif delta.text and usage is None:
            data += self._encoder.text(delta.index, delta.text)
        elif delta.text:
            piece = ChatChunkChoice(index=delta.index, delta=ChatDelta(content=delta.text))
            data += self._encoder.choice(piece, usage=usage)
        if reason is not None:
            last = ChatChunkChoice(
                index=delta.index, delta=ChatDelta(), finish_reason=reason, stop_reason=delta.stop_reason
            )
            data += self._encoder.choice(last, usage=usage, fingerprint=self._fingerprint)
        return data

    def end(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b""
        return self._encoder.usage(usage_body([usage]), fingerprint=self._fingerprint)

    def _running_usage(self) -> UsageBody | None:
        if not self._continuous:
            return None
        prompt_tokens = len(self._stream.prompt_token_ids)
        return usage_body([Usage(prompt_tokens=prompt_tokens, completion_tokens=self._generated)])
