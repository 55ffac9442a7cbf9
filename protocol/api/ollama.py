"""Bodies of Ollama's API: what its clients send and what they get back.

Optional fields may also be null, and unknown ones are ignored. Fields typed `Any` are refused by the server unless they
are absent, null, false or empty.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from troupellm.protocol.api.chat import ChatTokenLogprob
from troupellm.protocol.api.open_schemas import PastCalls, PastText
from troupellm.protocol.api.tools import ToolBody

KeepAlive = Annotated[str, Meta(pattern=r"^-?(\d+|(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+)$", max_length=64)] | float
"""Seconds, or a duration such as 5m. The one model of the server stays loaded in any case."""


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Sampling under Ollama's names. Options of its runner, such as `num_gpu`, have no effect here."""

    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    """Tokens of the answer; 0, -1 and -2 set no limit."""
    num_ctx: int | None = None
    """Accepted: the context is that of the server."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    """-1 draws a new one."""
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    """This and the next one are ours, as in chat completions."""
    min_tokens: int | None = None
    mirostat: float | None = None
    """This and the next three are skipped, and named in x-troupellm-skipped."""
    repeat_last_n: float | None = None
    tfs_z: float | None = None
    typical_p: float | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: PastText = None
    images: list[str] | None = None
    """Base64."""
    tool_calls: PastCalls = None
    tool_name: PastText = None
    tool_call_id: PastText = None


class OllamaFields(msgspec.Struct, kw_only=True):
    """The fields of both routes that write text."""

    model: str | None = None
    stream: bool | None = None
    """Lines of JSON, unless it is false."""
    format: str | dict[str, Any] | None = None
    """`json`, or a JSON schema."""
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: KeepAlive | None = None
    truncate: bool | None = None
    """True cuts a prompt that is longer than the context; without it such a prompt is refused."""
    shift: bool | None = None
    """Accepted: an answer that fills the context ends there."""
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatRequest(OllamaFields, kw_only=True):
    HOLDS_CONVERSATION: ClassVar[bool] = True
    messages: list[OllamaMessage]
    """Empty: the model is to be loaded, which it is."""
    tools: list[ToolBody] | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    prompt: str | None = None
    """Empty or missing: the model is to be loaded, which it is."""
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    """True: the prompt is the text as it is, without the model's chat template."""
    suffix: Any = None
    template: Any = None
    context: Any = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[str] | None = None
    truncate: bool | None = None
    """False refuses a text that is longer than the model takes; otherwise its end is cut off."""
    dimensions: int | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingRequest(msgspec.Struct, kw_only=True):
    """The older form, with one text."""

    model: str | None = None
    prompt: str | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaNamedRequest(msgspec.Struct, kw_only=True):
    """The body of a route that is about one model."""

    model: str | None = None
    name: str | None = None
    """The older name of `model`."""
    stream: bool | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, kw_only=True):
    id: str
    function: OllamaFunction


class OllamaAnswer(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaLine(msgspec.Struct, kw_only=True):
    """The fields of every line of an answer. Durations are nanoseconds, and only the last line has them."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    """stop, length, load or unload."""
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class OllamaChatLine(OllamaLine, kw_only=True):
    message: OllamaAnswer


class OllamaGenerateLine(OllamaLine, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaVectors(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(msgspec.Struct, kw_only=True):
    embedding: list[float]


class OllamaDetails(msgspec.Struct, kw_only=True):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str | UnsetType = UNSET
    """This and the next two only where the list is of loaded models."""
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(msgspec.Struct, kw_only=True):
    models: list[OllamaModel]


class OllamaModelInfo(msgspec.Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, kw_only=True):
    version: str


class OllamaStatus(msgspec.Struct, kw_only=True):
    status: str


class OllamaError(msgspec.Struct, kw_only=True):
    """The body of an error, and the line that ends a stream that has failed."""

    error: str
