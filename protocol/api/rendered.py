"""The answer of /render: a request as the engine gets it, with token ids instead of a text or a conversation."""

from collections.abc import Sequence
from typing import Any

import msgspec


class RenderedRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    model: str
    token_ids: Sequence[int]
    """Of the prompt."""
    sampling_params: dict[str, Any]
    """Those that are plain values, with the model's defaults."""
    stream: bool
    cache_salt: str | None
    priority: int
