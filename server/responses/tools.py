"""Tools of the responses API: functions are handed to the model, what else there is is skipped.

Coding agents send tools of their vendor's own server beside their functions (`web_search`, `namespace`,
`image_generation` ...) and work without them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from troupellm.protocol.errors import InvalidRequest

MODES = ("none", "auto", "required")


class ChosenTools(msgspec.Struct, frozen=True):
    kept: list[dict[str, Any]]
    """As the client has sent them."""
    choice: str | dict[str, Any]
    fields: dict[str, Any]
    """`tools` and `tool_choice` of the chat request."""
    names: list[tuple[str, str]]

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None) -> Self:
        """
        Raises:
            InvalidRequest: a function without a name, or a choice of tools that are not there.
        """
        kept: list[dict[str, Any]] = []
        names: list[tuple[str, str]] = []
        for position, tool in enumerate(tools):
            here = f"tools[{position}]"
            kind = tool.get("type")
            if not isinstance(kind, str):
                raise InvalidRequest(f"{here}.type is missing", param=f"{here}.type", code="missing_required_parameter")
            if kind == "function":
                if not isinstance(tool.get("name"), str):
                    message = f"{here}.name is missing"
                    raise InvalidRequest(message, param=f"{here}.name", code="missing_required_parameter")
                names += [(f"tools[{len(kept)}].function", here), (f"tools[{len(kept)}]", here)]
                kept.append(dict(tool))
        chosen = _choice(choice, kept)
        allowed = kept
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            allowed = _allowed(choice, kept)
            chosen = _mode(choice.get("mode", "auto"), "tool_choice.mode", allowed)
        fields: dict[str, Any] = {}
        if allowed:
            fields = {"tools": [_function(tool) for tool in allowed], "tool_choice": chosen}
        return cls(kept, dict(choice) if isinstance(choice, Mapping) else choice or "auto", fields, names)


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": described}


def _choice(choice: str | Mapping[str, Any] | None, kept: Sequence[Mapping[str, Any]]) -> str | dict[str, Any]:
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        return _mode(choice, "tool_choice", kept)
    kind = choice.get("type")
    if kind == "allowed_tools":
        return "auto"
    if kind != "function":
        message = "tool_choice: only functions can be chosen, other tools are skipped"
        raise InvalidRequest(message, param="tool_choice", code="unsupported_parameter")
    name = choice.get("name")
    if not any(tool.get("name") == name for tool in kept):
        raise InvalidRequest("tool_choice.name is not the name of a function in tools", param="tool_choice.name")
    return {"type": "function", "function": {"name": name}}


def _mode(mode: object, here: str, kept: Sequence[Mapping[str, Any]]) -> str:
    if not isinstance(mode, str) or mode not in MODES:
        raise InvalidRequest(f"{here} must be one of {', '.join(MODES)}, or name a function", param=here)
    if mode == "required" and not kept:
        raise InvalidRequest(f"{here} is required, but there is no function in tools", param=here)
    return mode


def _allowed(choice: Mapping[str, Any], kept: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    wanted = choice.get("tools")
    if not isinstance(wanted, list) or not all(isinstance(tool, Mapping) for tool in wanted):
        raise InvalidRequest("tool_choice.tools must be a list of tools", param="tool_choice.tools")
    names = [tool.get("name") for tool in wanted if tool.get("type") == "function"]
    return [tool for tool in kept if tool.get("name") in names]
