"""Values that a model has written without quotes, as JSON of the types that a schema allows."""

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from troupellm.models.chat_parsers.json_dump import json_dump
from troupellm.models.chat_parsers.python_literals import python_value

MOST_SCHEMA_STEPS: Final = 64
"""Schemas that are read to find one parameter's type, with all references and alternatives."""
_MOST_VALUES: Final = 1024
"""Entries of an `enum` whose types are looked at; a longer one names none."""
_MOST_PARTS: Final = 32
"""Parts of a `$ref`, between slashes."""
_LONGEST_REFERENCE: Final = 4096
"""Characters of a `$ref`."""
_JSON_TYPES: Final = frozenset({"null", "integer", "number", "boolean", "object", "array", "string"})
_CONSTANTS: Final = {"true": True, "false": False, "null": None, "none": None}


def value_text(text: str, types: frozenset[str]) -> str:
    """JSON for a value: the first of null, integer, number, boolean, object or array that the schema allows and the
    text can be, else a string. Without types any JSON, else a string.

    Args:
        types: JSON types; see `schema_types`.
    """
    if types != {"string"}:
        value = _read(text.strip())
        if value is not _NOTHING:
            found = _fitting(value, types)
            if found is not _NOTHING:
                try:
                    return json_dump(found)
                except (ValueError, RecursionError):
                    pass
    return json.dumps(text, ensure_ascii=False)


_NOTHING: Final = object()


def _read(text: str) -> Any:
    """The value of JSON, of a constant in any case, or of a list or dictionary in Python's syntax."""
    lowered = text.lower()
    if lowered in _CONSTANTS:
        return _CONSTANTS[lowered]
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        pass
    if text[:1] in ("{", "["):
        try:
            return python_value(text)
        except (ValueError, TypeError, OverflowError):
            pass
    return _NOTHING


def _fitting(value: Any, types: frozenset[str]) -> Any:
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return int(value)
    return value if not types or type_names(value) & types else _NOTHING


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def type_names(value: object) -> set[str]:
    """The JSON types that a value has."""
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
        case list() | tuple():
            return {"array"}
    return {"object"}


def schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema names, following references into its own document; empty where it names none, or where
    more than `MOST_SCHEMA_STEPS` schemas would have to be read.

    Args:
        root: the document of `$ref`.
    """
    return _Walk(root).types(schema)


class _Walk:
    """Reads one schema, and those that it refers to, up to a number of them all together."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = MOST_SCHEMA_STEPS

    def types(self, schema: Any) -> frozenset[str]:
        if not isinstance(schema, Mapping) or self._left == 0:
            return frozenset()
        self._left -= 1
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self.types(resolved(reference, self._root))
        given = schema.get("type")
        if isinstance(given, str):
            return frozenset({given}) & _JSON_TYPES
        if isinstance(given, list):
            return _JSON_TYPES & {entry for entry in given if isinstance(entry, str)}
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return frozenset().union(*map(type_names, values)) if len(values) <= _MOST_VALUES else frozenset()
        for word in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(word)
            if isinstance(branches, list):
                return self._first(branches) if word == "allOf" else self._every(branches)
        if isinstance(schema.get("properties"), Mapping):
            return frozenset({"object"})
        return frozenset({"array"}) if "items" in schema else frozenset()

    def _first(self, branches: list[Any]) -> frozenset[str]:
        """The types of the first branch that names any."""
        return next(filter(None, map(self.types, branches[:MOST_SCHEMA_STEPS])), frozenset())

    def _every(self, branches: list[Any]) -> frozenset[str]:
        """The types of all branches; empty where one of them names none."""
        every: frozenset[str] = frozenset()
        for branch in branches:
            found = self.types(branch)
            if not found:
                return frozenset()
            every |= found
        return every


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema that a reference into its own document names; None where there is none, or where the reference has
    more than `_MOST_PARTS` parts."""
    if len(reference) > _LONGEST_REFERENCE:
        return None
    parts = reference.removeprefix("#").strip("/").split("/", _MOST_PARTS)
    if len(parts) > _MOST_PARTS:
        return None
    found: Any = root
    for part in parts:
        if not isinstance(found, Mapping):
            return None
        found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found
