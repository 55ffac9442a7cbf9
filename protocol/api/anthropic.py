"""Bodies of POST /v1/messages and its token count: what Anthropic's clients send and what they get back.

Optional fields may also be null and unknown ones are ignored. Content blocks and tools are checked one by one by the
server.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from troupellm.protocol.api.extensions import Label, Processors, RepetitionFields, RequestName
from troupellm.protocol.api.kv_transfer import RemoteBlocks
from troupellm.protocol.api.open_schemas import MESSAGE_CONTENT, JsonFormat, MessageTool, Refused, SystemBlock
from troupellm.protocol.api.usage import MessageTokensDetails


class InputMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(extra_json_schema={"enum": ["user", "assistant", "system"]})]
    content: Annotated[Any, Meta(extra_json_schema=MESSAGE_CONTENT)] = None


class MessageMetadata(msgspec.Struct, kw_only=True):
    user_id: Label | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    """omitted: blocks of thinking come without their text. The others show it as it is, never summarized."""


class ThreadFields(msgspec.Struct, kw_only=True):
    """create: hold the conversation under the id of the answer. continue: the messages come after those of a thread."""

    type: Literal["create", "continue"]
    previous_message_id: Annotated[str, Meta(max_length=256)] | None = None


class EditAmount(msgspec.Struct, kw_only=True):
    type: str
    value: Annotated[int, Meta(ge=0, le=2**31 - 1)]


class ContextEdit(msgspec.Struct, kw_only=True):
    """clear_tool_uses_20250919 or clear_thinking_20251015; other types are skipped."""

    type: Annotated[str, Meta(max_length=128)]
    trigger: EditAmount | None = None
    """Of input_tokens (100,000 unless it is given) or tool_uses: up to so many nothing is cleared."""
    keep: EditAmount | str | None = None
    """The last tool_uses (3) or thinking_turns (1); all keeps every thought."""
    clear_at_least: EditAmount | None = None
    """An edit that clears fewer input_tokens is not applied."""
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None
    """The arguments of cleared calls go too, or those of these tools."""


class MessageContextManagement(msgspec.Struct, kw_only=True):
    edits: Annotated[list[ContextEdit], Meta(max_length=16)] | None = None


class CacheControl(msgspec.Struct, kw_only=True):
    """Asks that the prompt up to a block stays in the prefix cache. Blocks have marks of this form too."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class MessageToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: JsonFormat | None = None


class PromptFields(msgspec.Struct, kw_only=True):
    """The fields that make the prompt."""

    HOLDS_CONVERSATION: ClassVar[bool] = True
    model: str | None = None
    messages: list[InputMessage]
    system: str | list[SystemBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    """The older place of `output_config.format`."""
    metadata: MessageMetadata | None = None
    session_id: str | None = None
    """The session that the request belongs to: tools are shown in the order of their names."""
    cache_control: CacheControl | None = None
    """A mark behind the last block, beside those of blocks."""
    chat_template_kwargs: dict[str, Any] | None = None
    thread: ThreadFields | None = None
    """With continue, `system` and `tools` are those of the thread unless they are given."""

    context_management: MessageContextManagement | None = None
    """Edits that make the conversation shorter, in their order."""

    container: Refused = None
    mcp_servers: Refused = None


class CountTokensRequest(PromptFields, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, kw_only=True):
    """`max_tokens` is an upper bound: an answer that fills the context before it ends there."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    # Fields of other servers, under the names of chat completions.
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    priority: int | None = None
    queue_timeout: Annotated[float, Meta(gt=0.0)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    repetition_detection: RepetitionFields | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None
    request_id: RequestName | None = None
    """Shows in the message's id."""
    logits_processors: Processors | None = None
    vllm_xargs: dict[str, Any] | None = None

    json_schema: Refused = None
    regex: Refused = None
    ebnf: Refused = None
    logprob_token_ids: Refused = None
    thinking_token_budget: Refused = None
    return_token_ids: Refused = None
    return_tokens_as_token_ids: Refused = None
    kv_transfer_params: Any = None
    """As in chat completions."""
    ec_transfer_params: Refused = None


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str
    """A digest of the text. It is not asked for when the block comes back."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    """Without those that came from the prefix cache."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: MessageTokensDetails | None = None
    truncated: bool | UnsetType = UNSET
    """True where the prompt was longer than `truncate_prompt_tokens` and was cut; ours."""
    service_tier: str = "standard"


class AppliedEdit(msgspec.Struct, kw_only=True):
    type: str
    cleared_tool_uses: int | UnsetType = UNSET
    cleared_thinking_turns: int | UnsetType = UNSET
    cleared_input_tokens: int


class AppliedEdits(msgspec.Struct, kw_only=True):
    applied_edits: list[AppliedEdit]


class Message(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET
    """Where the request has some."""
    kv_transfer_params: RemoteBlocks | UnsetType = UNSET


class OriginalTokens(msgspec.Struct, kw_only=True):
    original_input_tokens: int
    """Of the prompt without the edits."""


class TokenCount(msgspec.Struct):
    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET


class TextDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class InputJsonDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class ThinkingDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="signature_delta"):
    signature: str


class StopDelta(msgspec.Struct, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageStart(msgspec.Struct, kw_only=True, tag_field="type", tag="message_start"):
    message: Message


class Ping(msgspec.Struct, kw_only=True, tag_field="type", tag="ping"):
    """A sign of life."""


class ContentBlockStart(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class ContentBlockDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | InputJsonDelta | ThinkingDelta | SignatureDelta


class ContentBlockStop(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET


class MessageStop(msgspec.Struct, kw_only=True, tag_field="type", tag="message_stop"):
    pass


MessageEvent = (
    MessageStart | Ping | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
)
MESSAGE_EVENTS: tuple[type[MessageEvent], ...] = (
    MessageStart,
    Ping,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
)
