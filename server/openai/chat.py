"""POST /v1/chat/completions: OpenAI's shapes of a chat turn."""

import secrets

import msgspec
from msgspec import UNSET

from troupellm.protocol.api.chat import (
    AnswerCall,
    AnswerFunction,
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatRequest,
    ChatResponse,
    DeltaCall,
    DeltaFunction,
    UsageBody,
)
from troupellm.protocol.params.chat_events import (
    CallArguments,
    CallStart,
    Content,
    Finished,
    Reasoning,
    TurnChoice,
    TurnEvent,
    TurnReason,
)
from troupellm.protocol.params.outputs import Delta, Usage
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.sse import ChunkEncoder, open_events
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.balancer_headers import report_load
from troupellm.server.openai.chat_turn import ServedTurn, TurnAnswer, open_turn
from troupellm.server.openai.kv_transfer import remote_blocks
from troupellm.server.openai.logprobs import chat_logprobs, prompt_logprobs
from troupellm.server.openai.streaming import continuous_usage, include_usage, usage_body


async def create(host: ServerState, exchange: Exchange, request: ChatRequest) -> None:
    name = f"chatcmpl-{request.request_id or secrets.token_hex(16)}"
    streaming = bool(request.stream)
    blocks = remote_blocks(host, exchange, request, streaming=streaming)
    report_load(host, exchange)
    async with open_turn(host, exchange, request, streaming=streaming, request_id=name) as turn:
        answer = _Answer(host, request, turn.model, name)
        if streaming:
            await _stream(host, exchange, turn, answer)
        else:
            whole = answer.whole(await turn.collect())
            whole.kv_transfer_params = blocks
            await exchange.respond(200, msgspec.json.encode(whole))


async def _stream(host: ServerState, exchange: Exchange, turn: ServedTurn, answer: "_Answer") -> None:
    await turn.opened()
    async with open_events(exchange, host.config.sse_keep_alive_interval) as events:
        chunks = _Chunks(answer, turn)
        events.write_at_once(turn, chunks.encode_deltas)
        data = b""
        async for pieces in turn:
            data = chunks.encode_all(pieces)
            if data and not turn.ended:
                await events.send(data)
                data = b""
        await events.finish(data + chunks.end(turn.usage))


class _Answer:
    """The fields that every chunk of one answer repeats."""

    def __init__(self, host: ServerState, request: ChatRequest, model: str, answer_id: str) -> None:
        self.request = request
        self.model = model
        self.id = answer_id
        self.created = host.now()
        self.fingerprint = host.fingerprint()
        self.show_ids = bool(request.return_token_ids)
        self.tokens_as_ids = bool(request.return_tokens_as_token_ids)
        choice = request.tool_choice
        self._named = choice is not None and not isinstance(choice, str) and choice.type == "function"
        self.echo = _echoed(request)
        """The text before every choice's content."""

    def reason(self, reason: TurnReason) -> TurnReason:
        """The finish reason; a call of the tool that tool_choice names ends with stop, as in OpenAI's API."""
        return "stop" if self._named and reason == "tool_calls" else reason

    def whole(self, answer: TurnAnswer) -> ChatResponse:
        completion = answer.completion
        entries = completion.prompt_logprobs
        return ChatResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(choice) for choice in answer.choices],
            usage=usage_body([completion.usage]),
            system_fingerprint=self.fingerprint,
            prompt_logprobs=UNSET if entries is None else prompt_logprobs(entries),
            prompt_token_ids=completion.prompt_token_ids if self.show_ids else UNSET,
        )

    def _choice(self, choice: TurnChoice) -> ChatChoice:
        calls = [AnswerCall(call.id, AnswerFunction(call.name, call.arguments)) for call in choice.tool_calls]
        reasoning = UNSET if choice.reasoning is None else choice.reasoning
        return ChatChoice(
            index=choice.index,
            message=AnswerMessage(
                content=self.echo + (choice.content or "") if self.echo else choice.content,
                reasoning=reasoning,
                reasoning_content=reasoning,
                tool_calls=calls or UNSET,
            ),
            logprobs=chat_logprobs(choice.logprobs, as_ids=self.tokens_as_ids),
            finish_reason=self.reason(choice.finish_reason),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self.show_ids else UNSET,
        )


class _Chunks:
    """Encodes the events of one stream. The first piece of each choice is its role, in the same send as its text; the
    very first has the prompt's token ids too, where they are wanted."""

    def __init__(self, answer: _Answer, turn: ServedTurn) -> None:
        self._fingerprint = answer.fingerprint
        self._include_usage = include_usage(answer.request)
        self._continuous = continuous_usage(answer.request)
        self._show_ids = answer.show_ids
        self._tokens_as_ids = answer.tokens_as_ids
        self._echo = answer.echo
        self._turn = turn
        self._reason = answer.reason
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

    def encode_deltas(self, deltas: list[Delta]) -> bytes:
        return self.encode_all(self._turn.events(deltas))

    def encode_all(self, events: list[TurnEvent]) -> bytes:
        return b"".join([self.encode(event) for event in events])

    def encode(self, event: TurnEvent) -> bytes:
        self._generated += len(event.token_ids)
        usage = self._running_usage() if self._continuous else None
        data = b""
        if event.index not in self._introduced:
            prompt = self._turn.prompt_token_ids if self._show_ids and not self._introduced else None
            self._introduced.add(event.index)
            role = ChatChunkChoice(index=event.index, delta=ChatDelta(role="assistant", content=""))
            data = self._encoder.choice(role, usage=usage, prompt_token_ids=prompt)
            if self._echo:
                echo = ChatChunkChoice(index=event.index, delta=ChatDelta(content=self._echo))
                data += self._encoder.choice(echo, usage=usage)
        described = bool(event.logprobs) or (self._show_ids and bool(event.token_ids))
        piece = event.piece
        if isinstance(piece, Content) and not described and usage is None:
            return data + self._encoder.text(event.index, piece.text) if piece.text else data
        if isinstance(piece, Finished):
            last = ChatChunkChoice(
                index=event.index,
                delta=ChatDelta(),
                finish_reason=self._reason(piece.reason),
                stop_reason=piece.stop_reason,
            )
            return data + self._encoder.choice(last, usage=usage, fingerprint=self._fingerprint)
        if isinstance(piece, Content) and not piece.text and not described:
            return data
        chunk = ChatChunkChoice(
            index=event.index,
            delta=_delta(piece),
            logprobs=chat_logprobs(event.logprobs, as_ids=self._tokens_as_ids) if event.logprobs else None,
            token_ids=event.token_ids if self._show_ids and event.token_ids else UNSET,
        )
        return data + self._encoder.choice(chunk, usage=usage)

    def end(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b""
        return self._encoder.usage(usage_body([usage]), fingerprint=self._fingerprint)

    def _running_usage(self) -> UsageBody:
        prompt_tokens = len(self._turn.prompt_token_ids)
        return usage_body(
            [
                Usage(
                    prompt_tokens=prompt_tokens,
                    completion_tokens=self._generated,
                    reasoning_tokens=self._turn.reasoning_tokens,
                )
            ]
        )


def _delta(piece: Content | Reasoning | CallStart | CallArguments) -> ChatDelta:
    match piece:
        case Content(text=text):
            return ChatDelta(content=text)
        case Reasoning(text=text):
            return ChatDelta(reasoning=text, reasoning_content=text)
        case CallStart(call=call, id=call_id, name=name):
            return ChatDelta(tool_calls=[DeltaCall(call, DeltaFunction(name=name, arguments=""), call_id, "function")])
        case CallArguments(call=call, text=text):
            return ChatDelta(tool_calls=[DeltaCall(call, DeltaFunction(arguments=text))])


def _echoed(request: ChatRequest) -> str:
    """The last message, where it is the assistant's and is asked for."""
    last = request.messages[-1]
    if not request.echo or last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join([part.text or "" for part in last.content])
