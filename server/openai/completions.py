"""POST /v1/completions: one or many prompts, each with n choices."""

import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import msgspec

from troupellm.actors.admission.prompts import request_group_of
from troupellm.actors.client.stream import Stream
from troupellm.protocol.api.chat import CompletionRequest, TextResponse
from troupellm.protocol.messages.input import Prompt
from troupellm.protocol.params.outputs import Completion, Delta
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.server.base.body import is_large
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.sse import EventStream, open_events
from troupellm.server.base.threads import offload
from troupellm.server.host.served_engine import ServedEngine
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.balancer_headers import report_load
from troupellm.server.openai.completion_choices import ChoiceWriter, PromptEcho
from troupellm.server.openai.kv_transfer import remote_blocks
from troupellm.server.openai.parameters import completion_prompts, refuse_unsupported, renames, sampling_params
from troupellm.server.openai.streaming import account, final_usage, include_usage, options, pump, session_of, usage_body


async def create(host: ServerState, exchange: Exchange, request: CompletionRequest) -> None:
    engine = host.require()
    model = await host.check_model(exchange, request.model)
    exchange.renames = renames(request)
    refuse_unsupported(request)
    read = partial(completion_prompts, request, host.config.max_prompts)
    prompts = await offload(read) if is_large(exchange) else read()
    host.skipped.report(exchange, session_of(exchange, request).skipped)
    blocks = remote_blocks(host, exchange, request, streaming=bool(request.stream))
    report_load(host, exchange)
    params = sampling_params(request, engine)
    if params.thinking_token_budget is not None:
        params = msgspec.structs.replace(params, thinking=engine.chat_format.thinking)
    response_id, created = f"cmpl-{request.request_id or secrets.token_hex(16)}", host.now()
    writer = ChoiceWriter(request, response_id, created, model, host.fingerprint(), params, engine.tokenizer)
    if request.stream:
        await _stream(host, exchange, engine, prompts, params, writer)
        return
    completions = await _generate_all(exchange, engine, prompts, params, response_id, options(exchange, request))
    account(exchange, completions)
    echoes = [
        await PromptEcho.of(engine, request, prompt, completion.prompt_token_ids)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    response = TextResponse(
        id=response_id,
        created=created,
        model=model,
        choices=[
            writer.whole(number, completion, choice, echo)
            for number, (completion, echo) in enumerate(zip(completions, echoes, strict=True))
            for choice in completion.choices
        ],
        usage=usage_body([completion.usage for completion in completions], hide_completion=writer.scoring),
        system_fingerprint=host.fingerprint(),
        kv_transfer_params=blocks,
    )
    await exchange.respond(200, msgspec.json.encode(response))


async def _generate_all(
    exchange: Exchange,
    engine: ServedEngine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    response_id: str,
    given: dict[str, Any],
) -> list[Completion]:
    """All answers in the order of the prompts; the first failure cancels the rest."""
    answers: dict[int, Completion] = {}
    request_group = request_group_of(request_group_name(), prompts, params)

    async def generate(number: int, prompt: Prompt) -> None:
        name = f"{response_id}-{number}"
        async with engine.stream(
            prompt, params, request_id=name, streaming=False, request_group=request_group, **given
        ) as stream:
            exchange.quota = stream.quota
            answers[number] = await stream.collect()

    async with anyio.create_task_group() as group:
        for number, prompt in enumerate(prompts):
            group.start_soon(generate, number, prompt)
    return [answers[number] for number in range(len(prompts))]


async def _stream(
    host: ServerState,
    exchange: Exchange,
    engine: ServedEngine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    writer: ChoiceWriter,
) -> None:
    request = writer.request
    async with AsyncExitStack() as stack:
        streams: list[Stream] = []
        request_group = request_group_of(request_group_name(), prompts, params)
        for number, prompt in enumerate(prompts):
            name = f"{writer.response_id}-{number}"
            stream = engine.stream(
                prompt, params, request_id=name, request_group=request_group, **options(exchange, request)
            )
            stack.push_async_callback(stream.cancel)
            streams.append(stream)
        stack.callback(_abort_all, streams)  # first: each cancellation waits for the engine to let go of its own
        # All at once: the room of a call is given back when those of it who are in have left, and over an API process
        # the # first could have its whole answer before the second had asked.
        async with anyio.create_task_group() as group:
            for stream in streams:
                group.start_soon(stream.opened)
        exchange.quota = streams[-1].quota
        writer.prompt_tokens = sum(len(stream.prompt_token_ids) for stream in streams)
        exchange.prompt_made(writer.prompt_tokens)
        echoes = [
            await PromptEcho.of(engine, request, prompt, stream.prompt_token_ids)
            for prompt, stream in zip(prompts, streams, strict=True)
        ]
        async with open_events(exchange, host.config.sse_keep_alive_interval) as events:
            rest = await _pump_all(streams, events, writer, echoes, params.n)
            usage = usage_body([final_usage(stream.usage) for stream in streams], hide_completion=writer.scoring)
            await events.finish(rest + (writer.usage_chunk(usage) if include_usage(request) else b""))


def _abort_all(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.abort()


async def _pump_all(
    streams: Sequence[Stream],
    events: EventStream,
    writer: ChoiceWriter,
    echoes: Sequence[PromptEcho | None],
    n: int,
) -> bytes:
    """Run every stream into the one response. Only a lone stream's last piece is held back for the end."""
    encoders = [
        partial(_encode, writer, number, stream, echo)
        for number, (stream, echo) in enumerate(zip(streams, echoes, strict=True))
    ]
    if len(streams) == 1:
        return await pump(streams[0], events, encoders[0], n)

    async def run(number: int) -> None:
        await events.send(await pump(streams[number], events, encoders[number], n))

    async with anyio.create_task_group() as group:
        for number in range(len(streams)):
            group.start_soon(run, number)
    return b""


def _encode(writer: ChoiceWriter, number: int, stream: Stream, echo: PromptEcho | None, delta: Delta) -> bytes:
    return writer.chunk(number, stream, delta, echo)


def request_group_name() -> str:
    """The id of a call with several prompts: our own, not the client's, since no two calls may share one."""
    return secrets.token_hex(16)
