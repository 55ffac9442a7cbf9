"""Changes of the tools on offer in the midst of a conversation."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

CHANGES = ("tool_addition", "tool_removal")
"""Types of blocks."""


class ToolChange(msgspec.Struct, frozen=True):
    name: str
    added: bool
    definition: Mapping[str, Any] | None = None
    """The tool as `tools` would have it; None for one that stands there, or that goes."""

    @property
    def line(self) -> str:
        """Text for the model at the place of the change."""
        return f"The tool {self.name} is {'now' if self.added else 'no longer'} available."


def tool_change(block: Mapping[str, Any]) -> ToolChange:
    """The change that a block makes: it defines a tool, or names one."""
    tool = block.get("tool")
    given = tool if isinstance(tool, Mapping) else block
    definition = given.get("definition")
    if not isinstance(definition, Mapping):
        definition = given if isinstance(given.get("input_schema"), Mapping) else None
    names = [] if definition is None else [definition.get("name")]
    names += [given.get("name"), given.get("tool_name")]
    name = next((name for name in names if isinstance(name, str) and name), "?")
    added = block.get("type") == CHANGES[0]
    return ToolChange(name, added, definition if added else None)


def offered(tools: Sequence[dict[str, Any]], changes: Sequence[ToolChange]) -> list[dict[str, Any]]:
    """The tools on offer behind all changes. Tools that were given stand where they stood, others behind them."""
    last = {change.name: change for change in changes}
    defined = {change.name: dict(change.definition) for change in changes if change.definition is not None}
    gone = [name for name, change in last.items() if not change.added]
    replaced = {*gone, *defined}
    kept = [tool for tool in tools if not isinstance(name := tool.get("name"), str) or name not in replaced]
    return [*kept, *(tool for name, tool in defined.items() if name not in gone)]
