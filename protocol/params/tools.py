"""Tools that a model may call: what a request may offer, and how it may ask for them to be used.

Tools are plain data in OpenAI's form, `{"type": "function", "function": {"name", "description", "parameters"}}`; sizes
are checked before anything is done with them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.checks import printable

MAX_TOOLS: Final = 1024
MAX_TOOLS_BYTES: Final = 1024 * 1024
"""All tools together, as JSON."""
MAX_SCHEMA_DEPTH: Final = 32
MAX_NAME: Final = 128
NAME: Final = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME}}}")

Tool = Mapping[str, Any]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools an answer may call, and whether it must."""

    tools: tuple[Tool, ...] = ()
    """Those that may be called; empty where none may."""
    required: bool = False
    parallel: bool = True
    """More than one call is allowed."""
    strict: frozenset[str] = frozenset()
    """Names of the tools whose arguments must fit their schema, also in free calls."""


NO_TOOLS: Final = ToolUse()


def tool_use(tools: Sequence[Tool] | None, choice: Any = None, parallel: bool | None = None) -> ToolUse:
    """The tools of a request, checked.

    Args:
        choice: none, auto (the default), required, `{"type": "function", "function": {"name": ...}}`, or
            `{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`.

    Raises:
        InvalidRequest: names the field.
    """
    offered = check_tools(tools or ())
    names = {tool["function"]["name"]: tool for tool in offered}
    last = {tool["function"]["name"]: tool["function"] for tool in tools or ()}
    strict = frozenset(name for name, function in last.items() if function.get("strict"))
    if isinstance(choice, str) or choice is None:
        if choice not in (None, "none", "auto", "required"):
            raise InvalidRequest("tool_choice must be none, auto, required or name a tool", param="tool_choice")
        if choice == "required" and not offered:
            raise InvalidRequest("tool_choice required needs tools", param="tool_choice")
        chosen = () if choice == "none" else offered
        return ToolUse(tools=chosen, required=choice == "required", parallel=parallel is not False, strict=strict)
    if not isinstance(choice, Mapping):
        raise InvalidRequest("tool_choice must be a word or an object", param="tool_choice", code="invalid_type")
    if choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), names, strict, parallel=parallel is not False)
    name = _chosen_name(choice, "tool_choice")
    if name not in names:
        raise InvalidRequest(f"tool_choice names {printable(name)}, which is not among tools", param="tool_choice")
    return ToolUse(tools=(names[name],), required=True, parallel=False, strict=strict)


def _allowed(wanted: Any, names: Mapping[str, Tool], strict: frozenset[str], *, parallel: bool) -> ToolUse:
    field = "tool_choice.allowed_tools"
    if not isinstance(wanted, Mapping) or wanted.get("mode") not in ("auto", "required"):
        raise InvalidRequest(f"{field} must be an object with mode auto or required, and tools", param=field)
    entries = wanted.get("tools")
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not 0 < len(entries) <= MAX_TOOLS:
        raise InvalidRequest(f"{field}.tools must be a list of 1 to {MAX_TOOLS} tools", param=f"{field}.tools")
    chosen = [_chosen_name(entry, f"{field}.tools") for entry in entries]
    unknown = next((name for name in chosen if name not in names), None)
    if unknown is not None:
        message = f"{field}.tools names {printable(unknown)}, which is not among tools"
        raise InvalidRequest(message, param=f"{field}.tools")
    tools = tuple(tool for name, tool in names.items() if name in chosen)
    return ToolUse(tools=tools, required=wanted["mode"] == "required", parallel=parallel, strict=strict)


def _chosen_name(choice: Any, field: str) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest(f"{field} must name a function: {{type: function, function: {{name}}}}", param=field)
    return name


def check_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tools in the form that chat templates were trained on: name, description, parameters, and nothing else. Of
    several with one name the last one counts.

    Raises:
        InvalidRequest: names `tools[i]` and the field in it.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise InvalidRequest("tools must be a list", param="tools", code="invalid_type")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must have at most {MAX_TOOLS} entries, got {len(tools)}", param="tools")
    checked: dict[str, Tool] = {}
    size = 0
    for index, tool in enumerate(tools):
        here = f"tools[{index}]"
        plain = _checked(tool, here)
        size += _size(plain, here)
        if size > MAX_TOOLS_BYTES:
            raise InvalidRequest(f"tools must be at most {MAX_TOOLS_BYTES} bytes of JSON together", param="tools")
        checked[plain["function"]["name"]] = plain
    return tuple(checked.values())


def by_name(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tools in an order that does not depend on that of the request, so that prompts begin alike."""
    return tuple(sorted(tools, key=lambda tool: str(tool["function"]["name"])))


def _checked(tool: Any, here: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"{here} must be an object", param=here, code="invalid_type")
    kind = tool.get("type", "function")
    if kind != "function":
        raise InvalidRequest(
            f"{here}.type: only tools of type function are supported",
            param=f"{here}.type",
            code="unsupported_parameter",
        )
    function, field = tool.get("function"), f"{here}.function"
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{field} must be an object", param=field, code="missing_required_parameter")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        message = f"{field}.name must be 1 to 128 letters, digits, underscores, dashes and dots"
        raise InvalidRequest(message, param=f"{field}.name")
    description = function.get("description")
    if not isinstance(description, str | None):
        raise InvalidRequest(f"{field}.description must be text", param=f"{field}.description", code="invalid_type")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequest(f"{field}.strict must be true or false", param=f"{field}.strict", code="invalid_type")
    plain: dict[str, Any] = {"name": name}
    if description is not None:
        plain["description"] = description
    plain["parameters"] = _parameters(function.get("parameters"), f"{field}.parameters")
    return {"type": "function", "function": plain}


def _parameters(schema: Any, field: str) -> dict[str, Any]:
    if schema is None:
        return {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{field} must be a JSON schema", param=field, code="invalid_schema")
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{field} must be the schema of an object", param=field, code="invalid_schema")
    if not isinstance(schema.get("properties", {}), Mapping):
        message = f"{field}.properties must be an object"
        raise InvalidRequest(message, param=f"{field}.properties", code="invalid_schema")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise InvalidRequest(
            f"{field} must be nested at most {MAX_SCHEMA_DEPTH} levels deep", param=field, code="invalid_schema"
        )
    return dict(schema)


def _depth(value: Any) -> int:
    """Levels of nesting, counted no further than matters."""
    level, depth = [value], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        inner = [entry.values() if isinstance(entry, Mapping) else entry for entry in level if _nests(entry)]
        level = [value for values in inner for value in values]
        depth += bool(inner)
        if not inner:
            break
    return depth


def _nests(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _size(plain: Any, here: str) -> int:
    try:
        return len(json.dumps(plain, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest(f"{here} must hold plain JSON", param=here, code="invalid_type") from None
