"""Bodies of POST /v1/responses: what clients send.

Optional fields may also be null and unknown ones are ignored. `input` and `tools` are checked item by item by the
server, because items may leave out their type. Fields typed `Refused` belong to other APIs or to features that are not
served.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from troupellm.protocol.api.conversations import ConversationReference
from troupellm.protocol.api.extensions import SharedExtras
from troupellm.protocol.api.open_schemas import InputItem, Refused, ResponseTool, TextFormat


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Accepted; reasoning is shown as it is, never summarised."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """A hint that no open model knows: accepted."""


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None
    """Accepted; no padding is added either way."""


class ContextManagement(msgspec.Struct, kw_only=True):
    type: str
    """compaction."""
    compact_threshold: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Tokens: a longer prompt is summarized first. None: never."""


class ResponsesRequest(SharedExtras, kw_only=True):
    """`store` keeps the response for later; true unless told otherwise, where the server keeps any."""

    HOLDS_CONVERSATION: ClassVar[bool] = True
    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    conversation: str | ConversationReference | None = None
    """Of /v1/conversations: its items stand before the input, and the input and the output are added to it."""
    max_output_tokens: Annotated[int, Meta(le=2**31 - 1)] | None = None
    """An upper bound: an answer that fills the context before it is incomplete there."""
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    """Counts built-in tools, of which there are none here."""
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    include: list[str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: list[ContextManagement] | None = None

    # Fields of other servers beside them and the shared extras, under the names of chat completions.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    queue_timeout: Annotated[float, Meta(gt=0.0)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    structured_outputs: Any = None

    # Refused by name.
    prompt: Refused = None
    moderation: Refused = None
    json_schema: Refused = None
    regex: Refused = None
    ebnf: Refused = None
    messages: Refused = None
    max_tokens: Refused = None
    max_completion_tokens: Refused = None
    response_format: Refused = None
    functions: Refused = None
    n: Refused = None
    logprobs: Refused = None
    request_id: Refused = None
    return_token_ids: Refused = None
    return_tokens_as_token_ids: Refused = None
    kv_transfer_params: Any = None
    """As in chat completions."""
    ec_transfer_params: Refused = None


class CompactRequest(ResponsesRequest, kw_only=True):
    """Body of POST /v1/responses/compact: the same, and what makes the prompt is summarized."""


class InputTokensRequest(ResponsesRequest, kw_only=True):
    """Body of POST /v1/responses/input_tokens: the same, and only what makes the prompt counts."""
