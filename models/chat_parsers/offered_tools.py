"""The tools that a request offers, as the parser needs them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from troupellm.models.chat_parsers.unwrapped import WRAPPERS, Unwrapping
from troupellm.models.chat_parsers.values import resolved, schema_types

_NUMBERED: Final = re.compile(r"functions\.(.+?):\d+|(.+?):\d+")
_PREFIX: Final = re.compile(r"functions?[._:]?")


class OfferedTools:
    """Names, and which arguments are texts. An empty offer is no reason to refuse a name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """
        Args:
            tools: as the API has them, or only their functions.
        """
        self._parameters: dict[str, Mapping[str, Any]] = {}
        self._types: dict[tuple[str, str], frozenset[str]] = {}
        """Types of the parameters that were looked up, by function and name."""
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schema = function.get("parameters")
                self._parameters[function["name"]] = schema if isinstance(schema, Mapping) else {}

    def has(self, name: str) -> bool:
        return name in self._parameters

    def has_no_longer(self, name: str) -> bool:
        """True if a text that ends with this name cannot be the beginning of another tool's name."""
        return self.has(name) and not any(other != name and other.startswith(name) for other in self._parameters)

    def types(self, name: str, key: str) -> frozenset[str]:
        """The JSON types that an argument may have; empty if the schema names none."""
        found = self._types.get((name, key))
        if found is None:
            properties = self._properties(name)
            if key not in properties:
                return frozenset()
            found = self._types[name, key] = schema_types(properties[key], self.schema(name))
        return found

    def key(self, name: str, position: int) -> str:
        """The name of an argument that was written without one."""
        names = list(self._properties(name))
        return names[position] if position < len(names) else f"argument{position}"

    def schema(self, name: str) -> Mapping[str, Any]:
        """Schemas of all parameters; empty for a name that is not on offer."""
        return self._parameters.get(name, {})

    def wrapper(self, name: str) -> Unwrapping | None:
        """The way to unwrap arguments of a function on offer; None if they must not be unwrapped."""
        if not self.has(name):
            return None
        keys = self._properties(name).keys()
        return None if all(key in keys for key in WRAPPERS) else Unwrapping(keys)

    def recipient(self, name: str) -> str:
        """The tool on offer that a message is addressed to, perhaps with its format behind the name; else empty."""
        plain = name.removeprefix("functions.")
        if self.has(plain):
            return plain
        without = plain.removesuffix("json")
        return without if self.has(without) else ""

    def numbered(self, call_id: str) -> str:
        """The name in an id such as "functions.now:0", which models also write without dot or colon; empty where it
        names no tool."""
        match = _NUMBERED.fullmatch(call_id)
        if match and (match[1] or self.has(match[2])):
            return match[1] or match[2]
        if self.has(call_id) or (not self._parameters and not call_id.isdigit()):
            return match[2] if match else call_id
        begun = (call_id, _PREFIX.sub("", call_id, count=1))
        found = [name for name in self._parameters if any(text.startswith(name) for text in begun)]
        return max(found, key=len, default=match[2] if match else "")

    def only_fitting(self, arguments: Mapping[str, Any]) -> str:
        """The only tool with all of these parameters that needs no others; empty where there is none, or several."""
        found = [name for name in self._parameters if self._fits(name, arguments)]
        return found[0] if len(found) == 1 else ""

    def _fits(self, name: str, arguments: Mapping[str, Any]) -> bool:
        required = self.schema(name).get("required")
        needed = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
        return needed <= arguments.keys() <= self._properties(name).keys()

    def _properties(self, name: str) -> Mapping[str, Any]:
        schema = self.schema(name)
        if isinstance(schema.get("$ref"), str):
            found = resolved(schema["$ref"], schema)
            schema = found if isinstance(found, Mapping) else schema
        properties = schema.get("properties")
        return properties if isinstance(properties, Mapping) else {}
