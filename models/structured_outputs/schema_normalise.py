"""Removes keywords without effect from JSON schemas: backends refuse every keyword that they do not support, even those
that constrain nothing.

The same values fit a schema with and without them, in draft 2020-12 and in older ones. Everything else stays, so that a
backend still refuses unsupported keywords. Formats are annotations in draft 2020-12: enforced ones stay, others
constrain nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from troupellm.models.structured_outputs.schema_disjoint import by_place, exclusive, kinds_of
from troupellm.models.structured_outputs.schema_regex import without_look_ahead

Schema = Any

ENFORCED_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_OF_KIND: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset({"items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems"})
    | {"uniqueItems", "contains", "minContains", "maxContains"},
    "object": frozenset({"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"})
    | {"required", "minProperties", "maxProperties", "propertyNames"}
    | {"dependentRequired", "dependentSchemas", "dependencies"},
}
"""Keywords that pass over values of other kinds."""
CONSTRAINING: Final = frozenset(
    {"type", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not"}
    | {"if", "then", "else"}
).union(*_OF_KIND.values())
"""Keywords by which a draft may refuse values; all others are annotations, or hold schemas for references."""
_HELD_BY_NAME: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_LISTED: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_VALUES: Final = frozenset({"enum", "const", "default", "examples", "example", "required", "dependentRequired", "type"})
"""Keywords whose values are never schemas, even if they look like one."""
_DRAFTS: Final = frozenset(
    {"https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2019-09/schema"}
    | {f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)}
)


def plain_schema(schema: Schema) -> Schema:
    """An equivalent schema without keywords that constrain nothing. A value that is no schema is returned unchanged;
    its depth of nesting was bounded when it was read."""
    plain = _plain(schema)
    return _with_any_of(plain, plain) if by_place(plain) else plain


def without_unique_items(schema: Schema) -> Schema:
    """A schema whose lists may hold equal items."""
    if not isinstance(schema, dict):
        return schema
    return _mapped({name: value for name, value in schema.items() if name != "uniqueItems"}, without_unique_items)


def _plain(schema: Schema) -> Schema:
    if not isinstance(schema, dict):
        return schema
    plain = _mapped(schema, _plain)
    if "not" in plain and _says_nothing(plain["not"]):
        return False  # nothing fits; zod writes it so
    for name in list(_idle(plain)):
        plain.pop(name, None)
    anchor = plain.pop("$dynamicAnchor", None)
    if anchor is not None and "$anchor" not in plain:
        plain["$anchor"] = anchor  # which it is for a $ref, too; a $dynamicRef is refused
    return without_look_ahead(plain)


def _with_any_of(schema: Schema, root: Schema) -> Schema:
    """The schema with `anyOf` for each `oneOf` whose schemas exclude each other, which backends may not recognise."""
    if not isinstance(schema, dict):
        return schema
    options = schema.get("oneOf")
    same = "anyOf" not in schema and isinstance(options, list) and exclusive(options, root)
    inner = _mapped(schema, lambda part: _with_any_of(part, root))
    if not same:
        return inner
    inner.pop("discriminator", None)  # OpenAPI's, which only says how to find the one
    return {"anyOf" if name == "oneOf" else name: value for name, value in inner.items()}


def _mapped(schema: Mapping[str, Any], change: Callable[[Schema], Schema]) -> dict[str, Any]:
    """A schema with its subschemas changed. Keywords of no draft may hold subschemas too, as targets of references."""
    changed = {}
    for name, value in schema.items():
        if name in _VALUES:
            changed[name] = value
        elif isinstance(value, list):
            changed[name] = [change(part) for part in value] if name in _LISTED else value
        elif name in _HELD_BY_NAME and isinstance(value, dict):
            changed[name] = {key: change(part) for key, part in value.items()}
        else:
            changed[name] = change(value)
    return changed


def _idle(schema: Mapping[str, Any]) -> Iterator[str]:
    """Keywords that constrain nothing beside the others. The schemas within are plain."""
    kinds = kinds_of(schema["type"]) if "type" in schema else frozenset()
    for kind, names in _OF_KIND.items():
        if kinds and kind not in kinds:
            yield from names
    for name, value in schema.items():
        if _is_idle(name, value, schema):
            yield name


def _is_idle(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    match name:
        case "format":
            return isinstance(value, str) and value not in ENFORCED_FORMATS
        case "minLength" | "minItems":
            return _is_count(value, 0)
        case "minProperties":
            return _is_count(value, len(set(_texts(schema.get("required")))))
        case "maxProperties":
            return _is_closed(schema) and _at_most(len(schema.get("properties", {})), value)
        case "uniqueItems":
            return value is False or _at_most(schema.get("maxItems"), 1)
        case "exclusiveMinimum" | "exclusiveMaximum" | "not":
            return value is False
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "additionalItems":
            return not isinstance(schema.get("items"), list)
        case "unevaluatedItems":
            return _says_nothing(value) or not isinstance(schema.get("items", []), list)
        case "unevaluatedProperties":
            return _says_nothing(value) or "additionalProperties" in schema
        case "patternProperties":
            return bool(value == {})
        case "propertyNames":
            return _takes_all_names(value)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            known = _texts(schema.get("required"))
            return isinstance(value, dict) and all(_is_met(wanted, {*known, key}) for key, wanted in value.items())
        case "if":
            return _says_nothing(schema.get("then", True)) and _says_nothing(schema.get("else", True))
        case "then" | "else":
            return "if" not in schema or _says_nothing(value)
        case "$schema":
            return not isinstance(value, str) or value.rstrip("#") not in _DRAFTS
        case "$recursiveAnchor" | "deprecated" | "nullable":
            return True  # beside a $ref they are taken for more
        case _:
            return False


def _says_nothing(schema: Schema) -> bool:
    return schema is True or (isinstance(schema, dict) and CONSTRAINING.isdisjoint(schema))


def _takes_all_names(schema: Schema) -> bool:
    """Names are strings."""
    if isinstance(schema, dict) and "string" in kinds_of(schema.get("type")):
        return CONSTRAINING.isdisjoint(schema.keys() - {"type"})
    return _says_nothing(schema)


def _is_met(wanted: Any, names: set[str]) -> bool:
    """True if a dependency holds for every object that has these names."""
    return names.issuperset(wanted) if _is_texts(wanted) else _says_nothing(wanted)


def _is_closed(schema: Mapping[str, Any]) -> bool:
    """True if an object has only the names that are listed."""
    listed = isinstance(schema.get("properties", {}), dict)
    return listed and schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _is_count(value: Any, most: int) -> bool:
    """True if it is a number from 0 to most; a negative one is no count, and refused."""
    return _at_most(0, value) and _at_most(value, most)


def _at_most(value: Any, most: Any) -> bool:
    """True if both are numbers, and the first one is no larger."""
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (value, most))
    return numbers and bool(value <= most)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _texts(value: Any) -> list[str]:
    return value if _is_texts(value) else []
