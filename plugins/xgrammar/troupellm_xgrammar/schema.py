"""Checks JSON schemas for xgrammar, which ignores keywords that it does not know: those are refused here by name."""

from collections.abc import Mapping
from typing import Any, Final

from troupellm.models.structured_outputs.backend import GuideError
from troupellm.models.structured_outputs.schema_disjoint import pointed_at
from troupellm.models.structured_outputs.schema_normalise import CONSTRAINING

_OF_TYPE: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset({"pattern"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""Keywords that xgrammar enforces. It may enforce others, but not in all of their meaning."""
_ALONE: Final = ("$ref", "const", "enum", "anyOf")
"""xgrammar ignores the keywords beside one of these."""


def check_schema(schema: Any) -> None:
    """Raises GuideError: a keyword, or a pair of keywords, that this backend would ignore."""
    if schema is False:
        raise GuideError("the schema allows nothing")
    pending: list[Any] = [schema]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if isinstance(part, bool) or id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, dict):
            raise GuideError("each schema must be an object or a boolean")
        _check(part)
        for name in ("properties", "$defs", "definitions"):
            if isinstance(part.get(name), dict):
                pending += part[name].values()
        for name in ("anyOf", "prefixItems"):
            if isinstance(part.get(name), list):
                pending += part[name]
        pending += [part[name] for name in ("items", "additionalProperties") if name in part]
        if "$ref" in part:
            pending.append(_target(part["$ref"], schema))


def _target(reference: Any, schema: Any) -> Any:
    """The target of a reference, which need not be where schemas usually are."""
    found = pointed_at(reference, schema)
    if found is None:
        raise GuideError(f"$ref: there is no schema at {str(reference)[:64]}")
    return found


def _check(schema: Mapping[str, Any]) -> None:
    keywords = {name for name in schema if name in CONSTRAINING}
    alone = [name for name in _ALONE if name in keywords]
    if alone:
        beside = keywords - {alone[0]}
        if beside - {"type"} or (beside and alone[0] not in ("const", "enum")):
            raise _unsupported(min(beside), f" beside {alone[0]}")
        _check_values(schema, alone[0])
        return
    kind = schema.get("type")
    if kind is None or isinstance(kind, list):
        if keywords - {"type"}:
            raise _unsupported(min(keywords - {"type"}), " without one type")
        return
    if kind not in _OF_TYPE:
        raise GuideError(f"Invalid type: {str(kind)[:64]}")
    unknown = keywords - _OF_TYPE[kind] - {"type"}
    if unknown:
        raise _unsupported(min(unknown), f" of type {kind}")
    required, listed = schema.get("required", []), schema.get("properties", {})
    if not isinstance(required, list) or not all(name in listed for name in required):
        raise _unsupported("required", " for names that properties do not list")


def _check_values(schema: Mapping[str, Any], name: str) -> None:
    """Values that do not have the type beside them would come all the same."""
    kind = schema.get("type")
    if kind is None or name == "$ref":
        return
    values = [schema["const"]] if name == "const" else schema["enum"]
    kinds = kind if isinstance(kind, list) else [kind]
    if not isinstance(values, list) or not all(any(_is(value, one) for one in kinds) for value in values):
        raise _unsupported(name, " with values of other types")


def _is(value: Any, kind: Any) -> bool:
    types: dict[str, tuple[type, ...]] = {
        "string": (str,), "boolean": (bool,), "null": (type(None),), "array": (list,), "object": (dict,),
        "integer": (int,), "number": (int, float),
    }  # fmt: skip
    if isinstance(value, bool):
        return bool(kind == "boolean")
    return isinstance(value, types.get(str(kind), ()))


def _unsupported(keyword: str, where: str) -> GuideError:
    return GuideError(f"the keyword {keyword}{where} is not supported by the backend xgrammar")
