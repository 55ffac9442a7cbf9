"""Schemas of draft 2020-12 written for the corpus: every keyword that is supported, alone and together."""

from itertools import product
from typing import Any

Schema = Any
Named = list[tuple[str, Schema]]


def closed(properties: dict[str, Schema], *, required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """An object with these properties and no others; all of them are required unless told otherwise."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }


def scalars() -> Named:
    kinds = ("string", "integer", "number", "boolean", "null", "array", "object")
    found: Named = [(kind, {"type": kind}) for kind in kinds]
    found += [(f"{a} or {b}", {"type": [a, b]}) for a, b in product(kinds[:5], ("null", "object")) if a != b]
    constants = (
        0,
        -1,
        3.5,
        True,
        None,
        "",
        "x",
        "é",
        '"\\/\b\f\n\r\t',
        "\u2028",
        "💡",
        [],
        {},
        [1, [2]],
        {"a": {"b": []}},
    )
    found += [(f"const {number}", {"const": value}) for number, value in enumerate(constants)]
    enums = (
        ["red", "green", "blue"],
        [1, 2, 3],
        [1, "1", None, True, 1.5],
        [{"a": 1}, {"a": 2}],
        ["", " ", "  "],
        ["日本", "中国", "한국"],
        [f"choice {number}" for number in range(500)],
        ["a", "ab", "abc", "abcd"],
        ['quo"te', "back\\slash", "new\nline"],
    )
    found += [(f"enum {number}", {"enum": values}) for number, values in enumerate(enums)]
    found += [("enum of a type", {"type": "integer", "enum": [1, "a", 2]}), ("anything", {}), ("true", True)]
    return found


def strings() -> Named:
    bounds = ((0, 0), (0, 1), (1, 1), (3, 5), (10, 12), (0, 100), (40, 60))
    found: Named = [
        (f"length {low} to {high}", {"type": "string", "minLength": low, "maxLength": high}) for low, high in bounds
    ]
    found += [("at least", {"type": "string", "minLength": 5}), ("at most", {"type": "string", "maxLength": 7})]
    patterns = (
        "^[a-z]+$", "^[A-Z][a-z]{2,8}$", "^\\d{3}-\\d{4}$", "^(foo|bar)+$", "^a?b*c+$", "x", "^pre", "post$",
        "^[^aeiou]{3}$", "^\\w+@\\w+\\.com$", "^[0-9a-f]{8}$", "^(\\+\\d{1,3} )?\\d{6,10}$", "^$", "^[à-ü]{1,4}$",
        "^[\\u4e00-\\u4fff]{2,3}$", "^[\"\\\\/]{2}$", "^.{4}$", "^[ -~]{0,9}$", "^(a|b|ab){2,4}$",
        "^v\\d+\\.\\d+\\.\\d+$",
        "^#[0-9A-F]{6}$", "^[A-Z]{2}\\d{2}[A-Z0-9]{4}$", "^(yes|no|maybe)$", "^\\s{1,3}$",
        "^(?:[01]\\d|2[0-3]):[0-5]\\d$",
    )  # fmt: skip
    found += [(f"pattern {pattern}", {"type": "string", "pattern": pattern}) for pattern in patterns]
    formats = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
    found += [(f"format {name}", {"type": "string", "format": name}) for name in formats]
    found += [
        ("pattern and length", {"type": "string", "pattern": "^[a-z]*$", "minLength": 3, "maxLength": 6}),
        ("format of no string", {"type": "integer", "format": "date"}),
        ("length of anything", {"minLength": 2, "type": ["string", "integer"]}),
    ]
    return found


def numbers() -> Named:
    bounds: list[dict[str, Any]] = [
        {"minimum": 0}, {"maximum": 0}, {"minimum": -5, "maximum": 5}, {"minimum": 10, "maximum": 20},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 3}, {"minimum": 99, "maximum": 101}, {"minimum": 7, "maximum": 7},
        {"minimum": -1000000, "maximum": 1000000}, {"minimum": -20, "maximum": -10}, {"exclusiveMinimum": 9},
        {"exclusiveMaximum": -9}, {"minimum": 123456789, "maximum": 987654321}, {"minimum": -3, "exclusiveMaximum": 1},
        {"minimum": 0, "exclusiveMinimum": 2, "maximum": 10},
    ]  # fmt: skip
    found: Named = [(f"integer {bound}", {"type": "integer", **bound}) for bound in bounds]
    found += [(f"number {bound}", {"type": "number", **bound}) for bound in bounds]
    decimals: list[dict[str, Any]] = [
        {"minimum": 0.5, "maximum": 1.5}, {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"minimum": -1.25, "maximum": 2.75}, {"minimum": 1e-7, "maximum": 2e-7}, {"minimum": 0.1, "maximum": 0.1},
        {"minimum": 3.14, "exclusiveMaximum": 3.15}, {"maximum": -0.001}, {"minimum": 1000.001, "maximum": 1000.002},
    ]  # fmt: skip
    found += [(f"number {bound}", {"type": "number", **bound}) for bound in decimals]
    found += [(f"integer {bound}", {"type": "integer", **bound}) for bound in ({"minimum": 0.5, "maximum": 3.5},)]
    found += [
        (f"integer, multiple of {step}", {"type": "integer", "multipleOf": step}) for step in (1, 2, 3, 7, 10, 64)
    ]
    found += [(f"number, multiple of {step}", {"type": "number", "multipleOf": step}) for step in (0.5, 0.25, 5)]
    found += [
        ("multiples between", {"type": "integer", "multipleOf": 3, "minimum": 10, "maximum": 20}),
        ("integer or null", {"type": ["integer", "null"], "minimum": 1, "maximum": 9}),
    ]
    return found


def arrays() -> Named:
    items: list[Schema] = [
        {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}, {"enum": ["a", "b"]}, {"type": "null"},
        closed({"x": {"type": "integer", "minimum": 0, "maximum": 99}}),
    ]  # fmt: skip
    sizes = ({}, {"minItems": 2}, {"maxItems": 3}, {"minItems": 2, "maxItems": 4}, {"minItems": 3, "maxItems": 3})
    found: Named = [
        (f"array {number} {size}", {"type": "array", "items": item, **size})
        for (number, item), size in product(enumerate(items), sizes)
    ]
    pair = [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "string", "maxLength": 4}]
    found += [
        ("tuple", {"type": "array", "prefixItems": pair, "items": False, "minItems": 2}),
        ("tuple and more", {"type": "array", "prefixItems": pair, "items": {"type": "boolean"}, "maxItems": 4}),
        ("short tuple", {"type": "array", "prefixItems": pair, "items": False}),
        ("long tuple", {"type": "array", "prefixItems": pair, "items": {"const": 0}, "minItems": 4, "maxItems": 5}),
        ("empty array", {"type": "array", "maxItems": 0}),
        ("no items", {"type": "array", "items": False}),
        ("any items", {"type": "array", "items": True, "maxItems": 2}),
        (
            "matrix",
            {
                "type": "array",
                "items": {"type": "array", "items": items[0], "minItems": 2, "maxItems": 2},
                "minItems": 2,
                "maxItems": 2,
            },
        ),
    ]
    return found


def objects() -> Named:
    digit, word = {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "pattern": "^[a-z]{1,5}$"}
    odd_names = ["", " ", "a b", 'a"b', "a\\b", "é", "日本", "💡", "a\nb", "$ref", "type", "properties", "0", "x" * 60]
    found: Named = [(f"property {name!a}", closed({name: digit})) for name in odd_names]
    found += [
        ("open", {"type": "object", "properties": {"a": digit}, "required": ["a"]}),
        ("closed, optional", closed({"a": digit, "b": word, "c": digit}, required=[])),
        ("closed, some required", closed({"a": digit, "b": word, "c": digit}, required=["b"])),
        ("required, unlisted", {"type": "object", "required": ["a"], "additionalProperties": digit}),
        ("map", {"type": "object", "additionalProperties": digit, "maxProperties": 3}),
        ("map of maps", {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": digit}}),
        ("no properties", {"type": "object", "additionalProperties": False}),
        ("at least", {"type": "object", "additionalProperties": digit, "minProperties": 2, "maxProperties": 3}),
        (
            "required and more",
            {
                "type": "object",
                "properties": {"a": digit},
                "required": ["a"],
                "minProperties": 2,
                "maxProperties": 3,
                "additionalProperties": digit,
            },
        ),
        (
            "patterns",
            {"type": "object", "patternProperties": {"^n_": digit, "^w_": word}, "additionalProperties": False},
        ),
        (
            "patterns beside",
            {
                "type": "object",
                "properties": {"id": digit},
                "required": ["id"],
                "patternProperties": {"^x-": word},
                "additionalProperties": False,
            },
        ),
        ("a hundred", closed({f"p{number}": digit for number in range(100)})),
        ("a hundred, optional", closed({f"p{number}": digit for number in range(100)}, required=["p50"])),
        (
            "never this one",
            {
                "type": "object",
                "properties": {"a": digit, "b": False},
                "required": ["a"],
                "additionalProperties": False,
            },
        ),
        ("order", closed({"z": digit, "a": digit, "m": digit}, required=["a", "z", "m"])),
        ("any values", closed({"a": {}, "b": True}, required=[])),
    ]
    return found


def combined() -> Named:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    cat, dog = closed({"kind": {"const": "cat"}, "lives": digit}), closed({"kind": {"const": "dog"}, "tricks": digit})
    tree = closed({"value": digit, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}})
    chain = closed({"value": digit, "next": {"anyOf": [{"$ref": "#/$defs/chain"}, {"type": "null"}]}})
    expression = {"anyOf": [digit, closed({"op": {"enum": ["+", "*"]}, "left": {"$ref": "#"}, "right": {"$ref": "#"}})]}
    even = closed({"odd": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/odd"}]}})
    odd = closed({"even": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/even"}]}})
    return [
        ("anyOf", {"anyOf": [digit, {"type": "boolean"}]}),
        ("anyOf of objects", {"anyOf": [cat, dog]}),
        ("oneOf by constant", {"oneOf": [cat, dog]}),
        ("oneOf by type", {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "null"}, {"type": "array"}]}),
        ("allOf", {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 6}]}),
        (
            "allOf of objects",
            {
                "allOf": [
                    {"type": "object", "properties": {"a": digit}, "required": ["a"]},
                    {"type": "object", "properties": {"b": digit}, "required": ["b"]},
                ]
            },
        ),
        (
            "anyOf beside properties",
            {
                "type": "object",
                "properties": {"a": digit},
                "required": ["a"],
                "anyOf": [{"properties": {"b": digit}, "required": ["b"]}, {"required": ["a"]}],
            },
        ),
        ("nested anyOf", {"anyOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"anyOf": [{"const": 3}]}]}),
        ("ref", {"$defs": {"d": digit}, "$ref": "#/$defs/d"}),
        (
            "definitions",
            {"definitions": {"d": digit}, "type": "array", "items": {"$ref": "#/definitions/d"}, "maxItems": 3},
        ),
        ("ref with brothers", {"$defs": {"d": {"type": "integer"}}, "$ref": "#/$defs/d", "minimum": 5, "maximum": 8}),
        ("ref to ref", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": digit}, **closed({"x": {"$ref": "#/$defs/a"}})}),
        ("ref with escapes", {"$defs": {"a/b~c": digit}, "$ref": "#/$defs/a~1b~0c"}),
        ("ref into properties", closed({"a": digit, "b": {"$ref": "#/properties/a"}})),
        ("$id", {"$id": "https://example.com/s", "$defs": {"d": digit}, **closed({"x": {"$ref": "#/$defs/d"}})}),
        ("tree", {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"}),
        ("chain", {"$defs": {"chain": chain}, "$ref": "#/$defs/chain"}),
        ("itself", expression),
        ("each other", {"$defs": {"even": even, "odd": odd}, "$ref": "#/$defs/even"}),
        ("nullable object", {"type": ["object", "null"], "properties": {"a": digit}, "additionalProperties": False}),
    ]


def annotated() -> Named:
    notes: dict[str, Any] = {
        "title": "T", "description": "D", "default": 1, "examples": [1, 2], "deprecated": True, "readOnly": True,
        "writeOnly": False, "$comment": "C", "$schema": "https://json-schema.org/draft/2020-12/schema",
        "contentEncoding": "base64", "contentMediaType": "text/plain", "x-own": {"any": ["thing"]}, "nullable": False,
    }  # fmt: skip
    number = {"type": "integer", "minimum": 1, "maximum": 5}
    return [(f"with {name}", {**number, name: value}) for name, value in notes.items()] + [("notes", number | notes)]


def from_life() -> Named:
    """Schemas as users of structured outputs write them."""
    text, digit = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 99}
    address = closed({"street": text, "city": text, "zip": {"type": "string", "pattern": "^\\d{5}$"}})
    person = closed(
        {
            "name": text,
            "age": digit,
            "email": {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.org$"},
            "address": {"$ref": "#/$defs/address"},
        }
    )
    step = closed({"explanation": text, "output": text})
    component = closed(
        {
            "type": {"enum": ["div", "button", "section"]},
            "label": text,
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        }
    )
    return [
        ("weather call", closed({"city": text, "unit": {"enum": ["celsius", "fahrenheit"]}}, required=["city"])),
        ("person", {"$defs": {"address": address}, **person}),
        (
            "math steps",
            closed({"steps": {"type": "array", "items": step, "minItems": 1, "maxItems": 2}, "answer": text}),
        ),
        ("user interface", component),
        (
            "moderation",
            closed(
                {
                    "violates": {"type": "boolean"},
                    "category": {"type": ["string", "null"], "enum": ["violence", "hate", None]},
                }
            ),
        ),
        (
            "tool choice",
            {
                "anyOf": [
                    closed({"name": {"const": "search"}, "arguments": closed({"query": text})}),
                    closed({"name": {"const": "add"}, "arguments": closed({"a": digit, "b": digit})}),
                ]
            },
        ),
        *records(),
    ]


def records() -> Named:
    text, digit = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 99}
    return [
        (
            "calendar",
            closed(
                {
                    "title": text,
                    "date": {"type": "string", "format": "date"},
                    "participants": {"type": "array", "items": text, "maxItems": 3},
                }
            ),
        ),
        (
            "table",
            closed(
                {
                    "columns": {"type": "array", "items": text, "minItems": 1, "maxItems": 3},
                    "rows": {"type": "array", "items": {"type": "array", "items": digit, "maxItems": 3}, "maxItems": 2},
                }
            ),
        ),
        (
            "invoice",
            closed(
                {
                    "number": {"type": "string", "pattern": "^INV-\\d{4}$"},
                    "total": {"type": "number", "minimum": 0, "maximum": 1000},
                    "paid": {"type": "boolean"},
                    "lines": {
                        "type": "array",
                        "items": closed({"sku": text, "quantity": digit}),
                        "minItems": 1,
                        "maxItems": 2,
                    },
                }
            ),
        ),
    ]


def nasty() -> Named:
    deep: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
    for level in range(14):
        deep = closed({f"l{level}": deep})
    nested: Schema = {"const": 0}
    for _ in range(20):
        nested = {"type": "array", "items": nested, "maxItems": 1}
    wide = {"anyOf": [closed({f"option_{number}": {"const": number}}) for number in range(60)]}
    return [
        ("deep objects", deep),
        ("deep arrays", nested),
        ("many options", wide),
        ("two thousand words", {"enum": [f"word{number:04d}" for number in range(2000)]}),
        ("common beginnings", {"enum": ["a" * length for length in range(1, 40)]}),
        ("huge bounds", {"type": "array", "items": {"const": 1}, "maxItems": 10**9}),
        ("huge length", {"type": "string", "maxLength": 10**9}),
        ("pattern of many", {"type": "string", "pattern": "^[a-z]{0,1000}$"}),
        ("ambiguous pattern", {"type": "string", "pattern": "^(a|aa|aaa)*b$"}),
        ("doubled pattern", {"type": "string", "pattern": "^((a+)+)+$"}),
        ("same names", closed({"a": {"const": 1}, "aa": {"const": 2}, "aaa": {"const": 3}}, required=["aa"])),
        ("overlapping anyOf", {"anyOf": [{"type": "integer"}, {"type": "number"}, {"const": 1}]}),
        ("keyword as a name", closed({"$ref": {"const": "#"}, "required": {"const": True}})),
        ("long constant", {"const": "lorem ipsum " * 20}),
        ("letters of all kinds", {"type": "string", "pattern": "^[a-zß-ÿ]{1,6}$"}),
    ]
