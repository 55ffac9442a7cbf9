"""Request fields beside OpenAI's core ones: vLLM's extensions, and those that only describe the request.

Fields typed `Any` are refused by the server unless they are absent, null, false or empty.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Label = Annotated[str, Meta(max_length=512)]
"""A name of the client's own; never used as a key, a path or a label of a metric."""

RequestName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^(?!.*\n)[A-Za-z0-9._:-]+$")]
Processors = list[str | dict[str, Any]] | dict[str, dict[str, Any] | None]


class RepetitionFields(msgspec.Struct, kw_only=True):
    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


class DescriptiveFields(msgspec.Struct, kw_only=True):
    """Labels of the caller and of the request: checked, and forgotten apart from the name of a session."""

    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    session_id: str | None = None
    """The session that the request belongs to: tools are shown in the order of their names."""
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    """All are served alike; vLLM's `priority` is what orders requests here."""
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
    prediction: dict[str, Any] | None = None
    """A hint that could make an answer faster, and never another one."""
    store: bool | None = None


class SharedExtras(DescriptiveFields, kw_only=True):
    """Fields of chat completions, completions and responses beyond OpenAI's API."""

    logprob_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    """-1 is as many as the context holds beside the answer."""
    truncation_side: Literal["left", "right"] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionFields | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None
    """Tokens per event of a stream; 1 is an event per token."""
    logits_processors: Processors | None = None
    """The server's plug-ins by name, with plain data as arguments; never code."""
    vllm_xargs: dict[str, Any] | None = None
    """Arguments of the server's plug-ins by the plug-ins' own names for them."""


class ExtraFields(SharedExtras, kw_only=True):
    """Further fields of chat completions and completions, and fields that they refuse by name."""

    request_id: RequestName | None = None
    """Shows in the answer's id."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens in log-probabilities show as token_id:NUMBER."""
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    """Where another engine finds the prompt's KV blocks; see `server/openai/kv_transfer.py`."""
    ec_transfer_params: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    watermarking: Any = None
    routed_experts_prompt_start: Any = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: Any = None
    return_weight_versions: Any = None
    return_prompt_text: Any = None
