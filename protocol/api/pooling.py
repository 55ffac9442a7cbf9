"""Bodies of the APIs that pool: OpenAI's embeddings, and vLLM's, Jina's and Cohere's scores, ranks and classes.

Every optional field may also be null, unknown fields are ignored, types are checked here and ranges by the server.
Fields typed `Any` are refused unless they are absent, null, false or empty.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from troupellm.protocol.api.chat import ChatMessage, UsageBody
from troupellm.protocol.api.extensions import Label


class PoolingFields(msgspec.Struct, kw_only=True):
    """The fields that all of them have."""

    model: str | None = None
    user: Label | None = None
    truncate_prompt_tokens: int | None = None
    """A longer input is cut to so many tokens; -1 is what the model takes."""
    truncation_side: Literal["left", "right"] | None = None
    """Where it is cut: right, the default, keeps the first tokens."""
    use_activation: bool | None = None
    """Unit length for embeddings, probabilities for classes; null is as the model was made."""
    priority: int | None = None
    queue_timeout: Annotated[float, Meta(gt=0.0)] | None = None
    """Seconds that each input may wait to begin; ours."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^(?!.*\n)[A-Za-z0-9._:-]+$")] | None = None
    mm_processor_kwargs: Any = None


class InputFields(PoolingFields, kw_only=True):
    """Either `input` or `messages`."""

    input: str | list[str | int | list[int]] | None = None
    """A text, a list of token ids, or a list of either."""
    messages: list[ChatMessage] | None = None
    """One conversation, rendered by the model's chat template."""
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    """False where it is not given: an embedding is of what was said."""
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    tools: Any = None
    documents: Any = None


class VectorFields(InputFields, kw_only=True):
    encoding_format: str | None = None
    """float, or base64 of little-endian float32."""
    dimensions: int | None = None
    """Only of models that were trained for it."""
    normalize: bool | None = None
    """The older name of `use_activation`."""
    embed_dtype: str | None = None
    """float32."""
    endianness: Literal["native", "little", "big"] | None = None
    """Of base64."""


class EmbeddingRequest(VectorFields, kw_only=True):
    pass


class PoolingRequest(VectorFields, kw_only=True):
    task: str | None = None
    """embed, classify or score; what the model was made for, where it is not given."""


class ClassifyRequest(InputFields, kw_only=True):
    pass


Texts = str | list[str]


class ScoreRequest(PoolingFields, kw_only=True):
    """A pair of fields: text_1 and text_2, data_1 and data_2, queries and documents, or queries and items."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    instruction: Any = None
    max_tokens_per_query: Any = None
    max_tokens_per_doc: Any = None
    softmax: Any = None


class RerankRequest(PoolingFields, kw_only=True):
    query: str
    documents: list[str | dict[str, Any]]
    """Texts, or objects with a `text`."""
    top_n: int | None = None
    """How many to return; 0 is all."""
    return_documents: bool | None = None
    """False leaves the texts out."""
    instruction: Any = None
    max_tokens_per_query: Any = None
    max_tokens_per_doc: Any = None
    max_chunks_per_doc: Any = None
    rank_fields: Any = None


class PoolingEnvelope(msgspec.Struct, kw_only=True):
    """An answer without its items."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: UsageBody


class EmbeddingItem(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(PoolingEnvelope, kw_only=True):
    data: list[EmbeddingItem]


class PoolingItem(msgspec.Struct, kw_only=True):
    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | str


class PoolingResponse(PoolingEnvelope, kw_only=True):
    data: list[PoolingItem]


class ClassifyItem(msgspec.Struct, kw_only=True):
    index: int
    label: str | None
    """The likeliest."""
    probs: list[float]
    num_classes: int


class ClassifyResponse(PoolingEnvelope, kw_only=True):
    data: list[ClassifyItem]


class ScoreItem(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(PoolingEnvelope, kw_only=True):
    data: list[ScoreItem]


class RerankDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct, kw_only=True):
    index: int
    document: RerankDocument | UnsetType = UNSET
    relevance_score: float


class RerankUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    truncated: bool | UnsetType = UNSET
    """True where a text was longer than `truncate_prompt_tokens` and was cut; ours."""


class RerankResponse(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]
    """Best first."""
