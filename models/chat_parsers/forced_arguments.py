"""Arguments of a forced call in a family's own form, as formats of a structural tag.

The next turn's template renders the call as the model wrote it, so that its tokens are found in the prefix cache. A
grammar can promise this form where every argument is a plain text, or a value that stands as JSON. Other tools are
called with a JSON object instead.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from troupellm.models.chat_parsers.syntax import OwnCall
from troupellm.models.chat_parsers.values import resolved, schema_types
from troupellm.models.structured_outputs.schema_normalise import CONSTRAINING

Format = dict[str, Any]
MOST_TAGS: Final = 512
"""Of all calls and arguments of a request; with more of them the calls are JSON."""
_MOST_WORDS: Final = 256
"""Of an enum."""
_MOST_OPTIONAL: Final = 16
"""Arguments with separators of which none is required: their grammar grows with the square of their number."""
_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_PYTHON_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_PLAIN_TEXT: Final = re.compile(r"[^<>\n\"'|\[\]]{1,256}")
_OBJECT_WORDS: Final = frozenset({"type", "properties", "required", "additionalProperties"})
_ANY_TEXT: Final[Format] = {"type": "any_text"}
_BOOLEAN: Final[Format] = {"type": "regex", "pattern": "(?:true|false|True|False)"}
"""Some templates render a constant as Python writes it."""
_PYTHON_BOOLEAN: Final[Format] = {"type": "regex", "pattern": "(?:True|False)"}
_DEFINITIONS: Final = ("$defs", "definitions")


def own_arguments(own: OwnCall, schema: Mapping[str, Any]) -> list[list[Format]]:
    """The ways to write the arguments of a call, each as formats that come one behind the other.

    Args:
        schema: of the arguments.

    Returns:
        No way where the schema asks for more than this form can promise.
    """
    properties = _properties(schema)
    if properties is None or not all(map((_KEY if own.values == "plain" else _PYTHON_KEY).fullmatch, properties)):
        return []
    required = schema.get("required", ())
    arguments = {
        key: [_tag(own, key, found) for found in _values(own, _without_reference(value, schema), schema)]
        for key, value in properties.items()
    }
    if not all(arguments.values()):
        return []
    if not own.between:
        return [[_once(tags, needed=key in required) for key, tags in arguments.items()]]
    needed = [tags for key, tags in arguments.items() if key in required]
    others = [tags for key, tags in arguments.items() if key not in required]
    return _separated(needed, others, own.between)


def number_of_tags(format_: Format) -> int:
    """The tags in a format, itself among them."""
    inner = [*format_.get("tags", ()), *format_.get("elements", ())]
    if format_["type"] == "tag":
        inner.append(format_["content"])
    return int(format_["type"] == "tag") + sum(map(number_of_tags, inner))


class _Value(NamedTuple):
    """One way to write a value."""

    content: Format
    type_name: str
    """"string" for a text; "" where it may be of several types."""


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schemas by name; None where arguments of other names may come, or something else is asked of them."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or schema.get("type", "object") != "object":
        return None
    if (schema.keys() & CONSTRAINING) - _OBJECT_WORDS or schema.get("additionalProperties", False) is not False:
        return None
    named = isinstance(required, list) and all(isinstance(key, str) and key in properties for key in required)
    return properties if named else None


def _tag(own: OwnCall, key: str, value: _Value) -> Format:
    before, _, after = own.argument.partition("{value}")
    is_text = value.type_name == "string"
    said = str(is_text).lower() if own.types == "flag" else value.type_name
    before = before.replace("{key}", key).replace("{type}", said)
    after = after.replace("{key}", key)
    if is_text and own.quote:
        before, after = before + own.quote, own.quote + after
    if value.content["type"] != "any_text":
        return {"type": "tag", "begin": before, "content": value.content, "end": after}
    # A text ends at the first mark, and the line break before that is the model's to write.
    text = value.content | {"excludes": _followers(own)}
    return {"type": "tag", "begin": before, "content": text, "end": after.lstrip()}


def _followers(own: OwnCall) -> list[str]:
    """The marks behind an argument, at which a parser ends a text that has no mark of its own at its end."""
    if own.quote or own.nested or own.values != "plain":
        return []
    behind = (own.argument.partition("{")[0], own.call.partition("{arguments}")[2])
    marks = [text.split()[0].partition(">")[0] for text in behind]
    return [mark if mark.startswith("<|") else f"\n{mark}" for mark in marks]


def _values(own: OwnCall, schema: Mapping[str, Any] | None, root: Mapping[str, Any]) -> list[_Value]:
    """The ways to write a value; none where a schema asks for more than they can promise."""
    if schema is None:
        return []
    types, words = schema_types(schema, root), schema.keys() & CONSTRAINING
    if own.values != "plain":
        in_python = own.values == "python" and types == {"boolean"} and words == {"type"}
        return [_Value(_PYTHON_BOOLEAN if in_python else _json(schema, root), "")]
    if types == {"string"}:
        texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
        content = _ANY_TEXT if texts is None else _one_of(texts)
        return [_Value(content, "string")] if content is not None and words <= {"type", "enum", "const"} else []
    if types and "string" not in types:
        nested = own.quote or own.nested
        return [] if nested and types & {"object", "array"} else [_Value(*_plain_value(schema, root, types))]
    if not _only_types(schema):
        return []
    if not own.quote and "{type}" not in own.argument:
        return [_Value(_ANY_TEXT, "string")]  # read as the first type that the text can be
    others = sorted(types - {"string"})
    if not types or (len(others) != 1 and own.types == "name") or set(others) & {"object", "array"}:
        return []
    return [_Value(_ANY_TEXT, "string"), _Value(_json({"type": others}, root), others[0])]


def _plain_value(schema: Mapping[str, Any], root: Mapping[str, Any], types: frozenset[str]) -> tuple[Format, str]:
    """A value without quotes around it, and its type."""
    if types == {"boolean"} and schema.keys() & CONSTRAINING == {"type"}:
        return _BOOLEAN, "boolean"
    return _json(schema, root), next(iter(types)) if len(types) == 1 else ""


def _without_reference(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema, or the one that it names; None where that names another one."""
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        schema = resolved(schema["$ref"], root) if schema.keys() & CONSTRAINING == {"$ref"} else None
    return schema if isinstance(schema, Mapping) and "$ref" not in schema else None


def _only_types(schema: Mapping[str, Any]) -> bool:
    """True if the schema, or each of its alternatives, says nothing but types."""
    words = schema.keys() & CONSTRAINING
    branches = schema.get("anyOf")
    if words == {"anyOf"} and isinstance(branches, list):
        return all(isinstance(branch, Mapping) and branch.keys() & CONSTRAINING <= {"type"} for branch in branches)
    return words <= {"type"}


def _one_of(texts: Any) -> Format | None:
    if not isinstance(texts, list) or not 0 < len(texts) <= _MOST_WORDS:
        return None
    if not all(isinstance(text, str) and _PLAIN_TEXT.fullmatch(text) and text == text.strip() for text in texts):
        return None
    return {"type": "or", "elements": [_const(text) for text in texts]}


def _json(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Format:
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    return {"type": "json_schema", "json_schema": {**definitions, **schema}}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _once(tags: list[Format], *, needed: bool) -> Format:
    """The argument in one of its ways, or perhaps nothing. Its last mark stays apart from the text that follows."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "",
        "at_least_one": needed,
        "stop_after_first": True,
    }


def _separated(needed: list[list[Format]], others: list[list[Format]], between: str) -> list[list[Format]]:
    """Required arguments come first, so that the place of each separator is known."""
    if needed:
        return [[_once(needed[0], needed=True), *_behind(between, needed[1:], needed=True), *_behind(between, others)]]
    if len(others) > _MOST_OPTIONAL:
        return []
    first = [
        _sequence([_once(tags, needed=True), *_behind(between, others[place + 1 :])])
        for place, tags in enumerate(others)
    ]
    return [[{"type": "or", "elements": first}], []] if first else [[]]


def _behind(between: str, arguments: list[list[Format]], *, needed: bool = False) -> Iterator[Format]:
    for tags in arguments:
        yield _once([tag | {"begin": between + tag["begin"]} for tag in tags], needed=needed)


def _sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": elements}
