"""Details of the usage objects of HTTP APIs. Fields that do not apply are left out."""

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    truncated: bool | UnsetType = UNSET
    """True where a prompt was longer than `truncate_prompt_tokens` and was cut; ours."""
    cached_tokens_by_source: dict[str, int] | UnsetType = UNSET
    """By tier (device, host, disk, external), where KV blocks are offloaded; ours."""
    image_tokens: int | UnsetType = UNSET
    """Those that are embeddings of images, where there are any."""


class PredictionDetails(msgspec.Struct, kw_only=True):
    """Counts of speculative decoding, present if it drafted. OpenAI's names, in every API."""

    accepted_prediction_tokens: int | UnsetType = UNSET
    """Drafts that were accepted."""
    rejected_prediction_tokens: int | UnsetType = UNSET
    """Drafts that were verified for nothing."""
    prediction_steps: int | UnsetType = UNSET
    """Steps in which drafts were verified; ours. Each gave one token more than it accepted drafts."""


class CompletionTokensDetails(PredictionDetails):
    reasoning_tokens: int = 0


class OutputTokensDetails(PredictionDetails):
    """Of the responses API."""

    reasoning_tokens: int


class MessageTokensDetails(PredictionDetails):
    """Of the messages API; what was predicted is ours, and its clients keep fields that they do not know."""

    thinking_tokens: int
