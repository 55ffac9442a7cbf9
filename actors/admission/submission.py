"""A request as it is asked for, before it has a place."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from troupellm.actors.admission.embeds_prompt import as_embeds
from troupellm.protocol.config.kv_hints import NO_HINTS, KVHints
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import (
    ChatPrompt,
    EmbedsPrompt,
    ManyPrompts,
    PairPrompt,
    Prompt,
    RequestGroup,
    TextPrompt,
    TokensPrompt,
)
from troupellm.protocol.params.pooling import PoolingParams
from troupellm.protocol.params.sampling import SamplingParams

PromptLike = str | Sequence[int] | Prompt | Mapping[str, Any]
MAX_SALT = 128
_NOT_IN_SALTS = "@/\\\0"


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A request as its caller made it."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    wait: bool = True
    """Wait for a place instead of being refused."""
    tenant: str = ""
    """Whose request it is; the name of its API key, never the key."""
    request_group: RequestGroup | None = None
    cache_salt: bytes = b""
    deadline: float | None = None
    """Seconds from now until which the request must have been scheduled."""
    streaming: bool = True
    pooling: PoolingParams | None = None
    """None generates; otherwise `params` only say that nothing is generated."""
    many_prompts: ManyPrompts | None = None
    hints: KVHints = NO_HINTS


def as_prompt(prompt: PromptLike | None, prompt_embeds: Any = None) -> Prompt:
    """Text, token ids, input embeddings (see `as_embeds`), a prompt as it is, or vLLM's mapping with one of `prompt`,
    `prompt_token_ids` and `prompt_embeds`.

    Raises:
        InvalidRequest: it is none of them, or several.
    """
    if isinstance(prompt, Mapping):
        prompt, prompt_embeds = _of_mapping(prompt, prompt_embeds)
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


def as_salt(salt: str | bytes, prompt: object = None) -> bytes:
    """The cache salt of a request.

    Args:
        salt: given with the request; a text is one as over HTTP.
        prompt: a mapping may have a `cache_salt` of its own, which counts if the request has none.

    Raises:
        InvalidRequest: it is too long, or has a letter that salts may not have.
    """
    if not salt and isinstance(prompt, Mapping):
        salt = prompt.get("cache_salt") or b""
    if isinstance(salt, bytes):
        return salt
    if not isinstance(salt, str):
        raise InvalidRequest("cache_salt must be text or bytes", param="cache_salt", code="invalid_type")
    if len(salt) > MAX_SALT:
        raise InvalidRequest(f"cache_salt must have at most {MAX_SALT} letters", param="cache_salt")
    if any(letter in _NOT_IN_SALTS for letter in salt):
        raise InvalidRequest("cache_salt must not have any of @ / \\ or NUL", param="cache_salt")
    return salt.encode("utf-8", "surrogatepass")


def _of_mapping(prompt: Mapping[str, Any], embeds: Any) -> tuple[Any, Any]:
    """The prompt and the embeddings in a mapping."""
    if (ids := prompt.get("prompt_token_ids")) is not None:
        return tuple(ids), embeds
    if (own := prompt.get("prompt_embeds")) is not None:
        return None, own
    if (text := prompt.get("prompt")) is not None:
        return text, embeds
    raise InvalidRequest("a prompt mapping needs prompt, prompt_token_ids or prompt_embeds", param="prompts")
