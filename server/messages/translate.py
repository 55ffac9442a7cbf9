"""A request to the messages API as a chat request."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from troupellm.protocol.api.anthropic import MessagesRequest, MessageToolChoice, PromptFields
from troupellm.protocol.api.chat import ChatRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.checks import got
from troupellm.protocol.params.tools import MAX_TOOLS, check_tools
from troupellm.server.base.json_body import invalid_field
from troupellm.server.base.skipped import skipped_names
from troupellm.server.messages.blocks import conversation_of
from troupellm.server.messages.tool_changes import ToolChange, offered
from troupellm.server.openai.translated import Names, relabel

MIN_BUDGET = 1_024
"""Fewest tokens of thinking that the API lets a client ask for."""

_SAME = (
    "model", "session_id",
    "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens", "repetition_penalty",
    "priority", "queue_timeout", "cache_salt", "truncate_prompt_tokens", "truncation_side", "repetition_detection",
    "spaces_between_special_tokens", "stream_interval", "logits_processors", "vllm_xargs", "kv_transfer_params",
)  # fmt: skip
"""Fields that mean the same in chat requests and are handed on as they are."""
_REFUSED = {
    "container": "it is not supported",
    "mcp_servers": "it is not supported",
    "json_schema": "the messages API has output_config.format",
    "regex": "the messages API has output_config.format; chat completions have regex",
    "ebnf": "the messages API has output_config.format; chat completions have ebnf",
    "logprob_token_ids": "messages have no log-probabilities; chat completions and responses do",
    "thinking_token_budget": "the messages API has thinking.budget_tokens",
    "return_token_ids": "messages have no token ids; chat completions do",
    "return_tokens_as_token_ids": "messages have no token ids; chat completions do",
    "ec_transfer_params": "it is not supported",
}
_NAMES: Names = [
    ("max_completion_tokens", "max_tokens"),
    ("stop", "stop_sequences"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("extra_args", "vllm_xargs"),
    ("continue_final_message", "messages"),
]


class Translated(msgspec.Struct, frozen=True):
    chat: ChatRequest
    names: Names
    """See `relabel`."""
    skipped: list[str]
    """Parts that the model does not get as they were sent."""


def translate(request: PromptFields, *, switches: Sequence[str], thinks: bool, sees: bool = False) -> Translated:
    """Pure, and linear in the size of the request.

    Args:
        switches: variables of the model's chat template that turn its thinking on and off.
        thinks: whether it can think at all.
        sees: whether it takes images.

    Raises:
        InvalidRequest: names the field, as this API calls it.
    """
    for name, reason in _REFUSED.items():
        if getattr(request, name, None):
            raise InvalidRequest(f"{name}: {reason}", param=name, code="unsupported_parameter")
    conversation = conversation_of(request.system, request.messages, sees=sees)
    tools, names, others = _tools(request.tools or [], conversation.changes)
    values: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name, None)) is not None}
    values["messages"] = conversation.messages
    if request.metadata is not None and request.metadata.user_id is not None:
        values["metadata"] = {"user_id": request.metadata.user_id}
    values |= _choice(request.tool_choice, tools) | _format(request)
    values |= _thinking(request, switches, thinks=thinks)
    values |= _prefill(request, values, thinks=thinks)
    if isinstance(request, MessagesRequest):
        values["max_completion_tokens"] = request.max_tokens
        if request.stop_sequences:
            values["stop"] = request.stop_sequences
    try:
        chat = msgspec.convert(values, ChatRequest)
    except msgspec.ValidationError as error:
        raise relabel(invalid_field(error, ChatRequest, "the request"), [*_NAMES, *names]) from None
    return Translated(chat, [*_NAMES, *names], [*skipped_names("tool", others), *conversation.skipped])


def _tools(
    given: Sequence[dict[str, Any]], changes: Sequence[ToolChange]
) -> tuple[list[dict[str, Any]], list[tuple[str, str]], list[str]]:
    """Functions for the model, their names in errors, and the kinds of the skipped ones: tools of Anthropic's server
    and wrong definitions of the conversation."""
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"tools must have at most {MAX_TOOLS} entries, got {len(given)}", param="tools")
    tools: list[dict[str, Any]] = []
    names: list[tuple[str, str]] = []
    others: list[str] = []
    places = {id(tool): place for place, tool in enumerate(given)}
    for tool in offered(given, changes):
        position = places.get(id(tool))
        kind = _other_kind(tool)
        if kind is not None or (position is None and (len(tools) >= MAX_TOOLS or not _is_right(tool))):
            others.append(kind or "definition")
            continue
        here = f"tools[{position}]"
        if not isinstance(tool.get("name"), str):
            raise InvalidRequest(f"{here}.name is missing", param=f"{here}.name", code="missing_required_parameter")
        if not isinstance(tool.get("input_schema"), Mapping):
            message = f"{here}.input_schema must be a JSON schema"
            raise InvalidRequest(message, param=f"{here}.input_schema", code="invalid_type")
        names += [
            (f"tools[{len(tools)}].function.parameters", f"{here}.input_schema"),
            (f"tools[{len(tools)}].function", here),
            (f"tools[{len(tools)}]", here),
        ]
        function = {"name": tool["name"], "parameters": dict(tool["input_schema"])}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return tools, names, others


def _is_right(tool: Mapping[str, Any]) -> bool:
    """A definition within the conversation can be offered."""
    name, schema = tool.get("name"), tool.get("input_schema")
    function = {"name": name, "parameters": schema, "description": tool.get("description")}
    try:
        return (
            isinstance(name, str)
            and isinstance(schema, Mapping)
            and bool(check_tools([{"type": "function", "function": function}]))
        )
    except InvalidRequest:
        return False


def _other_kind(tool: Mapping[str, Any]) -> str | None:
    """The type of a tool that Anthropic's own server runs or defines; None for one of the client's own."""
    kind = tool.get("type")
    return None if kind in (None, "custom") else str(kind)


def _choice(choice: MessageToolChoice | None, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kind = "auto" if choice is None else choice.type
    fields: dict[str, Any] = {"tools": tools} if tools else {}
    if choice is not None and choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if kind == "tool":
        name = choice.name if choice is not None else None
        if not any(tool["function"]["name"] == name for tool in tools):
            message = f"tool_choice.name must be that of a tool in tools{got(name)}"
            raise InvalidRequest(message, param="tool_choice.name")
        return fields | {"tool_choice": {"type": "function", "function": {"name": name}}}
    if kind == "any" and not tools:
        raise InvalidRequest("tool_choice is any, but there is no tool in tools", param="tool_choice")
    if choice is None or not tools:  # what the request does not say, the server's settings do
        return fields
    return fields | {"tool_choice": "required" if kind == "any" else kind}


def _format(request: PromptFields) -> dict[str, Any]:
    config = request.output_config
    fields: dict[str, Any] = {}
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    wanted, field = request.output_format, "output_format"
    if config is not None and config.format is not None:
        if wanted is not None:
            raise InvalidRequest("output_format and output_config.format exclude each other", param=field)
        wanted, field = config.format, "output_config.format"
    if wanted is None:
        return fields
    if wanted.get("type") != "json_schema":
        raise InvalidRequest(f"{field}.type must be json_schema", param=f"{field}.type")
    if "schema" not in wanted:
        raise InvalidRequest(f"{field}.schema is missing", param=f"{field}.schema", code="missing_required_parameter")
    schema = {"name": "output", "schema": wanted["schema"]}
    return fields | {"response_format": {"type": "json_schema", "json_schema": schema}}


def _prefill(request: PromptFields, values: Mapping[str, Any], *, thinks: bool) -> dict[str, Any]:
    """A conversation that ends with the assistant's text asks for what comes after it, in the same message.

    Raises:
        InvalidRequest: there is no going on from it.
    """
    last = values["messages"][-1] if request.messages else {}
    if last.get("role") != "assistant":
        return {}
    param = f"messages[{len(request.messages) - 1}].content"
    if "tool_calls" in last or "reasoning_content" in last:
        raise InvalidRequest(
            f"{param} can be gone on from only where it is text; tools need their results", param=param
        )
    text = last["content"]
    if not text:
        return {"messages": values["messages"][:-1]}
    if text != text.rstrip():
        raise InvalidRequest(f"{param}: the text to go on from must not end with whitespace", param=param)
    if thinks and values["include_reasoning"]:
        raise InvalidRequest(f"thinking begins an answer anew, {param} asks to go on from one", param="thinking")
    if "response_format" in values:
        field = "output_config.format" if request.output_format is None else "output_format"
        raise InvalidRequest(f"{field} is for a whole answer, {param} asks to go on from one", param=field)
    return {"continue_final_message": True, "add_generation_prompt": False}


def _thinking(request: PromptFields, switches: Sequence[str], *, thinks: bool) -> dict[str, Any]:
    """Models that can think do so only when they are asked, as this API has it; those that always think keep it to
    themselves then. One that cannot keeps any budget."""
    thinking = request.thinking
    wanted = thinking is not None and thinking.type != "disabled"
    fields: dict[str, Any] = {"include_reasoning": wanted}
    kwargs = dict.fromkeys(switches, wanted) | (request.chat_template_kwargs or {})
    if kwargs:
        fields["chat_template_kwargs"] = kwargs
    if thinking is None or thinking.type != "enabled":
        return fields
    budget, param = thinking.budget_tokens, "thinking.budget_tokens"
    if budget is None:
        raise InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")
    if budget < MIN_BUDGET:
        message = f"{param} must be at least {MIN_BUDGET}"
        raise InvalidRequest(message, param=param, code="integer_below_min_value")
    if isinstance(request, MessagesRequest) and budget >= request.max_tokens:
        raise InvalidRequest(f"{param} must be below max_tokens", param=param, code="integer_above_max_value")
    return fields | ({"thinking_token_budget": budget} if thinks else {})
