"""A request as it is asked for, before it has a place."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from troupellm.actors.embeds import as_embeds
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.intake import (
    Bulk,
    ChatPrompt,
    EmbedsPrompt,
    PairPrompt,
    Party,
    Prompt,
    TextPrompt,
    TokensPrompt,
)
from troupellm.protocol.pooling import PoolingParams
from troupellm.protocol.sampling import SamplingParams

PromptLike = str | Sequence[int] | Prompt


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asks for."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    wait: bool = True
    """Wait for a place instead of being refused."""
    tenant: str = ""
    """Whose request it is; the name of its API key, never the key."""
    party: Party | None = None
    cache_salt: bytes = b""
    deadline: float | None = None
    """Seconds from now until which the request must have been scheduled."""
    streaming: bool = True
    pooling: PoolingParams | None = None
    """None generates; otherwise `params` only say that nothing is generated."""
    bulk: Bulk | None = None


def as_salt(cache_salt: str | bytes) -> bytes:
    """A cache salt as bytes; text and its UTF-8 are the same salt.

    Raises:
        InvalidRequest: it is neither.
    """
    if isinstance(cache_salt, str):
        return cache_salt.encode("utf-8", "surrogatepass")
    if not isinstance(cache_salt, bytes):
        raise InvalidRequest("cache_salt must be text or bytes", param="cache_salt", code="invalid_type")
    return cache_salt


def as_prompt(prompt: PromptLike | None, prompt_embeds: Any = None) -> Prompt:
    """Text, token ids, input embeddings (see `as_embeds`), or a prompt as it is.

    Raises:
        InvalidRequest: it is none of them, or several.
    """
    if prompt_embeds is not None:
        if prompt is not None:
            raise InvalidRequest("give either prompt or prompt_embeds", param="prompt_embeds")
        return as_embeds(prompt_embeds)
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, TextPrompt | TokensPrompt | ChatPrompt | EmbedsPrompt | PairPrompt):
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return TokensPrompt(tuple(cast(Sequence[int], prompt)))
    raise InvalidRequest("prompt must be text or a sequence of token ids", param="prompt", code="invalid_type")
