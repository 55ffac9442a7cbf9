"""Values in Python's syntax, values without quotes, and JSON that is still coming."""

import json
import math

import pytest
from hypothesis import given, settings, strategies as st

from troupellm.models.chat_parsers.json_text import MOST_NESTED, JsonScanner
from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.python_literals import to_json
from troupellm.models.chat_parsers.values import value_text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(value=VALUES)
@settings(max_examples=150, deadline=None)
def test_what_python_prints_is_read_as_the_same_value(value: object):
    assert json.loads(to_json(repr(value))) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(1, 2)", [1, 2]),
        ("()", []),
        ('r"a\\n"', "a\\n"),
        ("'''a'b'''", "a'b"),
        ("'\\x41\\u00e9\\101\\q'", "Aé" + "A\\q"),
        ("true", True),
        ("null", None),
        ("1_000", 1000),
        ("-.5", -0.5),
        ("+3", 3),
        # what is no literal stays a text
        ("1 + 1", "1 + 1"),
        ("open('x')", "open('x')"),
        ("lambda: 0", "lambda: 0"),
        ("{1: 2}", "{1: 2}"),
        ("[1, 2", "[1, 2"),
        ("1e999", "1e999"),
        ("'a' 'b'", "'a' 'b'"),
        ("[" * 100, "[" * 100),
        ("9" * 10_000, "9" * 10_000),
        ("", ""),
    ],
)
def test_literals(text: str, value: object):
    assert json.loads(to_json(text)) == value


TOOL = {
    "name": "f",
    "parameters": {
        "$defs": {"place": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}},
        "properties": {
            "text": {"type": "string"},
            "either": {"type": ["string", "integer"]},
            "number": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "place": {"$ref": "#/$defs/place"},
            "loop": {"$ref": "#/$defs/loop"},
            "choice": {"enum": ["1", "2"]},
            "constant": {"const": 5},
            "odd": 3,
            "whole": {"type": "integer"},
            "real": {"type": "number"},
            "flag": {"oneOf": [{"type": "boolean"}, {"$ref": "#/$defs/place"}]},
            "nothing": {"type": ["null", "string"]},
            "list": {"type": "array"},
            "map": {"anyOf": [{"type": "object"}, {"type": "string"}]},
            "shape": {"properties": {"a": {}}},
        },
    },
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "17", "17"),
        ("place", "true", "true"),
        ("choice", "1", "1"),
        ("constant", "5", 5),
        ("either", "17", 17),
        ("either", "17a", "17a"),
        ("number", "17", 17),
        ("number", "None", None),
        ("number", '"x"', '"x"'),
        ("loop", "17", 17),
        ("odd", "[1]", [1]),
        ("whole", "5.0", 5),
        ("whole", " 5\n", 5),
        ("whole", "5.5", "5.5"),
        ("real", "5.0", 5.0),
        ("real", "1e3", 1000.0),
        ("flag", "TRUE", True),
        ("flag", "False", False),
        ("flag", "yes", "yes"),
        ("nothing", "null", None),
        ("nothing", "None", None),
        ("nothing", "17", "17"),
        ("list", "['a', True, None]", ["a", True, None]),
        ("list", '["a", 1]', ["a", 1]),
        ("list", "a, b", "a, b"),
        ("map", "{'a': (1, 2)}", {"a": [1, 2]}),
        ("map", '{"a": {"b": null}}', {"a": {"b": None}}),
        ("map", "{a}", "{a}"),
        ("shape", "{'a': 1}", {"a": 1}),
        ("unknown", '{"a": 1}', {"a": 1}),
        ("unknown", "{a: 1}", "{a: 1}"),
        ("unknown", "NaN", "NaN"),
        ("unknown", "[" * 5000, "[" * 5000),
    ],
)
def test_a_value_without_quotes_is_what_its_schema_says(key: str, text: str, value: object):
    assert json.loads(value_text(text, OfferedTools([TOOL]).types("f", key))) == value


@given(value=VALUES, tail=st.sampled_from(["", " ", ",", "}", "]", "\n</tool_call>", ' {"a": 1}']))
@settings(max_examples=150, deadline=None)
def test_the_end_of_a_value_is_found_wherever_the_text_is_cut(value: object, tail: str):
    text = json.dumps(value)
    scanner = JsonScanner()
    position = 0
    for end in range(1, len(text) + len(tail) + 1):
        position = scanner.scan((text + tail)[:end], position)
    assert (text + tail)[:position].rstrip() == text
    whole = JsonScanner()
    assert whole.scan(text + tail, 0) == position
    assert (whole.done, whole.failed) == (scanner.done, scanner.failed)
    assert not whole.failed


@pytest.mark.parametrize("text", ["[}", "{]", "[" * (MOST_NESTED + 1)])
def test_what_no_value_can_have_is_where_it_fails(text: str):
    scanner = JsonScanner()
    assert scanner.scan(text, 0) == len(text) - 1
    assert scanner.failed


def test_numbers_that_json_cannot_hold_are_texts():
    assert to_json("1e400") == '"1e400"'
    assert not math.isinf(json.loads(to_json("1e300")))
