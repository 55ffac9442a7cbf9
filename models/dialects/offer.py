"""The tools on offer, as far as a parser asks about them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from troupellm.models.dialects.json_text import json_dump

MOST_SCHEMA_STEPS: Final = 8
"""How deep references and alternatives are followed to find a parameter's type."""


class Offer:
    """Names, and which arguments are texts. Nothing on offer is no reason to refuse a name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """
        Args:
            tools: as the API has them, or only their functions.
        """
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schema = function.get("parameters")
                self._parameters[function["name"]] = schema if isinstance(schema, Mapping) else {}

    def has(self, name: str) -> bool:
        return name in self._parameters

    def types(self, name: str, key: str) -> frozenset[str]:
        """The JSON types that an argument may have; empty when nothing is said."""
        schema = self._parameters.get(name, {})
        properties = schema.get("properties")
        wanted = properties.get(key) if isinstance(properties, Mapping) else None
        return frozenset(_types(wanted, schema, MOST_SCHEMA_STEPS))

    def key(self, name: str, position: int) -> str:
        """What an argument without a name is called."""
        properties = self._parameters.get(name, {}).get("properties")
        names = list(properties) if isinstance(properties, Mapping) else []
        return names[position] if position < len(names) else f"argument{position}"


def value_text(text: str, types: frozenset[str]) -> str:
    """An argument that was written without quotes, as JSON: a text where the schema allows only that, else what it
    says, else a text."""
    if types != {"string"}:
        lowered = text.strip()
        if lowered in ("True", "False", "None"):
            lowered = {"True": "true", "False": "false", "None": "null"}[lowered]
        try:
            value = json.loads(lowered, strict=False, parse_constant=_refuse)
            written = json_dump(value)
        except (ValueError, RecursionError):
            pass
        else:
            if not types or _type(value) & types:
                return written
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _type(value: object) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}


def _types(schema: Any, root: Mapping[str, Any], steps: int) -> set[str]:
    """The types that a schema names, following references into its own document."""
    if not isinstance(schema, Mapping) or steps == 0:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_resolve(reference, root), root, steps - 1)
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {entry for entry in given if isinstance(entry, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return set().union(*map(_type, values))
    for word in ("anyOf", "oneOf"):
        branches = schema.get(word)
        if isinstance(branches, list):
            found = [_types(branch, root, steps - 1) for branch in branches[:MOST_SCHEMA_STEPS]]
            return set().union(*found) if all(found) else set()
    return set()


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
