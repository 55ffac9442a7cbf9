"""Values that a model has written without quotes, as JSON of the types that a schema allows."""

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from troupellm.models.dialects.json_text import json_dump
from troupellm.models.dialects.python_literals import python_value

MOST_SCHEMA_STEPS: Final = 8
"""How deep references and alternatives are followed to find a parameter's type."""
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


def schema_types(schema: Any, root: Mapping[str, Any], steps: int = MOST_SCHEMA_STEPS) -> frozenset[str]:
    """The types that a schema names, following references into its own document; empty where it names none.

    Args:
        root: the document of `$ref`.
    """
    if not isinstance(schema, Mapping) or steps == 0:
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return schema_types(resolved(reference, root), root, steps - 1)
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given}) & _JSON_TYPES
    if isinstance(given, list):
        return _JSON_TYPES & {entry for entry in given if isinstance(entry, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset().union(*map(type_names, values))
    for word in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(word)
        if isinstance(branches, list):
            found = [schema_types(branch, root, steps - 1) for branch in branches[:MOST_SCHEMA_STEPS]]
            if word == "allOf":
                return next(filter(None, found), frozenset())
            return frozenset().union(*found) if all(found) else frozenset()
    if isinstance(schema.get("properties"), Mapping):
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else frozenset()


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema that a reference into its own document names; None where there is none."""
    found: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
