"""What a usage object of OpenAI's API says beyond its sums. Fields that do not apply are left out."""

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    truncated: bool | UnsetType = UNSET
    """True where a prompt was longer than `truncate_prompt_tokens` and was cut; ours."""
    cached_tokens_by_source: dict[str, int] | UnsetType = UNSET
    """By tier (device, host, disk, external), where KV blocks are offloaded; ours."""


class CompletionTokensDetails(msgspec.Struct):
    """What speculative decoding did is told where it drafted anything."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Drafts that were accepted."""
    rejected_prediction_tokens: int | UnsetType = UNSET
    """Drafts that were verified for nothing."""
    prediction_steps: int | UnsetType = UNSET
    """Steps in which drafts were verified; ours. Each gave one token more than it accepted drafts."""
