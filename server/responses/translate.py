"""A request to the responses API as a chat request."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from troupellm.protocol.api.chat import ChatRequest
from troupellm.protocol.api.responses import ResponsesRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.tools import Effort
from troupellm.server.base.json_body import invalid_field
from troupellm.server.base.skipped import skipped_names
from troupellm.server.openai.translated import Names, relabel
from troupellm.server.responses.items import MAX_UNPACKED_BYTES, Conversation, conversation_of
from troupellm.server.responses.past_calls import Item
from troupellm.server.responses.tools import ChosenTools

_SAME = (
    "model", "session_id", "prompt_cache_key", "prompt_cache_retention", "metadata",
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "skip_special_tokens", "priority", "queue_timeout", "cache_salt",
    "chat_template_kwargs", "include_reasoning", "structured_outputs", "parallel_tool_calls",
    "logprob_token_ids", "truncate_prompt_tokens", "truncation_side", "thinking_token_budget", "repetition_detection",
    "spaces_between_special_tokens", "stream_interval", "logits_processors", "vllm_xargs", "kv_transfer_params",
)  # fmt: skip
"""Fields that mean the same in chat requests and are handed on as they are."""
_REFUSED = {
    "prompt": "prompt templates are not kept here; use instructions and input",
    "moderation": "it is not supported",
    "json_schema": "the responses API has text.format",
    "regex": "the responses API has structured_outputs",
    "ebnf": "the responses API has structured_outputs",
    "messages": "the responses API has input",
    "max_tokens": "the responses API has max_output_tokens",
    "max_completion_tokens": "the responses API has max_output_tokens",
    "response_format": "the responses API has text.format",
    "functions": "the responses API has tools",
    "logprobs": "the responses API has top_logprobs and include",
    "request_id": "a response is kept under an id of the server's; X-Request-Id names a request in logs",
    "return_token_ids": "responses have no token ids; chat completions do",
    "return_tokens_as_token_ids": "responses have no token ids; chat completions do",
    "ec_transfer_params": "it is not supported",
}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_INCLUDES = frozenset(
    {LOGPROBS, ENCRYPTED, "file_search_call.results", "web_search_call.results"}
    | {"web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url"}
    | {"code_interpreter_call.outputs"}
)
"""Those of tools and media that are not here have nothing to include."""


class Translated(msgspec.Struct, frozen=True):
    """A translated request."""

    chat: ChatRequest
    tools: ChosenTools
    names: Names
    """The fields' names in errors, and the client's names; see `relabel`."""
    skipped: list[str]
    """Parts that the model does not get as they were sent."""
    unpacked: int
    """Bytes of the texts that its items had packed."""


def translate(
    request: ResponsesRequest, items: Sequence[Item], *, first: int = 0, room: int = MAX_UNPACKED_BYTES
) -> Translated:
    """Pure, and linear in the size of the request.

    Args:
        items: the whole conversation, see `conversation_of`.
        first: where the request's own input begins in it.
        room: bytes that its packed texts may unpack to, see `conversation_of`.

    Raises:
        InvalidRequest: names the field, as this API calls it.
    """
    refuse_unsupported(request)
    conversation = conversation_of(items, request.instructions, first=first, room=room)
    tools = ChosenTools.of(request.tools or [], request.tool_choice, conversation.tools)
    names: Names = [*_NAMES, *tools.names]
    values: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    values["messages"] = conversation.messages
    values |= tools.fields
    if request.max_output_tokens is not None:
        values["max_completion_tokens"] = request.max_output_tokens
    values |= _logprobs(request) | _format(request) | _reasoning(request) | _configured(conversation)
    try:
        chat = msgspec.convert(values, ChatRequest)
    except msgspec.ValidationError as error:
        raise relabel(invalid_field(error, ChatRequest, "the request"), names) from None
    skipped = [*skipped_names("tool", tools.skipped), *conversation.skipped]
    return Translated(chat, tools, names, skipped, conversation.unpacked)


_NAMES: Names = [
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("logprobs", "top_logprobs"),
    ("extra_args", "vllm_xargs"),
    ("messages", "input"),
]


def refuse_unsupported(request: ResponsesRequest) -> None:
    """
    Raises:
        InvalidRequest: a field that is not supported here.
    """
    for name, hint in _REFUSED.items():
        if getattr(request, name) not in (None, False, [], {}):
            raise InvalidRequest(f"{name}: {hint}", param=name, code="unsupported_parameter")
    if request.n not in (None, 1):
        raise InvalidRequest("n: a response has one answer", param="n", code="unsupported_parameter")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    for position, name in enumerate(request.include or []):
        if name not in _INCLUDES:
            param = f"include[{position}]"
            raise InvalidRequest(f"{param} must be one of {', '.join(sorted(_INCLUDES))}", param=param)


def _logprobs(request: ResponsesRequest) -> dict[str, Any]:
    if request.top_logprobs is None and LOGPROBS not in (request.include or []):
        return {}
    return {"logprobs": True, "top_logprobs": request.top_logprobs or 0}


def _format(request: ResponsesRequest) -> dict[str, Any]:
    given = request.text.format if request.text is not None else None
    return {} if given is None else _response_format(given)


def _configured(conversation: Conversation) -> dict[str, Any]:
    """The last effort and the last format of the answer that the conversation has set; wrong ones are skipped."""
    made: dict[str, Any] = {}
    if conversation.effort in get_args(Effort):
        made["reasoning_effort"] = conversation.effort
    elif conversation.effort is not None:
        conversation.skip("configuration", ["effort"])
    if conversation.format is not None:
        try:
            given = msgspec.convert(conversation.format, dict[str, Any])
            made |= {"response_format": None} | _response_format(given)
        except (InvalidRequest, msgspec.ValidationError):
            conversation.skip("configuration", ["format"])
    return made


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind == "json_schema":
        fields = {
            name: given[name] for name in ("name", "schema", "strict", "description") if given.get(name) is not None
        }
        return {"response_format": {"type": kind, "json_schema": fields}}
    if kind not in ("text", "json_object"):
        message = "text.format.type must be one of text, json_object, json_schema"
        raise InvalidRequest(message, param="text.format.type")
    return {} if kind == "text" else {"response_format": {"type": kind}}


def _reasoning(request: ResponsesRequest) -> dict[str, Any]:
    effort = request.reasoning.effort if request.reasoning is not None else None
    return {} if effort is None else {"reasoning_effort": effort}
