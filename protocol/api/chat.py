"""Bodies of the OpenAI-compatible API: what clients send and what they get back.

Every optional request field may also be null, unknown fields are ignored, and types are checked here while ranges are
checked by `SamplingParams`. Fields typed `Any` are refused by the server unless they are absent, null, false or empty.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from troupellm.protocol.api.extensions import ExtraFields
from troupellm.protocol.api.kv_transfer import RemoteBlocks
from troupellm.protocol.api.open_schemas import ChatContent, PastCalls, PastFunction, PastSound, PastText
from troupellm.protocol.api.tools import ToolBody, ToolChoiceBody
from troupellm.protocol.api.usage import CompletionTokensDetails, PromptTokensDetails
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.protocol.params.tools import Effort


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(ExtraFields, kw_only=True):
    """The fields that chat completions and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    queue_timeout: Annotated[float, Meta(gt=0.0)] | None = None
    """Seconds that the request may wait to begin; ours."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    add_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    early_stopping: bool | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    """This and the next two are SGLang's names for what `structured_outputs` has."""
    regex: str | None = None
    ebnf: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    response_format: dict[str, Any] | None = None
    length_penalty: float | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: ChatContent = None
    name: PastText = None
    tool_calls: PastCalls = None
    function_call: PastFunction = None
    tool_call_id: PastText = None
    reasoning: PastText = None
    reasoning_content: PastText = None
    refusal: PastText = None
    audio: PastSound = None


class ToolFields(GenerationFields, kw_only=True):
    """The fields of a chat request about tools and reasoning."""

    tools: list[ToolBody] | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    """Handed to the chat template; none also turns thinking off where the template can."""
    include_reasoning: bool | None = None
    """False: reasoning is counted and not shown."""
    functions: Any = None
    function_call: Any = None


class ChatRequest(ToolFields, kw_only=True):
    HOLDS_CONVERSATION: ClassVar[bool] = True
    """Half of a surrogate pair, which a past answer may have, is U+FFFD and not refused."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    """Only for servers that trust requests so far."""
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """A hint that no open model knows: accepted."""
    echo: bool | None = None
    """Begin the answer with the last message where that is the assistant's."""


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    HOLDS_CONVERSATION: ClassVar[bool] = True
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    documents: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = msgspec.field(default_factory=CompletionTokensDetails)


class ChatTopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]


class TextLogprobs(msgspec.Struct):
    """The completions API's parallel lists; `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class AnswerFunction(msgspec.Struct):
    name: str
    arguments: str


class AnswerCall(msgspec.Struct):
    id: str
    function: AnswerFunction
    type: str = "function"


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The same under the name that older clients read."""
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    kv_transfer_params: RemoteBlocks | UnsetType = UNSET


class TextChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody
    system_fingerprint: str
    kv_transfer_params: RemoteBlocks | UnsetType = UNSET


class DeltaFunction(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class DeltaCall(msgspec.Struct, omit_defaults=True):
    """A piece of a tool call; id, type and name only in the first one."""

    index: int
    function: DeltaFunction
    id: str | None = None
    type: str | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaCall] | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat; the last one before the end may have usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    """In the first chunk, where token ids are asked for."""


class TextChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    """In the first chunk of each choice, where token ids are asked for."""


class TextChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed completion; the last one before the end may have usage and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class ErrorObject(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorObject


class AnthropicErrorObject(msgspec.Struct, kw_only=True):
    type: str
    message: str
    details: dict[str, str] | UnsetType = UNSET
    """`error_code`, where clients recover by it."""


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    """Errors of the routes that Anthropic's clients call."""

    type: Literal["error"] = "error"
    error: AnthropicErrorObject


class ProbeReport(msgspec.Struct, kw_only=True):
    """The answer of a probe. `reasons` explain a bad one."""

    status: str
    reasons: list[str]
    progress: LoadProgress | UnsetType = UNSET
    """While the model loads."""


class Welcome(msgspec.Struct, kw_only=True):
    """The answer of GET /, where programs look whether a server answers at all."""

    name: str = "troupellm"
    status: Literal["ok"] = "ok"


class VersionBody(msgspec.Struct):
    version: str


class LoadBody(msgspec.Struct):
    server_load: int
    """Requests in flight."""
