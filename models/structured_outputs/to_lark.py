"""Translates a request's guide into the text that llguidance compiles.

Everything here reads untrusted text: it runs in the process that may be killed.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from llguidance import LLMatcher

from troupellm.models.structured_outputs.backend import GuideError
from troupellm.models.structured_outputs.lark import lark_of, literal
from troupellm.models.structured_outputs.schema_normalise import plain_schema
from troupellm.models.structured_outputs.structural_tag import tag_grammar
from troupellm.protocol.params.guide import GuideSpec

_CONTAINERS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
WHITESPACE: Final = r"\r?\n[ \t]{0,40}|[ \t]{1,4}"
"""Between the tokens of JSON: a new line with its indentation, or a little room. Without a bound a weak model stays
here until its last token."""
_WHITE_ONE: Final = r"[ \t\r\n]|\\[ntrs]|\\x20|\\x0[9aAdD]"
_WHITE_CLASS: Final = re.compile(rf"\[(?:{_WHITE_ONE})+\]")
_WHITE: Final = re.compile(
    rf"(?:{_WHITE_ONE}|{_WHITE_CLASS.pattern}|\((?:\?:)?|[)|*+?]|\{{[0-9]{{1,4}}(?:,[0-9]{{0,4}})?\}})*"
)
"""Patterns whose letters are all white space."""
OPTIONS: Final = "x-guidance"
_MAPS_OF_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS: Final = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")


def translate(spec: GuideSpec, depth: int, special: Mapping[str, int]) -> str:
    """The grammar of a guide.

    Args:
        depth: levels of nesting that JSON may have.
        special: tokens that stand for no text, by their names.

    Raises:
        GuideError: it is none.
    """
    match spec.kind:
        case "json_object":
            return _json_grammar({"type": "object"}, spec)
        case "json_schema":
            return _json_grammar(_schema(spec, depth), spec)
        case "regex":
            return _regex(spec.source)
        case "choice":
            choices = map(literal, read_json(spec.source, depth))
            # A terminal: the lexer takes ten thousand of them, where a rule would have as many ways to go on.
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(choices))
        case "grammar":
            return LLMatcher.grammar_from_lark(lark_of(spec.source))
        case "structural_tag":
            tag = read_json(spec.source, depth)
            return LLMatcher.grammar_from_lark(tag_grammar(tag, json_options(spec), _prepared(spec), special))


def read_json(text: str, depth: int) -> Any:
    """Raises GuideError: no JSON, or nested more deeply."""
    level = 0
    for part in _CONTAINERS.finditer(text):
        first = part[0][0]
        if first in "[{":
            level += 1
            if level > depth:
                raise GuideError(f"it is nested more than {depth} levels deep")
        elif first in "]}":
            level -= 1
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise GuideError("it has half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        text = f"it is no JSON: {error}" if isinstance(error, json.JSONDecodeError) else "it is no JSON"
        raise GuideError(text) from None
    return value


def json_options(spec: GuideSpec) -> dict[str, Any]:
    """llguidance's options for JSON."""
    if not spec.any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": _white(spec.whitespace_pattern) if spec.whitespace_pattern else WHITESPACE}


def _white(pattern: str) -> str:
    """A pattern of white space as JSON has it.

    Raises:
        GuideError: it may match something else.
    """
    if not _WHITE.fullmatch(pattern):
        raise GuideError(r"whitespace_pattern must match nothing but white space: spaces, \n, \r, \t and \s")
    inside = _WHITE_CLASS.sub(lambda found: found[0].replace(r"\s", r" \t\r\n"), pattern)
    return inside.replace(r"\s", r"[ \t\r\n]")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(text)
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _prepared(spec: GuideSpec) -> Callable[[Any], Any]:
    """The change that is made to each schema before it is compiled."""
    if spec.additional_properties:
        return lambda schema: plain_schema(without_options(schema))
    return lambda schema: plain_schema(close_objects(without_options(schema)))


def without_options(schema: Any) -> Any:
    """The schema without llguidance's own options, one of which passes over keywords that are not supported."""
    return {name: value for name, value in schema.items() if name != OPTIONS} if isinstance(schema, dict) else schema


def _schema(spec: GuideSpec, depth: int) -> Any:
    schema = read_json(spec.source, depth)
    if not isinstance(schema, dict | bool):
        raise GuideError("a JSON schema is an object, true or false")
    if isinstance(schema, bool):
        return object_of(schema)
    return _prepared(spec)(schema)


def object_of(schema: bool) -> dict[str, Any]:
    """A schema that is true or false, as an object.

    Raises:
        GuideError: nothing fits false.
    """
    if not schema:
        raise GuideError("Unsatisfiable schema: schema is false")
    return {}


def _json_grammar(schema: Any, spec: GuideSpec) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=cast(Any, json_options(spec) or None))


def close_objects(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever an object's schema does not say."""
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for name in _MAPS_OF_SCHEMAS:
        if isinstance(closed.get(name), dict):
            closed[name] = {key: close_objects(value) for key, value in closed[name].items()}
    for name in _LISTS_OF_SCHEMAS:
        if isinstance(closed.get(name), list):
            closed[name] = [close_objects(value) for value in closed[name]]
    for name in _SCHEMAS:
        if name in closed:
            closed[name] = close_objects(closed[name])
    if ("properties" in closed or "patternProperties" in closed) and "additionalProperties" not in closed:
        closed["additionalProperties"] = False
    return closed


def _regex(pattern: str) -> str:
    if "\x00" in pattern:
        raise GuideError("a pattern must not hold the character NUL")
    return LLMatcher.grammar_from_regex(pattern)
