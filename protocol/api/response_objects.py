"""Answers of the responses API: the response object, its output items, and the lists around it."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from troupellm.protocol.api.conversations import ConversationReference
from troupellm.protocol.api.kv_transfer import RemoteBlocks
from troupellm.protocol.api.usage import OutputTokensDetails

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class TopLogprobEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class LogprobEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobEntry]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[dict[str, Any]] = []
    logprobs: list[LogprobEntry] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[dict[str, Any]] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None
    status: ItemStatus = "in_progress"


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    """Where the function stands in one."""
    arguments: str = ""
    status: ItemStatus = "in_progress"


class CompactionItem(msgspec.Struct, kw_only=True, tag_field="type", tag="compaction"):
    id: str
    encrypted_content: str
    """A summary of what came before, for the server; the client sends it back unread."""


OutputItem = OutputMessage | ReasoningItem | FunctionCall | CompactionItem
ContentPart = OutputText | ReasoningText


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0
    truncated: bool | UnsetType = UNSET
    """True where the prompt was longer than `truncate_prompt_tokens` and was cut; ours."""


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens", "content_filter"]


class ReasoningEcho(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Epoch seconds."""
    status: ResponseStatus
    background: bool = False
    completed_at: int | None = None
    conversation: ConversationReference | None = None
    """The conversation that the response was added to; null where that did not work, too."""
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningEcho = msgspec.field(default_factory=ReasoningEcho)
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool
    """Whether it can be retrieved later: false also where keeping it has failed."""
    temperature: float
    text: dict[str, Any] = {}
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    """Those that the model was told of; the header x-troupellm-skipped names the others."""
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    kv_transfer_params: RemoteBlocks | UnsetType = UNSET
    """Not stored: blocks go."""


class CompactedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    """Epoch seconds."""
    output: list[CompactionItem]
    usage: ResponseUsage


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
