"""The answers of GET /v1/models and /tokenizer_info. The list has the fields of OpenAI's and those of Anthropic's."""

from typing import Any, Literal

import msgspec


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "troupe"
    root: str
    parent: str | None = None
    max_model_len: int
    tasks: list[str]
    """Its uses: generate, embed, classify, score; ours."""
    modalities: list[str]
    """Of its prompts: text, image."""
    type: Literal["model"] = "model"
    """From here on the fields of Anthropic's API."""
    display_name: str
    created_at: str
    """RFC 3339."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int
    """Most that `max_tokens` of a request can bring."""
    capabilities: dict[str, Any]
    """By Anthropic's names; each says whether it is supported."""


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    first_id: str | None = None
    """This and the next two are those of Anthropic's pages; all models are on one."""
    last_id: str | None = None
    has_more: bool = False


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Facts about the tokenizer, as vLLM's route of this name gives them; unknown ones are left out."""

    vocab_size: int
    """Token ids go up to this one less."""
    model_max_length: int
    eos_token_ids: list[int]
    special_tokens: dict[str, str]
    chat_template: str | None
