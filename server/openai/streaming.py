"""The shared part of generating routes: a request's options of the engine and its session, the sends of a stream's
deltas, and token counts as the API reports them."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from troupellm.actors.client.stream import Stream
from troupellm.protocol.api.chat import GenerationFields, UsageBody
from troupellm.protocol.api.usage import CompletionTokensDetails, PromptTokensDetails
from troupellm.protocol.config.kv_hints import RETENTION_SECONDS, KVHints
from troupellm.protocol.errors import RequestAborted
from troupellm.protocol.params.outputs import CachedTokens, Completion, Delta, FinishReason, Usage
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.skipped import skipped_names
from troupellm.server.base.sse import EventStream
from troupellm.server.openai.balancer_headers import replica_of

MAX_SESSION_ID = 512
"""Characters."""
_HEADERS = (b"x-session-id", b"x-claude-code-session-id", b"session_id", b"thread-id", b"x-session-affinity")
"""In the order in which they are looked at: any client's, Claude Code's, two of Codex, that of opencode and pi."""


class Session(msgspec.Struct, frozen=True):
    id: str | None
    """Of the key's sessions; other keys may use the same id for theirs."""
    skipped: list[str]
    """Names that cannot be one; see `skipped_names`."""


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
    images = sum(usage.image_tokens for usage in usages) or UNSET
    of_prompt = PromptTokensDetails(cached, truncated, _sources(usages), images)
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


def hints_of(exchange: Exchange, request: GenerationFields) -> KVHints:
    """The KV hints in a request's fields and headers.

    Raises:
        InvalidRequest: `X-data-parallel-rank` is no number.
    """
    retain = RETENTION_SECONDS.get(request.prompt_cache_retention or "", 0.0)
    return KVHints(session=session_of(exchange, request).id or "", retain=retain, replica=replica_of(exchange))


def session_of(exchange: Exchange, request: GenerationFields) -> Session:
    """The first name that a request gives its session; one that is empty, too long or unprintable is passed over."""
    found = [("session_id", request.session_id)]
    found += [(name.decode(), exchange.header(name)) for name in _HEADERS]
    user = None if request.metadata is None else request.metadata.get("user_id")
    found += [("prompt_cache_key", request.prompt_cache_key), ("user_id", user)]
    wrong: list[str] = []
    for place, name in found:
        if name and len(name) <= MAX_SESSION_ID and name.isprintable():
            return Session(name, skipped_names("session", wrong) if wrong else [])
        if name:
            wrong.append(place)
    return Session(None, skipped_names("session", wrong) if wrong else [])
