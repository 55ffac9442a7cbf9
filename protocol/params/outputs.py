"""The results of a request: deltas while it runs, a completion at its end."""

from array import array
from typing import Literal

import msgspec

from troupellm.protocol.quota import Quota

FinishReason = Literal["stop", "length", "abort", "repetition"]


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprob: float
    rank: int
    token: str
    """Text of this token alone; bytes that are no whole character show as the replacement character."""
    raw: bytes
    """The token's own bytes."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token's log-probability and the alternatives that were asked for."""

    token_id: int
    logprob: float
    rank: int
    token: str
    raw: bytes
    top: tuple[TopLogprob, ...] = ()


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Where the cached tokens of a prompt came from."""

    device: int = 0
    host: int = 0
    disk: int = 0
    external: int = 0
    """Through a connector."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    cached_sources: CachedTokens | None = None
    """The same by tier; None where there are no tiers behind the device."""
    reasoning_tokens: int = 0
    """Of the completion's tokens, those that were reasoning; counted where answers are parsed."""
    image_tokens: int = 0
    """Prompt tokens that are embeddings of images."""
    draft_steps: int = 0
    """Steps in which a sequence had drafts verified."""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    truncated: bool = False
    """The prompt was longer, and was cut because the request asked for it."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from arrival, on one monotonic clock; None has not happened."""

    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Delta(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The new output of one of a request's sequences since the last delta. Never cumulative."""

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the sequence."""


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: str
    """Text of a JSON object, unless the model wrote something else."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """An answer in a chat, parsed."""

    content: str | None
    """None where there are tool calls, or only reasoning, and no content."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    calls_whole: bool = True
    """The last tool call has all its arguments: no limit or stop string ended the answer within them."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprob: float | None = None
    """Of all its tokens; known where log-probabilities were asked for or decided over the answer."""
    message: Message | None = None
    """In a chat: `text` with its tool calls and reasoning told apart."""


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """The result of pooling a prompt."""

    request_id: str
    vector: bytes
    """float32."""
    usage: Usage
    timing: Timing
    prompt_token_ids: tuple[int, ...]
    quota: Quota | None = None
    """The rest of its tenant's limits when it was admitted."""

    @property
    def values(self) -> list[float]:
        return array("f", self.vector).tolist()


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. `text`, `token_ids` and `finish_reason` are those of the first choice."""

    request_id: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage
    timing: Timing
    prompt_token_ids: tuple[int, ...]
    prompt: str | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One entry per prompt token; the first is None."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason
