"""Decides if JSON schemas exclude each other, so that `oneOf` equals `anyOf`. In doubt, they count as overlapping."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final
from urllib.parse import unquote

Schema = Any

ALL_KINDS: Final = frozenset({"string", "number", "boolean", "null", "array", "object"})
MOST_OPTIONS: Final = 64
"""More are left to the backend: each is compared with each."""
_MOST_REFERENCES: Final = 16
"""Longest chain of references."""
_LARGEST_EXACT: Final = 2.0**53


def exclusive(options: Sequence[Schema], root: Schema) -> bool:
    """True if no value fits two of the schemas.

    Args:
        root: the whole schema, in which references are looked up; see `by_place`.
    """
    if len(options) > MOST_OPTIONS:
        return False
    said = [_said(option, root) for option in options]
    return all(_apart(one, other, root) for one, other in combinations(said, 2))


def by_place(root: Schema) -> bool:
    """True if all references in a schema are paths from its root, none of them within a `oneOf`."""
    pending = [root]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            own_base = part is not root and (isinstance(part.get("$id"), str) or isinstance(part.get("id"), str))
            if own_base or "/oneOf" in str(part.get("$ref", "")):
                return False
            pending += part.values()
    return True


def kinds_of(wanted: Any) -> frozenset[str]:
    """The kinds of values that a `type` lets pass, where integers are numbers; none of one that is wrong."""
    names = wanted if isinstance(wanted, list) else [wanted]
    if not all(isinstance(name, str) and (name in ALL_KINDS or name == "integer") for name in names):
        return frozenset()
    return frozenset("number" if name == "integer" else name for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """Facts that are certain about the values that fit a schema."""

    kinds: frozenset[str] = ALL_KINDS
    values: frozenset[tuple[str, Any]] | None = None
    """Every fitting value is one of these."""
    required: frozenset[str] = frozenset()
    """Names that all fitting objects have."""
    properties: Mapping[str, Schema] = field(default_factory=dict)
    closed: bool = False
    """Fitting objects have only the names of `properties`."""


def _said(schema: Schema, root: Schema) -> _Said:
    schema = _resolved(schema, root)
    if schema is False:
        return _Said(kinds=frozenset())
    if not isinstance(schema, dict):
        return _Said()
    values = _values(schema)
    kinds = kinds_of(schema["type"]) if "type" in schema else ALL_KINDS
    if values is not None:
        kinds &= frozenset(kind for kind, _ in values)
    listed, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list):
        return _Said(kinds=kinds, values=values)
    return _Said(
        kinds=kinds,
        values=values,
        required=frozenset(name for name in required if isinstance(name, str)),
        properties=listed,
        closed=schema.get("additionalProperties") is False and not schema.get("patternProperties"),
    )


def _apart(one: _Said, other: _Said, root: Schema) -> bool:
    """True if no value fits both."""
    if _differ(one, other):
        return True
    if one.kinds & other.kinds != {"object"}:
        return False
    return any(_apart_by(name, one, other, root) for name in one.required | other.required)


def _apart_by(name: str, one: _Said, other: _Said, root: Schema) -> bool:
    """True if no property of that name, which an object that fits both must have, could fit both."""
    without = [said for said in (one, other) if name not in said.properties]
    if without:
        return any(said.closed for said in without)
    return _differ(_said(one.properties[name], root), _said(other.properties[name], root))


def _differ(one: _Said, other: _Said) -> bool:
    if one.kinds.isdisjoint(other.kinds):
        return True
    return one.values is not None and other.values is not None and one.values.isdisjoint(other.values)


def _values(schema: Mapping[str, Any]) -> frozenset[tuple[str, Any]] | None:
    """The values that a schema lists, if they can be compared."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list):
        return None
    values = list(_comparable(listed))
    return frozenset(values) if len(values) == len(listed) else None


def _comparable(values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for value in values:
        match value:
            case None:
                yield "null", None
            case bool():
                yield "boolean", value
            case str():
                yield "string", value
            case int() | float() if abs(value) < _LARGEST_EXACT:
                yield "number", float(value)


def _resolved(schema: Schema, root: Schema) -> Schema:
    """The target of a schema's reference, if it has one; keywords beside a reference only narrow it. None: unknown."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = pointed_at(schema["$ref"], root)
    return None


def pointed_at(reference: Any, root: Schema) -> Schema:
    """The target of a reference to a place in the whole schema; None if it does not exist or is of another kind."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name in map(str, range(len(found))):
            found = found[int(name)]
        else:
            return None
    return found
