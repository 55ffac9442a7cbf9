"""Bodies of tools and of their choice as the chat completions API has them. Other modules check the contents."""

from typing import Any, Literal

import msgspec


class FunctionBody(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object."""
    strict: bool | None = None
    """Calls always have arguments that fit the schema."""


class ToolBody(msgspec.Struct, kw_only=True):
    type: str = "function"
    function: FunctionBody | None = None


class ChosenFunction(msgspec.Struct, kw_only=True):
    name: str


class ChosenTool(msgspec.Struct, kw_only=True):
    type: str = "function"
    function: ChosenFunction | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[ChosenTool]


class ToolChoiceBody(msgspec.Struct, kw_only=True):
    """One function that must be called, or the tools of which some may or must be."""

    type: str = "function"
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None
