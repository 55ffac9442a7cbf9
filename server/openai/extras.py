"""vLLM's further request fields, as the engine knows them, and refusals of what this server does not do."""

from collections.abc import Mapping
from typing import Any, Literal

from troupellm.protocol.api.chat import GenerationFields
from troupellm.protocol.api.extensions import ExtraFields
from troupellm.protocol.api.pooling import PoolingFields
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import Truncation
from troupellm.protocol.params.sampling_checks import RepetitionDetection

MAX_DOCUMENTS = 1_024
_CODE = ("qualname", "code", "module", "function", "class", "source", "import")
"""Keys of an entry of `logits_processors` that would name code."""
_NOT_IN_SALTS = "@/\\\0"


def extra_values(request: ExtraFields) -> dict[str, Any]:
    """Values of `SamplingParams` whose form differs between the API and the engine.

    Raises:
        InvalidRequest: names the field.
    """
    values: dict[str, Any] = {}
    wanted = request.repetition_detection
    if wanted is not None:
        values["repetition_detection"] = RepetitionDetection(
            max_pattern_size=wanted.max_pattern_size,
            min_pattern_size=wanted.min_pattern_size,
            min_count=wanted.min_count,
        )
    if request.logits_processors:
        values["logits_processors"] = _processors(request.logits_processors)
    if request.vllm_xargs:
        values["extra_args"] = request.vllm_xargs
    return values


def truncation_of(request: ExtraFields | PoolingFields, side: Literal["left", "right"] = "left") -> Truncation | None:
    """How the request wants a long prompt cut.

    Args:
        side: where it is cut unless the request says otherwise.

    Raises:
        InvalidRequest: a number of tokens that means nothing, or a side without one.
    """
    tokens = request.truncate_prompt_tokens
    if tokens is None:
        if request.truncation_side is not None:
            raise InvalidRequest("truncation_side needs truncate_prompt_tokens", param="truncation_side")
        return None
    if tokens != -1 and not 1 <= tokens < 2**31:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or in [1, {2**31 - 1}]",
            param="truncate_prompt_tokens",
            code="integer_below_min_value" if tokens < 1 else "integer_above_max_value",
        )
    return Truncation(tokens, request.truncation_side or side)


def check_documents(documents: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """
    Raises:
        InvalidRequest: too many.
    """
    if documents is not None and len(documents) > MAX_DOCUMENTS:
        raise InvalidRequest(f"documents must have at most {MAX_DOCUMENTS} entries", param="documents")
    return documents


def refuse_extras(request: GenerationFields) -> None:
    """
    Raises:
        InvalidRequest: names the field that asks for what is not offered over HTTP.
    """
    if request.store:
        raise unsupported("store", "completions are not stored here; use /v1/responses")
    check_cache_salt(request.cache_salt)


def check_cache_salt(salt: str | None) -> None:
    """
    Raises:
        InvalidRequest: it has a letter that vLLM refuses.
    """
    if salt is not None and any(letter in _NOT_IN_SALTS for letter in salt):
        raise InvalidRequest("cache_salt must not have any of @ / \\ or NUL", param="cache_salt")


def unsupported(field: str, reason: str = "it is not supported") -> InvalidRequest:
    return InvalidRequest(f"{field}: {reason}", param=field, code="unsupported_parameter")


def _processors(given: list[Any] | dict[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Names and arguments, from a mapping or from a list of names and of `{"name": ..., "args": {...}}`."""
    field = "logits_processors"
    found: dict[str, Mapping[str, Any]] = {}
    if isinstance(given, dict):
        return {name: args or {} for name, args in given.items()}
    for entry in given:
        if isinstance(entry, str):
            found[entry] = {}
            continue
        if any(key in entry for key in _CODE):
            raise unsupported(field, "a request cannot bring code; name a plug-in of this server")
        name, args = entry.get("name"), entry.get("args") or {}
        if not isinstance(name, str) or not isinstance(args, dict) or entry.keys() - {"name", "args"}:
            raise InvalidRequest(f"{field} must hold names, or objects with name and args", param=field)
        found[name] = args
    return found
