"""From request bodies to what the engine takes: sampling parameters, prompts, and refusals of what is not served."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from troupellm.protocol.api.chat import ChatRequest, CompletionRequest, GenerationFields, TokenizeRequest
from troupellm.protocol.api.extensions import ExtraFields
from troupellm.protocol.api.pooling import PoolingFields
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import ChatPrompt, Prompt, TextPrompt, TokensPrompt, Truncation
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.params.sampling_checks import RepetitionDetection
from troupellm.protocol.params.tools import Tool
from troupellm.server.host.served_engine import ServedEngine
from troupellm.server.openai.structured_outputs import FORM_FIELDS, guide_of

MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE_TEXT = 1_000

_ELSEWHERE = frozenset({"logprobs", "structured_outputs", "repetition_detection", "logits_processors"})
"""Fields of both whose meaning or form differs."""
_SAMPLING_FIELDS = tuple(
    field.name
    for field in msgspec.structs.fields(SamplingParams)
    if field.name in GenerationFields.__struct_fields__ and field.name not in _ELSEWHERE
)
_RESERVED_KWARGS = frozenset(
    {"messages", "tools", "documents", "chat_template", "tokenize", "tokenizer", "add_generation_prompt"}
    | {"continue_final_message", "conversation", "padding", "truncation", "max_length", "return_tensors"}
    | {"return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "raise_exception", "strftime_now"}
    | {"self", "source"}
)
_HANDLED = frozenset({"modalities", "kv_transfer_params"})


def sampling_params(request: ChatRequest | CompletionRequest, engine: ServedEngine) -> SamplingParams:
    """The model's defaults, overridden by what the request gives, checked against the served model.

    Raises:
        InvalidRequest: names the field as `SamplingParams` calls it; see `renames`.
    """
    values = {name: getattr(request, name) for name in _SAMPLING_FIELDS if getattr(request, name) is not None}
    values |= _max_tokens(request) | extra_values(request)
    if any(getattr(request, name) is not None for name in FORM_FIELDS) and (guide := guide_of(request)) is not None:
        values["guide"] = guide
    if isinstance(request, ChatRequest) and request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest("best_of is for completions; here it must be absent or equal to n", param="best_of")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if request.stream and request.prompt_logprobs:
        raise InvalidRequest("prompt_logprobs needs stream: false, or to be 0", param="prompt_logprobs")
    if request.stream:
        values.pop("prompt_logprobs", None)  # clients say 0 for none of them
    wanted = _wanted_logprobs(request)
    if wanted is not None:
        values["logprobs"] = wanted
    if isinstance(request, CompletionRequest) and request.echo and wanted is not None:
        values.setdefault("prompt_logprobs", wanted)
    params = engine.sampling(**values)
    if isinstance(request, ChatRequest) and "max_tokens" not in values and "max_tokens" not in engine.defaults:
        params = msgspec.structs.replace(params, max_tokens=None)
    params.check_against(engine.limits)
    if request.stream and params.selects is not None:
        raise InvalidRequest(f"{params.selects} needs stream: false", param=params.selects)
    return params


def renames(request: ChatRequest | CompletionRequest) -> dict[str, str]:
    """The API's names of the sampling parameters that it names differently."""
    names = {"extra_args": "vllm_xargs"}
    if isinstance(request, CompletionRequest):
        return names
    names["logprobs"] = "top_logprobs"
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def refuse_unsupported(request: msgspec.Struct, *, trust_chat_template: bool = False) -> None:
    """Refuse fields that would change the answer and that this server does not implement.

    Raises:
        InvalidRequest: names the field.
    """
    for field in msgspec.structs.fields(request):
        if field.type is Any and field.name not in _HANDLED and getattr(request, field.name):
            raise unsupported(field.name)
    if getattr(request, "chat_template", None) is not None and not trust_chat_template:
        raise unsupported("chat_template", "templates come from the model or from the server's own settings")
    if getattr(request, "modalities", None) not in (None, [], ["text"]):
        raise unsupported("modalities", "only ['text'] is supported")
    if isinstance(request, GenerationFields):
        refuse_extras(request)


def completion_prompts(request: CompletionRequest, most: int) -> list[Prompt]:
    """The prompts of a completions call: one text, one list of token ids, or a list of either.

    Raises:
        InvalidRequest: empty, mixed, or more than `most`.
    """
    add_special_tokens = request.add_special_tokens is not False
    prompt, truncation = request.prompt, truncation_of(request)
    if isinstance(prompt, str):
        return [TextPrompt(prompt, add_special_tokens, truncation)]
    if not prompt:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequest("prompt must not mix texts, token ids and lists of token ids", param="prompt")
    if kinds == {int}:
        return [_tokens_prompt(cast(list[int], prompt), truncation)]
    if len(prompt) > most:
        raise InvalidRequest(f"prompt must have at most {most} entries, got {len(prompt)}", param="prompt")
    if kinds == {str}:
        return [TextPrompt(text, add_special_tokens, truncation) for text in cast(list[str], prompt)]
    return [_tokens_prompt(ids, truncation) for ids in cast(list[list[int]], prompt)]


def chat_prompt(
    request: ChatRequest | TokenizeRequest, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = ()
) -> ChatPrompt:
    """Messages and template options, checked.

    Args:
        messages: as `plain_messages` makes them.
        tools: those that are shown to the model, checked already.

    Raises:
        InvalidRequest: names `messages[i]` or the option.
    """
    going_on = bool(request.continue_final_message)
    generation_prompt = request.add_generation_prompt
    if going_on and generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if going_on and messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs an assistant message at the end", param=f"messages[{len(messages) - 1}].role"
        )
    return ChatPrompt(
        messages=messages,
        tools=tools or None,
        add_generation_prompt=not going_on if generation_prompt is None else generation_prompt,
        continue_final_message=going_on,
        template_kwargs=_template_kwargs(request.chat_template_kwargs),
        documents=check_documents(request.documents),
        template=request.chat_template,
        truncation=truncation_of(request) if isinstance(request, ChatRequest) else None,
    )


def _max_tokens(request: ChatRequest | CompletionRequest) -> dict[str, int]:
    if isinstance(request, ChatRequest):
        given = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    else:
        # Scoring: with echo, zero new tokens are fine. The engine makes one, which is not shown.
        given = 1 if request.echo and request.max_tokens == 0 else request.max_tokens
    return {} if given is None else {"max_tokens": given}


def _wanted_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        if request.logprobs is not None and request.logprobs < 0:
            raise InvalidRequest("logprobs must be at least 0", param="logprobs", code="integer_below_min_value")
        return request.logprobs
    if request.top_logprobs is None:
        return 0 if request.logprobs else None
    if request.top_logprobs < 0:
        raise InvalidRequest("top_logprobs must be at least 0", param="top_logprobs", code="integer_below_min_value")
    if not request.logprobs and request.top_logprobs == 0:
        return None
    if not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return request.top_logprobs


def _tokens_prompt(ids: list[int], truncation: Truncation | None) -> TokensPrompt:
    if not ids:
        raise InvalidRequest("prompt must not be an empty list of token ids", param="prompt")
    return TokensPrompt(ids, truncation)


def _template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
    if kwargs is None:
        return None
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        message = f"chat_template_kwargs must have at most {MAX_TEMPLATE_KWARGS} entries"
        raise InvalidRequest(message, param="chat_template_kwargs")
    for name, value in kwargs.items():
        if name in _RESERVED_KWARGS or name.startswith("_") or not name.isidentifier() or len(name) > MAX_TEMPLATE_TEXT:
            raise InvalidRequest("chat_template_kwargs has a reserved name", param="chat_template_kwargs")
        plain = value is None or isinstance(value, bool | int | float | str)
        if not plain or (isinstance(value, str) and len(value) > MAX_TEMPLATE_TEXT):
            message = f"chat_template_kwargs must hold numbers, booleans and texts of up to {MAX_TEMPLATE_TEXT}"
            raise InvalidRequest(message, param="chat_template_kwargs")
    return kwargs


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
