"""Requests to Ollama's API as requests for chat completions and completions."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from troupellm.protocol.api.chat import ChatMessage, ChatRequest, CompletionRequest
from troupellm.protocol.api.ollama import (
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.skipped import skipped_names
from troupellm.server.openai.parameters import unsupported
from troupellm.server.openai.translated import Names

_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_tokens",
    "seed": "seed",
    "repeat_penalty": "repetition_penalty",
}
"""Options, and their names in the chat API."""
_SKIPPED = ("mirostat", "repeat_last_n", "tfs_z", "typical_p")
"""Options of sampling that do nothing here."""
NAMES: Names = [
    ("response_format.json_schema", "format"),
    ("response_format", "format"),
    ("max_completion_tokens", "options.num_predict"),
    ("max_tokens", "options.num_predict"),
    ("reasoning_effort", "think"),
    ("truncate_prompt_tokens", "truncate"),
    *((theirs, f"options.{ours}") for ours, theirs in _SAMPLING.items()),
]
_IMAGES = {"/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp"}
"""How images of a type begin in base64; other ones pass for PNG."""
_TAG = ":latest"


def plain_name(name: str | None, served: Sequence[str]) -> str | None:
    """The served name that a client means: it may add the tag that Ollama gives to models without one."""
    if name is None or name in served:
        return name
    return name.removesuffix(_TAG)


def tagged(name: str) -> str:
    """A served name as Ollama lists it."""
    return name if ":" in name else name + _TAG


def skipped_options(options: OllamaOptions | None) -> list[str]:
    """The names of the given options of sampling that do nothing here; see `skipped_names`."""
    given = [name for name in _SKIPPED if options is not None and getattr(options, name)]
    return skipped_names("option", given) if given else []


def chat_of(request: OllamaChatRequest, name: str | None, *, switches: Sequence[str], thinks: bool) -> ChatRequest:
    """
    Args:
        name: of the model, as it is served.
        switches: variables of the model's chat template that turn its thinking on and off.
        thinks: whether it can think at all.

    Raises:
        InvalidRequest: names the field.
    """
    messages = _messages(request.messages)
    fields = _common(request) | _thinking(request, switches, thinks=thinks)
    return ChatRequest(model=name, messages=messages, tools=request.tools, **fields)


def chat_of_prompt(
    request: OllamaGenerateRequest, name: str | None, *, switches: Sequence[str], thinks: bool
) -> ChatRequest:
    """The conversation of a prompt that is not raw. Arguments and errors are those of `chat_of`."""
    system = [OllamaMessage(role="system", content=request.system)] if request.system else []
    user = OllamaMessage(role="user", content=request.prompt, images=request.images)
    fields = _common(request) | _thinking(request, switches, thinks=thinks)
    return ChatRequest(model=name, messages=_messages([*system, user]), **fields)


def completion_of(request: OllamaGenerateRequest, name: str | None) -> CompletionRequest:
    """The completion of a raw prompt.

    Raises:
        InvalidRequest: names the field.
    """
    for field in ("system", "images", "think"):
        if getattr(request, field):
            raise InvalidRequest(f"{field} needs a prompt that is not raw", param=field)
    fields = _common(request)
    top = fields.pop("top_logprobs", None)
    wanted = fields.pop("logprobs", None)
    limit = fields.pop("max_completion_tokens", None)
    logprobs = (top or 0) if wanted else None
    return CompletionRequest(model=name, prompt=request.prompt or "", logprobs=logprobs, max_tokens=limit, **fields)


def refuse_unsupported(request: OllamaGenerateRequest) -> None:
    """
    Raises:
        InvalidRequest: names the field that would change the answer and that this server does not implement.
    """
    reasons = {
        "suffix": "this model does not fill in the middle",
        "template": "templates come from the model or from the server's own settings",
        "context": "send the conversation to /api/chat",
    }
    for field, reason in reasons.items():
        if getattr(request, field):
            raise unsupported(field, reason)


def _common(request: OllamaFields) -> dict[str, Any]:
    options = request.options or OllamaOptions()
    fields = {
        theirs: value for ours, theirs in _SAMPLING.items() if (value := getattr(options, ours)) not in (None, [])
    }
    if fields.get("seed", 0) < 0:
        del fields["seed"]
    if options.num_predict is not None and options.num_predict > 0:
        fields["max_completion_tokens"] = options.num_predict
    if request.truncate:
        fields["truncate_prompt_tokens"] = -1
    if request.logprobs is not None:
        fields["logprobs"] = request.logprobs
    if request.top_logprobs is not None:
        fields["top_logprobs"] = request.top_logprobs
    return fields | _format(request.format)


def _format(wanted: str | Mapping[str, Any] | None) -> dict[str, Any]:
    if not wanted and not isinstance(wanted, Mapping):
        return {}
    if isinstance(wanted, Mapping):
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": dict(wanted)}}}
    if wanted != "json":
        raise InvalidRequest("format must be json, or a JSON schema", param="format")
    return {"response_format": {"type": "json_object"}}


def _thinking(request: OllamaFields, switches: Sequence[str], *, thinks: bool) -> dict[str, Any]:
    wanted = request.think
    if wanted is None:
        return {}
    if wanted is not False and not thinks:
        raise InvalidRequest("think: this model does not support thinking", param="think")
    if isinstance(wanted, str):
        return {"reasoning_effort": wanted}
    fields: dict[str, Any] = {"include_reasoning": wanted}
    return fields | ({"chat_template_kwargs": dict.fromkeys(switches, wanted)} if switches else {})


def _messages(given: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """Calls get ids where they have none, and results the id of the call that they answer."""
    made: list[ChatMessage] = []
    waiting: list[tuple[str, str]] = []
    for place, message in enumerate(given):
        calls = _calls(message.tool_calls, place)
        waiting = [(call["id"], _name_of(call)) for call in calls] if calls else waiting
        call_id = message.tool_call_id
        if message.role == "tool" and call_id is None:
            found = next((entry for entry in waiting if entry[1] == message.tool_name), next(iter(waiting), None))
            if found is not None:
                call_id = found[0]
                waiting = [entry for entry in waiting if entry is not found]
        made.append(
            ChatMessage(
                role=message.role,
                content=_content(message),
                reasoning_content=message.thinking,
                tool_calls=calls or None,
                tool_call_id=call_id,
            )
        )
    return made


def _content(message: OllamaMessage) -> str | list[dict[str, Any]] | None:
    if not message.images:
        return message.content
    texts = [{"type": "text", "text": message.content}] if message.content else []
    return [*texts, *({"type": "image_url", "image_url": {"url": _data_url(image)}} for image in message.images)]


def _data_url(image: str) -> str:
    kind = next((kind for start, kind in _IMAGES.items() if image.startswith(start)), "png")
    return f"data:image/{kind};base64,{image}"


def _calls(given: object, place: int) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        return []
    calls = []
    for index, call in enumerate(given):
        if isinstance(call, Mapping):
            known = call.get("id")
            calls.append({**call, "id": known if isinstance(known, str) and known else f"call_{place}_{index}"})
    return calls


def _name_of(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    return str(function.get("name")) if isinstance(function, Mapping) else ""


def model_field(given: msgspec.Struct) -> str | None:
    """The model that a body names, by either name of the field."""
    name: str | None = getattr(given, "model", None) or getattr(given, "name", None)
    return name
