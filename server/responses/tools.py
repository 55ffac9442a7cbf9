"""Tools of the responses API: functions are handed to the model, what else there is is skipped, and told of.

Functions may stand in a namespace, where Codex puts those of each MCP server. Models know plain functions only: there
they have one name made of both, and their calls get the two names back. Coding agents also send tools of their vendor's
own server beside them (`web_search`, `image_generation` ...) and work without those. Of namespaces as many functions
are offered as fit: some clients send hundreds.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.checks import got
from troupellm.protocol.params.tools import MAX_NAME, MAX_TOOLS, check_tools
from troupellm.server.responses.namespaces import Namespaced, flat_name

MODES = ("none", "auto", "required")
_FIELDS: Mapping[str, tuple[type[object], str]] = {
    "description": (str, "text"),
    "parameters": (dict, "a JSON schema"),
    "strict": (bool, "true or false"),
}
"""The fields of a function that are passed on beside its name."""


class _Function(msgspec.Struct, frozen=True):
    here: str
    """The client's name of its place in the request."""
    tool: Mapping[str, Any]
    """As the client has sent it."""
    namespace: str | None = None

    @property
    def name(self) -> str:
        """That the model knows it by."""
        own: str = self.tool["name"]
        return own if self.namespace is None else flat_name(self.namespace, own)


class _OfferedTools(msgspec.Struct):
    """The tools of a request."""

    functions: list[_Function] = []
    kept: list[dict[str, Any]] = []
    about: dict[str, str] = {}
    """Descriptions of namespaces."""
    skipped: list[str] = []
    """Types of the others."""
    room: int = MAX_TOOLS
    """Functions of namespaces that still fit beside the plain ones."""


class ChosenTools(msgspec.Struct, frozen=True):
    kept: list[dict[str, Any]]
    """As the client has sent them."""
    choice: str | dict[str, Any]
    fields: dict[str, Any]
    """`tools` and `tool_choice` of the chat request, as far as there are any."""
    names: list[tuple[str, str]]
    namespaced: Namespaced
    """The functions behind the model's names of functions in namespaces."""
    skipped: list[str]
    """Types of tools that the model is not told of."""

    @classmethod
    def of(
        cls,
        tools: Sequence[Mapping[str, Any]],
        choice: str | Mapping[str, Any] | None,
        further: Sequence[object] = (),
    ) -> Self:
        """
        Args:
            further: tools that the conversation has brought along. Those of them that cannot be offered are skipped.

        Raises:
            InvalidRequest: a function or a namespace without a name, or a choice of tools that are not there.
        """
        offered_tools = _read(tools)
        _read_further(offered_tools, further)
        chosen = _choice(choice, offered_tools.functions)
        allowed = offered_tools.functions
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            allowed = _allowed(choice, offered_tools.functions)
            chosen = _mode(choice.get("mode", "auto"), "tool_choice.mode", allowed)
        fields: dict[str, Any] = {}
        if allowed:
            fields = {"tools": _chat_tools(allowed, offered_tools.about)}
            if choice is not None:  # what the request does not say, the server's settings do
                fields["tool_choice"] = chosen
        names: list[tuple[str, str]] = []
        for position, function in enumerate(allowed):
            names += [(f"tools[{position}].function", function.here), (f"tools[{position}]", function.here)]
        given = dict(choice) if isinstance(choice, Mapping) else choice or "auto"
        plain = {one.name for one in allowed if one.namespace is None}
        # Of those that are not allowed too: a model may call what it has called before.
        inner = [
            (one.name, one.namespace, one.tool["name"]) for one in offered_tools.functions if one.name not in plain
        ]
        pairs = {name: (namespace, own) for name, namespace, own in inner if namespace is not None}
        return cls(offered_tools.kept, given, fields, names, pairs, offered_tools.skipped)


def _read(tools: Sequence[Mapping[str, Any]]) -> _OfferedTools:
    offered_tools = _OfferedTools(room=MAX_TOOLS - sum(tool.get("type") == "function" for tool in tools))
    for position, tool in enumerate(tools):
        _read_tool(offered_tools, tool, f"tools[{position}]")
    if len(offered_tools.functions) > MAX_TOOLS:
        message = f"tools must have at most {MAX_TOOLS} functions, got {len(offered_tools.functions)}"
        raise InvalidRequest(message, param="tools")
    return offered_tools


def _read_tool(offered_tools: _OfferedTools, tool: Mapping[str, Any], here: str) -> None:
    kind = _text(tool, "type", here)
    if kind == "function":
        _check_function(tool, here)
        offered_tools.functions.append(_Function(here, tool))
        offered_tools.kept.append(dict(tool))
    elif kind == "namespace":
        _read_namespace(offered_tools, tool, here)
    else:
        offered_tools.skipped.append(kind)


def _read_further(offered_tools: _OfferedTools, tools: Sequence[object]) -> None:
    """Tools of the conversation: no fault of theirs makes a request fail."""
    for tool in tools:
        own = _OfferedTools(room=MAX_TOOLS)
        try:
            _read_tool(own, tool if isinstance(tool, Mapping) else {}, "input")
        except InvalidRequest:
            offered_tools.skipped.append("definition")
            continue
        offered_tools.skipped += own.skipped
        offered_tools.about = own.about | offered_tools.about
        for function in own.functions:
            if len(offered_tools.functions) < MAX_TOOLS and _is_right(function):
                offered_tools.functions.append(function)
            else:
                offered_tools.skipped.append("definition")


def _is_right(function: _Function) -> bool:
    try:
        return bool(check_tools(_chat_tools([function], {})))
    except InvalidRequest:
        return False


def _read_namespace(offered_tools: _OfferedTools, tool: Mapping[str, Any], here: str) -> None:
    namespace = _text(tool, "name", here)
    description, inner = tool.get("description"), tool.get("tools")
    if not isinstance(description, str | None):
        raise InvalidRequest(f"{here}.description must be text", param=f"{here}.description", code="invalid_type")
    if not isinstance(inner, list) or not all(isinstance(one, Mapping) for one in inner):
        raise InvalidRequest(f"{here}.tools must be a list of tools", param=f"{here}.tools", code="invalid_type")
    kept = []
    for position, one in enumerate(inner):
        place = f"{here}.tools[{position}]"
        kind = _text(one, "type", place)
        if kind != "function":
            offered_tools.skipped.append(kind)
            continue
        _check_function(one, place)
        if offered_tools.room <= 0 or len(flat_name(namespace, one["name"])) > MAX_NAME:
            offered_tools.skipped.append("namespace_function")
            continue
        offered_tools.room -= 1
        offered_tools.functions.append(_Function(place, one, namespace))
        kept.append(one)
    if kept:
        offered_tools.kept.append({**tool, "tools": kept})
        if description:
            offered_tools.about.setdefault(namespace, description)


def _check_function(tool: Mapping[str, Any], here: str) -> None:
    _text(tool, "name", here)
    for field, (kind, what) in _FIELDS.items():
        if tool.get(field) is not None and not isinstance(tool[field], kind):
            place = f"{here}.{field}"
            raise InvalidRequest(f"{place} must be {what}", param=place, code="invalid_type")


def _text(tool: Mapping[str, Any], field: str, here: str) -> str:
    value = tool.get(field)
    if not isinstance(value, str) or not value:
        message = f"{here}.{field} is missing"
        raise InvalidRequest(message, param=f"{here}.{field}", code="missing_required_parameter")
    return value


def _chat_tools(functions: Sequence[_Function], about: Mapping[str, str]) -> list[dict[str, Any]]:
    """Functions for the model. The purpose of a namespace stands in one of its functions, the first by name: in all of
    them it would take that much of the context each time."""
    names: dict[str, str] = {}
    for function in functions:
        if function.namespace is not None and function.namespace in about:
            names[function.namespace] = min(names.get(function.namespace, function.name), function.name)
    made: list[dict[str, Any]] = []
    for function in functions:
        described: dict[str, Any] = {"name": function.name}
        described |= {field: value for field in _FIELDS if (value := function.tool.get(field)) is not None}
        namespace = function.namespace
        if namespace is not None and names.get(namespace) == function.name:
            purpose = about[namespace]
            own = described.get("description", "")
            described["description"] = f"About {function.namespace}: {purpose}\n\n{own}".rstrip()
        made.append({"type": "function", "function": described})
    return made


def _choice(choice: str | Mapping[str, Any] | None, functions: Sequence[_Function]) -> str | dict[str, Any]:
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        return _mode(choice, "tool_choice", functions)
    kind = choice.get("type")
    if kind == "allowed_tools":
        return "auto"
    if kind != "function":
        message = "tool_choice: only functions can be chosen, other tools are skipped"
        raise InvalidRequest(message, param="tool_choice", code="unsupported_parameter")
    return {"type": "function", "function": {"name": _named(choice, functions, "tool_choice")}}


def _named(wanted: Mapping[str, Any], functions: Sequence[_Function], here: str) -> str:
    """The model's name of a function. Its namespace may be left out where no other function has its own name."""
    name, namespace = wanted.get("name"), wanted.get("namespace")
    fitting = [one for one in functions if one.tool["name"] == name and namespace in (None, one.namespace)]
    names = {one.name for one in fitting if one.namespace is None} or {one.name for one in fitting}
    if not names:
        message = f"{here}.name must be that of a function in tools{got(name)}"
        raise InvalidRequest(message, param=f"{here}.name")
    if len(names) > 1:
        message = f"{here}.name is that of functions in several namespaces: name one in {here}.namespace"
        raise InvalidRequest(message, param=f"{here}.name")
    return names.pop()


def _mode(mode: object, here: str, functions: Sequence[_Function]) -> str:
    if not isinstance(mode, str) or mode not in MODES:
        raise InvalidRequest(f"{here} must be one of {', '.join(MODES)}, or name a function", param=here)
    if mode == "required" and not functions:
        raise InvalidRequest(f"{here} is required, but there is no function in tools", param=here)
    return mode


def _allowed(choice: Mapping[str, Any], functions: Sequence[_Function]) -> list[_Function]:
    """The functions that may be called; what else is allowed are tools that were skipped."""
    wanted, here = choice.get("tools"), "tool_choice.tools"
    if not isinstance(wanted, list) or not all(isinstance(tool, Mapping) for tool in wanted):
        raise InvalidRequest(f"{here} must be a list of tools", param=here)
    if len(wanted) > MAX_TOOLS:
        raise InvalidRequest(f"{here} must have at most {MAX_TOOLS} entries, got {len(wanted)}", param=here)
    chosen: set[str] = set()
    for position, tool in enumerate(wanted):
        place = f"{here}[{position}]"
        if tool.get("type") == "function":
            chosen.add(_named(tool, functions, place))
        elif tool.get("type") == "namespace":
            inside = {one.name for one in functions if one.namespace is not None and one.namespace == tool.get("name")}
            if not inside:
                message = f"{place}.name must be a namespace of functions in tools{got(tool.get('name'))}"
                raise InvalidRequest(message, param=f"{place}.name")
            chosen |= inside
    return [one for one in functions if one.name in chosen]
