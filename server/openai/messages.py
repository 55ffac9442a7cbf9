"""Tools of a chat request, and how long its parts take to read: off the event loop where that is long."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from troupellm.protocol.api.anthropic import InputMessage
from troupellm.protocol.api.chat import ChatMessage, ToolFields
from troupellm.protocol.api.tools import ToolBody, ToolChoiceBody
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.protocol.params.tools import ToolUse, tool_use
from troupellm.server.base.body import is_large
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload

INLINE_TOOLS = 16
INLINE_LETTERS = 32_768
"""Of arguments in past calls, and of schemas."""
INLINE_PARTS = 1_024
"""Messages, or parts of their contents, that are read on the event loop."""
_PART_LETTERS = 8
"""Letters that a part of a schema counts for, beside its texts."""


def tool_use_of(request: ToolFields, *, automatic: bool = True) -> ToolUse:
    """The tools of a request, checked.

    Args:
        automatic: tools may be called where the request does not say so.

    Raises:
        InvalidRequest: names the field.
    """
    choice = _plain_choice(request.tool_choice)
    if choice is None and not automatic:
        choice = "none"
    return tool_use(plain_tools(request.tools), choice, request.parallel_tool_calls)


def has_many_parts(messages: Sequence[ChatMessage] | Sequence[InputMessage]) -> bool:
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
    calls = [given for message in messages for given in (message.tool_calls, message.function_call) if given]
    return len(request.tools or ()) > INLINE_TOOLS or _are_long(calls)


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
    return [_plain_tool(tool) for tool in tools or ()]


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


T = TypeVar("T")
_Messages = Sequence[ChatMessage] | Sequence[InputMessage]


def has_slow_parts(exchange: Exchange, messages: _Messages) -> bool:
    nested = is_large(exchange) and any(isinstance(message.content, list | dict) for message in messages)
    return nested or has_many_parts(messages)


async def read_parts(exchange: Exchange, messages: _Messages, work: Callable[[], T]) -> T:
    """The result of work that reads every part of the messages: on a thread where that takes long.

    Raises:
        HttpError: 503, the machine gives no more threads.
    """
    return await offload(work) if has_slow_parts(exchange, messages) else work()
