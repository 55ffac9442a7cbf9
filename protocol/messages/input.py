"""Messages to the input processor."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from troupellm.protocol.config.kv_hints import NO_HINTS, CacheMark, KVHints, PrefixLease
from troupellm.protocol.messages.adapters import AdapterRef
from troupellm.protocol.messages.media import MediaItem, MediaSource, MediaSpan
from troupellm.protocol.messages.output import Outbox
from troupellm.protocol.params.pooling import PoolingParams
from troupellm.protocol.params.sampling import SamplingParams

_StructMeta = type(msgspec.Struct)


class OtherKeywords(_StructMeta):  # type: ignore[misc,valid-type]
    """Metaclass of a Struct with `other_keywords`, a table from the other spelling to the field."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            for other, field in cls.other_keywords.items():
                if other in fields:
                    fields[field] = fields.pop(other)
            return super().__call__(*args, **fields)


class RequestGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one call, which are let in together or not at all. All of them name the same group."""

    name: str
    """Unlike that of any other call."""
    sequences: int
    tokens: int
    """Prompt tokens, roughly."""
    max_tokens: int = 0
    """The sum of the generation limits that they state, in tokens."""


class ManyPrompts(msgspec.Struct, frozen=True):
    """One of many prompts of a call that takes places as it goes, a bounded number at a time."""

    first: bool
    """The call is its tenant's one request, and is checked against the tenant's limits, with this one."""
    tokens: int
    """Of all its prompts, roughly."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The demand of a request."""

    sequences: int
    tokens: int
    """Of its prompt, roughly."""
    max_tokens: int = 0
    """The generation limit of all its sequences, if it states one: counts towards a tenant's tokens per minute."""
    tenant: str = ""
    request_group: RequestGroup | None = None
    many_prompts: ManyPrompts | None = None


class Truncation(msgspec.Struct, frozen=True):
    """Cut a prompt that is too long instead of refusing it."""

    tokens: int
    """How many to keep; -1: as many as leave room for the answer."""
    side: Literal["left", "right"] = "left"
    """Where the rest is cut off: left keeps the last tokens, right the first."""


class TextPrompt(msgspec.Struct, frozen=True, metaclass=OtherKeywords):
    other_keywords: ClassVar[dict[str, str]] = {"prompt": "text"}
    text: str
    add_special_tokens: bool = True
    truncation: Truncation | None = None


class TokensPrompt(msgspec.Struct, frozen=True, metaclass=OtherKeywords):
    other_keywords: ClassVar[dict[str, str]] = {"prompt_token_ids": "token_ids"}
    token_ids: Sequence[int]
    truncation: Truncation | None = None
    segment: int = 0
    """Position of the first token of a pair's second text; 0 where there is none."""
    truncated: bool = False
    """These are what was left of a longer prompt."""
    leases: tuple[PrefixLease, ...] = ()
    """The leases that the cache marks of a chat make."""
    borders: tuple[int, ...] = ()
    """As of `SubmitRequest`."""
    media: tuple[MediaSpan, ...] = ()
    """As of `SubmitRequest`."""


class PairPrompt(msgspec.Struct, frozen=True):
    """Two texts for a cross-encoder, joined as the tokenizer joins them."""

    text: str
    second: str
    truncation: Truncation | None = None
    """The longer text is cut first."""


class EmbedsPrompt(msgspec.Struct, frozen=True):
    """Input embeddings instead of tokens; only for an engine in the caller's own process."""

    embeddings: bytes
    """float32 [tokens, hidden], row after row."""
    num_tokens: int


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages to be rendered by the model's chat template (`role`, `content` and what else the template reads)."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    """For templates that ground an answer in them."""
    template: str | None = None
    """Text of a template to use instead of the model's; the caller has decided to trust it that far."""
    truncation: Truncation | None = None
    cache_marks: tuple[CacheMark, ...] = ()
    """Places up to which the KV cache is to be kept, in the order of the prompt."""
    media: tuple[MediaSource, ...] = ()
    """One for each part of type image in the messages, in their order."""
    items: tuple[MediaItem, ...] = ()
    """The same, prepared."""


Prompt = TextPrompt | TokensPrompt | ChatPrompt | EmbedsPrompt | PairPrompt


class Generated(msgspec.Struct, frozen=True):
    """Tokens of a sequence that another engine has drawn and its reader has. This engine continues behind them."""

    token_ids: bytes = b""
    """int32 [tokens]."""
    ended: bool = False
    """The sequence has ended: nothing more is generated for it."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A request as its caller made it."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    wait: bool = True
    """Wait for a place instead of being refused."""
    tenant: str = ""
    """Whose request it is; the name of its API key, never the key."""
    request_group: RequestGroup | None = None
    cache_salt: bytes = b""
    deadline: float | None = None
    """Seconds from now until which the request must have been scheduled."""
    streaming: bool = True
    pooling: PoolingParams | None = None
    """None generates; otherwise `params` only say that nothing is generated."""
    many_prompts: ManyPrompts | None = None
    hints: KVHints = NO_HINTS
    adapter: str = ""
    """Name of a LoRA adapter; empty is the model itself."""
    generated: tuple[Generated, ...] = ()
    """One for each sequence of a request that another engine began; empty: the request begins here."""


class PrepareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Render, tokenize, validate, then tell the output actor and the scheduler; a refusal goes to the outbox."""

    request: int
    """The engine's own number of the request."""
    submission: Submission
    outbox: Outbox
    arrival: float
    """Seconds on the engine's clock."""
    deadline: float | None = None
    """Likewise: until then it must have been scheduled."""
    adapter: AdapterRef | None = None
    """What the submission's name stands for, once the adapter library has found it."""


IntakeMessage = PrepareRequest
