"""Errors of values that are none of the few allowed ones, which name these."""

import functools
import re
from typing import Any

import msgspec
from msgspec import inspect

_STEPS = re.compile(r"\.(\w+)|(\[[^\]]*\])")


def with_allowed_values(error: msgspec.ValidationError, kind: type) -> str:
    """The text of an error that decoding into `kind` gave, with what would have been allowed at its path."""
    text = str(error)
    if not text.startswith("Invalid enum value"):
        return text
    reason, at, path = text.partition(" - at `$")
    allowed = _values(_described(kind), path)
    return f"{reason} (allowed: {', '.join(map(repr, allowed))}){at}{path}" if allowed else text


@functools.cache
def _described(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _values(kind: inspect.Type, path: str) -> list[Any]:
    kinds = _plain(kind)
    for name, item in _STEPS.findall(path):
        inner = [part for each in kinds for part in (_items(each) if item else _fields(each, name))]
        kinds = [part for each in inner for part in _plain(each)]
    return [value for each in kinds if isinstance(each, inspect.LiteralType) for value in each.values]


def _plain(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _plain(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [part for each in kind.types for part in _plain(each)]
    return [kind]


def _fields(kind: inspect.Type, name: str) -> list[inspect.Type]:
    fields = kind.fields if isinstance(kind, inspect.StructType | inspect.TypedDictType) else ()
    return [field.type for field in fields if field.encode_name == name]


def _items(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.DictType):
        return [kind.value_type]
    if isinstance(kind, inspect.TupleType):
        return list(kind.item_types)
    return [kind.item_type] if isinstance(kind, inspect.CollectionType) else []
