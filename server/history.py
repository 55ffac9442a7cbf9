"""Messages of a request as chat templates read them: contents as text, tool calls and their results, thoughts."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.openai import ChatMessage, ToolFields
from troupellm.protocol.openai_tools import PastCall, ToolBody, ToolChoiceBody
from troupellm.protocol.structured_outputs import StructuredOutputsParams
from troupellm.protocol.tools import MAX_TOOLS, ToolUse, tool_use

MAX_MESSAGES = 10_000
INLINE_TOOLS = 16
INLINE_LETTERS = 32_768
"""Of arguments in past calls, and of schemas."""
INLINE_PARTS = 1_024
"""Messages, or parts of their contents, that are read on the event loop."""
_PART_LETTERS = 8
"""What a part of a schema counts for, beside its texts."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_SPELT_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")
"""Of a surrogate pair: JSON can spell it, and no prompt can hold it."""


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """
    Raises:
        InvalidRequest: names `messages[i]` and the field in it.
    """
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages must have at most {MAX_MESSAGES} entries", param="messages")
    open_calls: dict[str, str] = {}
    return [_plain_message(f"messages[{index}]", message, open_calls) for index, message in enumerate(messages)]


def tool_use_of(request: ToolFields, *, automatic: bool = True) -> ToolUse:
    """What a request says about tools, checked.

    Args:
        automatic: tools may be called where the request does not say so.

    Raises:
        InvalidRequest: names the field.
    """
    choice = _plain_choice(request.tool_choice)
    if choice is None and not automatic:
        choice = "none"
    return tool_use(plain_tools(request.tools), choice, request.parallel_tool_calls)


def has_many_parts(messages: Sequence[ChatMessage]) -> bool:
    """Whether reading them takes more than a millisecond, however short they are."""
    if len(messages) > INLINE_PARTS:
        return True
    return sum(len(message.content) for message in messages if isinstance(message.content, list)) > INLINE_PARTS


def has_long_tools(request: ToolFields, messages: Sequence[ChatMessage]) -> bool:
    """Whether reading what it says about tools, and about the form of the answer, takes more than a millisecond."""
    functions = [tool.function for tool in request.tools or () if tool.function is not None]
    schemas = [text for function in functions for text in (function.description, function.parameters)]
    forms = [request.response_format, request.structured_outputs, request.guided_json, request.guided_choice]
    if _are_long([*schemas, *forms, request.guided_grammar, request.guided_regex]):
        return True
    calls = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    lengths = [len(text) if isinstance(text, str) else INLINE_LETTERS for text in calls]
    return len(request.tools or ()) > INLINE_TOOLS or sum(lengths) > INLINE_LETTERS


def _are_long(values: Sequence[Any]) -> bool:
    """Whether plain values have more than `INLINE_LETTERS` together; no more of them is looked at."""
    waiting, letters = list(values), 0
    while waiting and letters <= INLINE_LETTERS:
        value = waiting.pop()
        letters += _PART_LETTERS
        if isinstance(value, str):
            letters += len(value)
        elif isinstance(value, Mapping):
            letters += sum(map(len, value))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value[:INLINE_LETTERS]
        elif isinstance(value, StructuredOutputsParams):
            waiting += [value.json, value.regex, value.choice, value.grammar, value.structural_tag]
    return letters > INLINE_LETTERS


def plain_tools(tools: Sequence[ToolBody] | None) -> list[dict[str, Any]]:
    """Tools as plain data; what they hold is checked elsewhere."""
    return [_plain_tool(tool) for tool in (tools or ())[: MAX_TOOLS + 1]]


def _plain_tool(tool: ToolBody) -> dict[str, Any]:
    function = tool.function
    if function is None:
        return {"type": tool.type}
    plain = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
        "strict": function.strict,
    }
    return {"type": tool.type, "function": plain}


def _plain_choice(choice: str | ToolChoiceBody | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        return choice
    plain: dict[str, Any] = {"type": choice.type}
    if choice.function is not None:
        plain["function"] = {"name": choice.function.name}
    if choice.allowed_tools is not None:
        entries = [
            {"type": entry.type, "function": {"name": entry.function.name}} if entry.function else {"type": entry.type}
            for entry in choice.allowed_tools.tools
        ]
        plain["allowed_tools"] = {"mode": choice.allowed_tools.mode, "tools": entries}
    return plain


def _plain_message(here: str, message: ChatMessage, open_calls: dict[str, str]) -> dict[str, Any]:
    """A message as templates read it. Remembers tool calls in `open_calls`, to refuse answers to none."""
    if message.role not in ROLES:
        raise InvalidRequest(f"{here}.role must be one of {', '.join(ROLES)}", param=f"{here}.role")
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(f"{here}.content is missing", param=f"{here}.content")
    content = _content(here, message)
    plain: dict[str, Any] = {
        # Few templates know the developer role, which took the system role's place.
        "role": "system" if message.role == "developer" else message.role,
        # Templates write a content that is null as "None".
        "content": "" if content is None else content,
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.role == "tool":
        if message.tool_call_id not in open_calls:
            raise InvalidRequest(f"{here} answers no tool call before it", param=here)
        plain["tool_call_id"] = message.tool_call_id
        plain.setdefault("name", open_calls[message.tool_call_id])
        return plain
    if message.tool_calls:
        plain["tool_calls"] = _plain_calls(f"{here}.tool_calls", message.tool_calls)
        open_calls.update({call["id"]: call["function"]["name"] for call in plain["tool_calls"] if "id" in call})
    thoughts = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thoughts is not None:
        plain["reasoning_content"] = thoughts
    return plain


def _plain_calls(here: str, calls: Sequence[PastCall]) -> list[dict[str, Any]]:
    if len(calls) > MAX_TOOLS:
        raise InvalidRequest(f"{here} must have at most {MAX_TOOLS} entries", param=here)
    plain: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        if call.type != "function":
            field = f"{here}[{index}].type"
            raise InvalidRequest(f"{field} must be function", param=field, code="unsupported_parameter")
        function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
        named = {} if call.id is None else {"id": call.id}
        plain.append({**named, "type": "function", "function": function})
    return plain


def _arguments(given: str | Mapping[str, Any] | None) -> dict[str, Any] | str:
    """An object where the text is one; what a model wrote wrongly stays as it wrote it, but for halves of surrogate
    pairs, over which no template's text could be read any more."""
    if given is None or given == "":
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    try:
        value = json.loads(given)
        if _SPELT_HALF.search(given):
            value = json.loads(_HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def _content(here: str, message: ChatMessage) -> str | list[dict[str, str]] | None:
    """A text, or its parts: the chat template decides which form it reads."""
    if not isinstance(message.content, list):
        return message.content
    parts = []
    for position, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            param = f"{here}.content[{position}]"
            raise InvalidRequest(f"{param} must be a part of type text with a text", param=param)
        parts.append({"type": "text", "text": part.text})
    return parts
