"""Prompts and cache salts in the forms in which callers give them, and the resources that a request asks for, estimated
before its prompt is tokenized.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from troupellm.actors.admission.embeds_prompt import as_embeds
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import (
    ChatPrompt,
    Demand,
    EmbedsPrompt,
    PairPrompt,
    Prompt,
    RequestGroup,
    Submission,
    TextPrompt,
    TokensPrompt,
)
from troupellm.protocol.params.sampling import SamplingParams

PromptLike = str | Sequence[int] | Prompt | Mapping[str, Any]
MAX_SALT = 128
_NOT_IN_SALTS = "@/\\\0"


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


CHARACTERS_PER_TOKEN = 4
TOKENS_PER_IMAGE = 576
"""Estimated, before an image is decoded."""


def estimate_tokens(prompt: Prompt) -> int:
    """Prompt tokens, roughly, without touching the tokenizer."""
    match prompt:
        case TokensPrompt(token_ids=token_ids):
            return len(token_ids)
        case EmbedsPrompt(num_tokens=num_tokens):
            return num_tokens
        case TextPrompt(text=text):
            return len(text) // CHARACTERS_PER_TOKEN + 1
        case PairPrompt(text=text, second=second):
            return (len(text) + len(second)) // CHARACTERS_PER_TOKEN + 2
        case ChatPrompt(messages=messages):
            letters = sum(_letters(message) for message in messages)
            images = TOKENS_PER_IMAGE * len(prompt.media)
            return letters // CHARACTERS_PER_TOKEN + 4 * len(messages) + 1 + images


def _letters(value: object) -> int:
    """Characters of text in a message or a part of one; what has another shape is refused later, by its reader."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_letters(value.get(field)) for field in ("content", "text"))
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return sum(_letters(part) for part in value if isinstance(part, Mapping))
    return 0


def demand_of(submission: Submission) -> Demand:
    """Estimate the resources that a request asks for, before its prompt is tokenized."""
    params = submission.params
    return Demand(
        sequences=params.num_sequences,
        tokens=estimate_tokens(submission.prompt),
        max_tokens=0 if submission.pooling else params.num_sequences * (params.max_tokens or 0),
        tenant=submission.tenant,
        request_group=submission.request_group,
        many_prompts=submission.many_prompts,
    )


def request_group_of(name: str, prompts: Sequence[Prompt], params: SamplingParams) -> RequestGroup | None:
    """One call's prompts as a group, which is let in as a whole; None for a lone prompt.

    Args:
        name: unlike that of any other call.
    """
    if len(prompts) < 2:
        return None
    sequences = len(prompts) * params.num_sequences
    return RequestGroup(
        name=name,
        sequences=sequences,
        tokens=sum(estimate_tokens(prompt) for prompt in prompts),
        max_tokens=sequences * (params.max_tokens or 0),
    )
