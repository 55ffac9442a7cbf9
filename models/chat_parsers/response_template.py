"""Descriptions made from a tokenizer's own `response_template`, which transformers reads answers with.

Its regular expressions are never run: those that are a sequence of literal texts, white space and named groups become
templates of marks and holes, and others are refused.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from troupellm.models.chat_parsers.syntax import CallSyntax, Channels, Thinking, Written
from troupellm.protocol.errors import ConfigError

_REASONING: Final = ("thinking", "reasoning", "reasoning_content")
_MOST: Final = 4096
"""Characters of a pattern."""
_TOKEN: Final = re.compile(
    r"""(?P<spaces>\\s[*+]|\\n|\s+)
    | \(\?P<(?P<name>\w+)>(?P<inside>(?:\\.|\[(?:\\.|[^\]])*\]|[^()\\\[])*)\)
    | \\(?P<escaped>[^a-zA-Z0-9])
    | (?P<plain>[^\\()\[\]{}.*+?|^$])""",
    re.VERBOSE,
)
_NAMED_TAG: Final = re.compile(r"<([\w:-]+)=?\s*(?:[\w:-]+=)?[\"']?\{name\}")
_HOLES: Final = {"name": "{name}", "key": "{key}", "value": "{value}"}


class ResponseTemplate(msgspec.Struct, frozen=True):
    """The calls and reasoning that a response template describes."""

    calls: CallSyntax | Channels | None
    thinking: Thinking | Channels | None


def compiled(spec: Any) -> ResponseTemplate:
    """
    Raises:
        ConfigError: names the part that cannot be read as marks and holes.
    """
    fields = spec.get("fields") if isinstance(spec, Mapping) else None
    if not isinstance(fields, Mapping) or not all(isinstance(field, Mapping) for field in fields.values()):
        raise _refused("fields must be an object of objects")
    calls = fields.get("tool_calls")
    if any("<|channel|>" in text.replace("\\", "") for field in fields.values() for text in _opens(field)):
        return ResponseTemplate(Channels(), Channels())
    name = next((name for name in _REASONING if name in fields), None)
    thinking = None
    if name is not None:
        content = fields.get("content", {})
        drops = [] if _opens(content) == [""] else [*_opens(content), *_texts(content, "close")]
        thinking = Thinking(
            opens=tuple(map(str.strip, _opens(fields[name]))),
            closes=tuple(map(str.strip, _texts(fields[name], "close"))),
            drops=tuple(map(str.strip, drops)),
        )
        if not all((*thinking.opens, *thinking.closes)) or not thinking.closes:
            raise _refused(f"fields.{name} must have open and close")
    return ResponseTemplate(None if calls is None else _calls(calls), thinking)


def _calls(field: Mapping[str, Any]) -> CallSyntax:
    opens, closes = _opens(field), _texts(field, "close") or [""]
    if not all(opens):
        raise _refused("fields.tool_calls must have open")
    name_key, argument_key = _keys(field.get("transform"))
    kind = field.get("content", "text")
    arguments = _content_arguments(field)
    options: dict[str, Any] = {}
    if any("{name}" in text for text in opens):
        hole = "{arguments}"
        if kind == "xml-inline":
            hole, options["parameter"] = "{parameters}", _template(arguments.get("tag_pattern"), "tag_pattern")
        elif arguments.get("string_delims"):
            hole, options["quote"] = "{pairs}", _quote(arguments["string_delims"])
        elif kind != "json":
            raise _refused(f"fields.tool_calls.content {kind!r} is not supported")
    elif kind == "json":
        hole = "{json}"
        options["name_keys"], options["argument_keys"] = (name_key,), (argument_key,)
    else:
        raise _refused(f"fields.tool_calls.content {kind!r} needs the name in open_pattern")
    forms = tuple(f"{text} {hole} {_end_tag(text, closes[0])} {closes[0]}".strip() for text in opens)
    json_form = "<tool_call>\n{json}\n</tool_call>"
    forced = forms[0] if hole in ("{json}", "{arguments}") else json_form
    if forced not in forms:
        forms = (*forms, json_form)
    return CallSyntax(forms=forms, written=Written(call=forced.replace(" ", ""), between="\n"), **options)


def _end_tag(opens: str, closes: str) -> str:
    """The closing tag of the one that has the name, where the field itself ends with another one."""
    match = _NAMED_TAG.search(opens)
    tag = f"</{match[1]}>" if match else ""
    return f"{{?{tag}?}}" if tag and tag != closes else ""


def _content_arguments(field: Mapping[str, Any]) -> Mapping[str, Any]:
    found = field.get("content_args")
    return found if isinstance(found, Mapping) else {}


def _keys(transform: Any) -> tuple[str, str]:
    """The keys of name and arguments in an object of the model's."""
    function = transform.get("function", transform) if isinstance(transform, Mapping) else None
    if not isinstance(function, Mapping):
        return "name", "arguments"
    found = [str(function.get(key, f"{{{key}}}")).strip("{}").rpartition(".")[2] for key in ("name", "arguments")]
    return found[0], found[1]


def _quote(delimiters: Any) -> str:
    first = delimiters[0] if isinstance(delimiters, list) and delimiters else None
    if not isinstance(first, list) or len(first) != 2 or first[0] != first[1] or not isinstance(first[0], str):
        raise _refused("string_delims must be one mark that stands before and behind a text")
    return str(first[0])


def _opens(field: Mapping[str, Any]) -> list[str]:
    """Templates of a field's opening; empty for an implicit field."""
    if "open_pattern" in field:
        if "channel" in str(field["open_pattern"]):
            return [str(field["open_pattern"])]
        return [_template(field["open_pattern"], "open_pattern")]
    return _texts(field, "open") or [""]


def _texts(field: Mapping[str, Any], key: str) -> list[str]:
    if f"{key}_pattern" in field:
        return [_template(field[f"{key}_pattern"], f"{key}_pattern")]
    value = field.get(key)
    found = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    if any(not isinstance(text, str) or "{" in text for text in found):
        raise _refused(f"{key} must be a text without braces")
    return found


def _template(pattern: Any, place: str) -> str:
    """A pattern as a template of marks and holes."""
    if not isinstance(pattern, str) or len(pattern) > _MOST:
        raise _refused(f"{place} must be a text of at most {_MOST} characters")
    parts: list[str] = []
    position = 0
    while position < len(pattern):
        match = _TOKEN.match(pattern, position)
        if match is None:
            raise _refused(f"{place}: only literal texts, white space and named groups are supported")
        position = match.end()
        if match["spaces"] is not None:
            parts.append(" ")
        elif match["name"] is not None:
            parts.append(_HOLES.get(match["name"], "{word}"))
        elif match["escaped"] in ("{", "}"):
            raise _refused(f"{place}: braces are not supported")
        else:
            parts.append(match["escaped"] or match["plain"])
    return "".join(parts).strip()


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"the tokenizer's response_template cannot be used: {reason}", param="tool_call_parser")
