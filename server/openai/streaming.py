"""The shared part of streaming routes: from a stream's deltas to sends, and token counts as the API reports them."""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from troupellm.actors.client.stream import Stream
from troupellm.protocol.api.chat import GenerationFields, UsageBody
from troupellm.protocol.api.usage import CompletionTokensDetails, PromptTokensDetails
from troupellm.protocol.errors import RequestAborted
from troupellm.protocol.params.outputs import CachedTokens, Completion, Delta, FinishReason, Usage
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.sse import EventStream
from troupellm.server.openai.sessions import hints_of


async def pump(stream: Stream, events: EventStream, encode: Callable[[Delta], bytes], sequences: int) -> bytes:
    """Send what each wake of `stream` brings, until its end.

    Returns:
        The encoded deltas after which no sequence is left, unsent: they travel with the end of the response.
    """

    def encode_all(deltas: list[Delta]) -> bytes:
        data, tokens = b"", 0
        for delta in deltas:
            data += encode(delta)
            tokens += len(delta.token_ids)
        events.delivered(tokens)
        return data

    events.write_at_once(stream, encode_all)
    while deltas := await stream.wake():
        data = encode_all(deltas)
        sequences -= sum([delta.finish_reason is not None for delta in deltas])
        if sequences == 0:
            async for rest in stream:
                data += encode(rest)
                events.delivered(len(rest.token_ids))
            return data
        if data:
            await events.send(data)
    return b""


def account(exchange: Exchange, completions: Sequence[Completion]) -> None:
    """For the access line: what whole answers cost."""
    exchange.prompt_tokens = sum(completion.usage.prompt_tokens for completion in completions)
    exchange.completion_tokens = sum(completion.usage.completion_tokens for completion in completions)
    firsts = [first for completion in completions if (first := completion.timing.first_token) is not None]
    exchange.first_token_seconds = min(firsts, default=None)


def finish_reason(delta: Delta) -> FinishReason | None:
    """The delta's finish reason as clients may see it.

    Raises:
        RequestAborted: the server ended the sequence, which is an error and never a normal end.
    """
    if delta.finish_reason == "abort":
        raise RequestAborted("the request was ended by the server")
    return delta.finish_reason


def usage_body(usages: Sequence[Usage], *, hide_completion: bool = False) -> UsageBody:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = 0 if hide_completion else sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    reasoning = sum(usage.reasoning_tokens for usage in usages)
    truncated = True if any(usage.truncated for usage in usages) else UNSET
    of_prompt = PromptTokensDetails(cached, truncated, _sources(usages))
    of_completion = CompletionTokensDetails(reasoning, **predictions(usages))
    return UsageBody(prompt, completion, prompt + completion, of_prompt, of_completion)


def _sources(usages: Sequence[Usage]) -> dict[str, int] | UnsetType:
    """Where cached tokens came from; nothing where there are no tiers behind the device."""
    known = [usage.cached_sources for usage in usages if usage.cached_sources is not None]
    if not known:
        return UNSET
    names = CachedTokens.__struct_fields__
    return {name: sum(getattr(sources, name) for sources in known) for name in names}


def final_usage(usage: Usage | None) -> Usage:
    """A stream's usage after its end."""
    assert usage is not None, "a stream that ended without an error has usage"
    return usage


def include_usage(request: GenerationFields) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def continuous_usage(request: GenerationFields) -> bool:
    return include_usage(request) and bool(request.stream_options and request.stream_options.continuous_usage_stats)


def options(exchange: Exchange, request: GenerationFields) -> dict[str, Any]:
    """The engine's options beside prompt and parameters, of every route: HTTP never waits for a place."""
    return {
        "wait": False,
        "tenant": exchange.key,
        "cache_salt": (request.cache_salt or "").encode(),
        "deadline": request.queue_timeout,
        "hints": hints_of(exchange, request),
        "adapter": exchange.adapter,
    }


def predictions(usages: Sequence[Usage]) -> dict[str, int]:
    """Fields of `PredictionDetails`; none where nothing was drafted."""
    drafted = sum(usage.draft_tokens for usage in usages)
    if not drafted:
        return {}
    accepted = sum(usage.accepted_draft_tokens for usage in usages)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": drafted - accepted,
        "prediction_steps": sum(usage.draft_steps for usage in usages),
    }
