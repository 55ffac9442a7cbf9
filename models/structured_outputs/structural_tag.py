"""Structural tags as Lark: free text in which marked stretches follow a grammar. Both of vLLM's forms are read.

The old one is `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, the new one `{"format": ...}` with the
formats of xgrammar. A rule for free text ends at what follows it, so each format is written together with its end.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from troupellm.models.structured_outputs.backend import GuideError
from troupellm.models.structured_outputs.lark import lark_of, literal_with_tokens

MOST_TAGS = 1024
MOST_EXCLUDED = 16
"""Texts that a free text must not hold."""
_TEXT = "/(?s:.*)/"

Schema = Any


def tag_grammar(
    tag: Any, json_options: Mapping[str, Any], prepare: Callable[[Schema], Schema], special: Mapping[str, int]
) -> str:
    """A structural tag's grammar.

    Args:
        json_options: for every schema in it.
        prepare: applied to every schema first.
        special: tokens that stand for no text, by their names.

    Raises:
        GuideError: it is none, or has a format that is not supported.
    """
    if not isinstance(tag, dict):
        raise GuideError("a structural tag is an object")
    return _Writer(json_options, prepare, special).grammar(_format_of(tag))


def _format_of(tag: Mapping[str, Any]) -> Any:
    if "format" in tag:
        return tag["format"]
    if "structures" not in tag:
        raise GuideError("a structural tag has format, or structures and triggers")
    tags = [
        {
            "type": "tag",
            "begin": structure.get("begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", True)},
            "end": structure.get("end"),
        }
        for structure in _objects(tag["structures"], "structures")
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Collects rules; every method gives an expression that may stand in a rule.

    `end` is the text that comes directly behind, and is part of the expression.
    """

    def __init__(
        self, json_options: Mapping[str, Any], prepare: Callable[[Schema], Schema], special: Mapping[str, int]
    ) -> None:
        self._special = special
        self._options = dict(json_options)
        self._prepare = prepare
        self._rules: list[str] = []
        self._tags = 0

    def grammar(self, wanted: Any) -> str:
        start = self._any(wanted, "", last=True)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"

    def _any(self, wanted: Any, end: str, *, last: bool) -> str:
        """last: nothing comes behind `end`."""
        if not isinstance(wanted, dict):
            raise GuideError("a format of a structural tag is an object with a type")
        write = _FORMATS.get(str(wanted.get("type")))
        if write is None:
            raise GuideError(
                f"the structural tag format {str(wanted.get('type'))[:64]} is not supported; use one of "
                + ", ".join(_FORMATS)
            )
        return write(self, wanted, end, last)

    def _const(self, wanted: Mapping[str, Any], end: str, last: bool) -> str:
        return self._literal(_string(wanted, "value") + end)

    def _json(self, wanted: Mapping[str, Any], end: str, last: bool) -> str:
        if wanted.get("style", "json") != "json":
            raise GuideError(f"the style {str(wanted['style'])[:64]} of a json_schema format is not supported")
        return f"{self._rule(self._schema(wanted.get('json_schema')))} {self._literal(end)}"

    def _regex(self, wanted: Mapping[str, Any], end: str, last: bool) -> str:
        return f"{self._terminal(_string(wanted, 'pattern'))} {self._literal(end)}"

    def _grammar(self, wanted: Mapping[str, Any], end: str, last: bool) -> str:
        text = lark_of(_string(wanted, "grammar"))
        return f"{self._rule('%lark {' + chr(10) + text + chr(10) + '}')} {self._literal(end)}"

    def _free_text(self, wanted: Mapping[str, Any], end: str, last: bool) -> str:
        excluded = wanted.get("excludes") or []
        texts = isinstance(excluded, list) and all(isinstance(text, str) and text for text in excluded)
        if not texts or len(excluded) > MOST_EXCLUDED:
            raise GuideError(
                f"excludes of an any_text format must be a list of at most {MOST_EXCLUDED} texts, not empty"
            )
        without = "".join(f" & ~/(?s:.*){_escaped(text)}(?s:.*)/" for text in excluded)
        if end:
            return self._until(end, without)
        if not last:
            raise GuideError("a format any_text must be the last one, or be followed by a fixed text")
        return self._rule(_TEXT + without, "TEXT")

    def _sequence(self, wanted: Mapping[str, Any], end: str, last: bool) -> str:
        elements = _objects(wanted.get("elements"), "elements")
        parts: list[str] = []
        index = 0
        while index < len(elements):
            element, following = elements[index], elements[index + 1] if index + 1 < len(elements) else None
            if following is None:
                parts.append(self._any(element, end, last=last))
            elif following.get("type") == "const_string":
                own_end = _string(following, "value")
                if index + 2 == len(elements):
                    own_end += end
                parts.append(self._any(element, own_end, last=False))
                index += 1
            else:
                parts.append(self._any(element, "", last=False))
            index += 1
        return " ".join(parts) or self._literal(end)

    def _or(self, wanted: Mapping[str, Any], end: str, last: bool) -> str:
        elements = _objects(wanted.get("elements"), "elements")
        return self._rule(" | ".join(self._any(element, end, last=last) for element in elements))

    def _tag(self, wanted: Mapping[str, Any], end: str, last: bool, begin: str | None = None) -> str:
        """begin: the rest of the tag's beginning behind its trigger."""
        self._tags += 1
        if self._tags > MOST_TAGS:
            raise GuideError(f"a structural tag must have at most {MOST_TAGS} tags")
        if begin is None:
            begin = _string(wanted, "begin", empty=True)
        ends = wanted.get("end")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(text, str) for text in ends):
            raise GuideError("end of a tag must be text, or a list of texts")
        bodies = [self._any(wanted.get("content"), text + end, last=last) for text in ends]
        return f"{self._literal(begin)} {self._rule(' | '.join(bodies))}"

    def _triggered(self, wanted: Mapping[str, Any], end: str, last: bool) -> str:
        triggers = wanted.get("triggers")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            raise GuideError("triggers must be a list of texts, not empty")
        if wanted.get("excludes"):
            raise GuideError("excludes of a triggered_tags format is not supported")
        tags = _objects(wanted.get("tags"), "tags")
        choices: list[str] = []
        for trigger in dict.fromkeys(triggers):
            rests = [
                self._tag(tag, "", False, begin=_string(tag, "begin")[len(trigger) :])
                for tag in tags
                if _trigger_of(tag, triggers) == trigger
            ]
            if rests:
                choices.append(f"{self._until(trigger)} {self._rule(' | '.join(rests))}")
        tagged = self._rule(" | ".join(choices))
        first = self._rule(" | ".join(self._tag(tag, "", False) for tag in tags))
        rest = self._until(end) if end else self._rule(_TEXT, "TEXT")
        if wanted.get("stop_after_first"):
            if wanted.get("at_least_one"):
                return f"{first} {self._literal(end)}"
            return self._rule(f"{tagged} {self._literal(end)} | {rest}")
        return f"{first} {tagged}* {rest}" if wanted.get("at_least_one") else f"{tagged}* {rest}"

    def _separated(self, wanted: Mapping[str, Any], end: str, last: bool) -> str:
        tags = _objects(wanted.get("tags"), "tags")
        separator = self._literal(_string(wanted, "separator", empty=True))
        tag = self._rule(" | ".join(self._tag(tag, "", False) for tag in tags))
        some = tag if wanted.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return f"{some} {self._literal(end)}" if wanted.get("at_least_one") else f"({some})? {self._literal(end)}"

    def _qwen_xml(self, wanted: Mapping[str, Any], end: str, last: bool) -> str:
        """`<parameter=name>value</parameter>` for the properties in their order; texts stand as they are."""
        schema = wanted.get("json_schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
            raise GuideError("a qwen_xml_parameter format needs a json_schema with properties")
        required = schema.get("required", [])
        parts = []
        for name, value in schema.get("properties", {}).items():
            head, tail = self._literal(f"<parameter={name}>"), "</parameter>"
            if isinstance(value, dict) and value.get("type") == "string" and not value.get("enum"):
                body = f"{head} {self._until(tail)}"
            elif isinstance(value, dict) and isinstance(value.get("enum"), list) and value.get("type") == "string":
                options = " | ".join(self._literal(f"\n{text}\n") for text in value["enum"])
                body = f"{head} ({options}) {self._literal(tail)}"
            else:
                content = self._rule(self._schema(_with_definitions(value, schema)))
                body = f"{head} /\\n?/ {content} /\\n?/ {self._literal(tail)}"
            parts.append(f"({body} /\\n?/)" + ("" if name in required else "?"))
        return f"/\\n?/ {' '.join(parts)} {self._literal(end)}"

    def _literal(self, text: str) -> str:
        return literal_with_tokens(text, self._special)

    def _schema(self, schema: Any) -> str:
        if not isinstance(schema, dict | bool):
            raise GuideError("json_schema must be an object, true or false")
        prepared = self._prepare(schema)
        if isinstance(prepared, bool):
            prepared = {} if prepared else {"not": {}}
        if self._options:
            prepared = prepared | {"x-guidance": self._options}
        return "%json " + json.dumps(prepared)

    def _until(self, end: str, without: str = "") -> str:
        """Any text up to the first `end`, which is part of it.

        Args:
            without: what the text may not be, as a terminal has it.
        """
        found = [place for text in self._special if (place := end.find(text)) >= 0]
        if found:  # no text holds such a token
            before = end[: min(found)]
            text = f"/(?s:.*){_escaped(before)}/" if before else _TEXT
            return self._rule(f"{self._rule(text + without, 'TEXT')} {self._literal(end[min(found) :])}")
        if without:
            text = self._rule(f"/(?s:.*){_escaped(end)}/{without}", "TEXT")
            return self._rule(text, "until", "[lazy]")
        return self._rule(f"{_TEXT} {self._literal(end)}", "until", "[lazy]")

    def _terminal(self, pattern: str) -> str:
        return self._rule("/" + _slashed(pattern) + "/", "REGEX")

    def _rule(self, body: str, name: str = "rule", attributes: str = "") -> str:
        """Write a rule; its name."""
        own = f"{name}_{len(self._rules)}"
        self._rules.append(f"{own}{attributes}: {body}")
        return own


_FORMATS: dict[str, Callable[[_Writer, Mapping[str, Any], str, bool], str]] = {
    "const_string": _Writer._const,
    "json_schema": _Writer._json,
    "regex": _Writer._regex,
    "grammar": _Writer._grammar,
    "any_text": _Writer._free_text,
    "sequence": _Writer._sequence,
    "or": _Writer._or,
    "tag": _Writer._tag,
    "triggered_tags": _Writer._triggered,
    "tags_with_separator": _Writer._separated,
    "qwen_xml_parameter": _Writer._qwen_xml,
}


def _trigger_of(tag: Mapping[str, Any], triggers: Sequence[str]) -> str:
    """The first trigger that the tag begins with."""
    begin = _string(tag, "begin")
    for trigger in triggers:
        if begin.startswith(trigger):
            return trigger
    raise GuideError("begin of each tag must start with one of the triggers")


def _with_definitions(schema: Any, whole: Mapping[str, Any]) -> Any:
    """A part of a schema, with the definitions of the whole that it may refer to."""
    if not isinstance(schema, dict):
        return schema
    return {name: whole[name] for name in ("$defs", "definitions") if name in whole} | schema


def _escaped(text: str) -> str:
    """A pattern of a text, as it stands between slashes."""
    return _slashed("".join("\\n" if part == "\n" else re.escape(part) for part in re.split("(\n)", text)))


def _slashed(pattern: str) -> str:
    """A pattern as it stands between slashes."""
    escaped = pattern.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n").replace("\r", "\\r")
    if "\x00" in escaped:
        raise GuideError("a pattern must not hold the character NUL")
    return escaped


def _string(wanted: Mapping[str, Any], name: str, *, empty: bool = False) -> str:
    value = wanted.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise GuideError(f"{name} of a structural tag must be text" + ("" if empty else ", not empty"))
    return value


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise GuideError(f"{name} of a structural tag must be a list of objects, not empty")
    return value
