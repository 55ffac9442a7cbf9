"""The corpus: schemas by name that are served, and others, each with the word that its refusal must hold."""

import string
from random import Random
from typing import Any

from troupellm.tests.support.guides.guide_schemas import (
    Named,
    Schema,
    annotated,
    arrays,
    closed,
    combined,
    from_life,
    nasty,
    numbers,
    objects,
    scalars,
    strings,
)
from troupellm.tests.support.guides.idle_schemas import exclusive_ones, from_makers, idle

NUM_GENERATED = 120


def corpus() -> Named:
    found = scalars() + strings() + numbers() + arrays() + objects() + combined() + annotated() + from_life() + nasty()
    return found + [(f"generated {seed}", generated(Random(seed))) for seed in range(NUM_GENERATED)]


def idle_corpus() -> Named:
    """Schemas with keywords that constrain nothing, or that say in another way what is supported."""
    return idle() + exclusive_ones() + from_makers()


def generated(random: Random) -> Schema:
    """A schema as people write them: an object with a few things in it."""
    return _object(random, 3)


def _any(random: Random, depth: int) -> Schema:
    makers = [_string, _number, _choice, _boolean]
    if depth:
        makers += [_object, _array, _either]
    return random.choice(makers)(random, depth)


def _object(random: Random, depth: int) -> Schema:
    names = {_name(random): _any(random, depth - 1) for _ in range(random.randint(1, 4))}
    required = [name for name in names if random.random() < 0.7]
    if random.random() < 0.2:
        return {"type": "object", "properties": names, "required": required}
    return closed(names, required=required)


def _array(random: Random, depth: int) -> Schema:
    least = random.randint(0, 2)
    return {"type": "array", "items": _any(random, depth - 1), "minItems": least, "maxItems": least + 2}


def _either(random: Random, depth: int) -> Schema:
    return {"anyOf": [_any(random, depth - 1) for _ in range(random.randint(1, 3))]}


def _string(random: Random, depth: int) -> Schema:
    least = random.randint(0, 4)
    return random.choice(
        (
            {"type": "string", "minLength": least, "maxLength": least + random.randint(0, 8)},
            {"type": "string", "pattern": random.choice(("^[a-z]{1,6}$", "^\\d{2,4}$", "^(x|yz)+$", "^[A-Z]"))},
            {"type": "string", "format": random.choice(("date", "ipv4", "uuid"))},
            {"type": ["string", "null"], "maxLength": 5},
        )
    )


def _number(random: Random, depth: int) -> Schema:
    low = random.randint(-1000, 1000)
    return random.choice(
        (
            {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 500)},
            {"type": "number", "minimum": low / 8, "exclusiveMaximum": low / 8 + random.randint(1, 50)},
            {"type": "integer", "multipleOf": random.randint(1, 12), "minimum": 0},
        )
    )


def _choice(random: Random, depth: int) -> Schema:
    values: list[Any] = [_name(random) for _ in range(random.randint(1, 6))]
    if random.random() < 0.3:
        values += [random.randint(-9, 9), None]
    return {"enum": values}


def _boolean(random: Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _name(random: Random) -> str:
    letters = string.ascii_lowercase + "_é日-. " if random.random() < 0.2 else string.ascii_lowercase + "_"
    return "".join(random.choice(letters) for _ in range(random.randint(1, 10)))


INTEGER = {"type": "integer"}
REFUSED: list[tuple[str, Any]] = [
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("contains", {"type": "array", "contains": INTEGER}),
    ("minContains", {"type": "array", "contains": INTEGER, "minContains": 2}),
    ("maxContains", {"type": "array", "contains": INTEGER, "maxContains": 2}),
    ("not", {"not": INTEGER}),
    ("if", {"if": INTEGER, "then": {"minimum": 1}}),
    ("then", {"if": INTEGER, "then": {"minimum": 1}, "else": {}}),
    ("else", {"if": INTEGER, "else": {"type": "string"}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": INTEGER}}),
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"if": ["b"]}}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
    ("propertyNames", {"type": "object", "propertyNames": {"type": "string", "maxLength": 3}}),
    ("propertyNames", {"type": "object", "propertyNames": {"type": "number"}}),
    ("propertyNames", {"type": "object", "propertyNames": {"format": "uuid"}}),
    ("propertyNames", {"type": "object", "propertyNames": False}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ("$dynamicRef", {"$dynamicRef": "#x"}),
    ("$recursiveRef", {"$recursiveRef": "#"}),
    ("uniqueItems", {"type": ["string", "array"], "uniqueItems": True}),
    ("not", {"type": "object", "not": {"required": ["a"]}}),
    ("oneOf", {"oneOf": [INTEGER, {"type": "number"}]}),
    ("oneOf", {"$defs": {"a": INTEGER}, "oneOf": [{"$ref": "#/$defs/a"}, {"type": "number"}]}),
    ("look-around", {"type": "string", "pattern": "^(?!\\.)b|c"}),
    ("minProperties", {"type": "object", "properties": {"a": INTEGER}, "minProperties": 1}),
    ("maxProperties", {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "maxProperties": 1}),
    ("look-around", {"type": "string", "pattern": "(?=a)b"}),
    ("look-around", {"type": "string", "pattern": "(?<!a)b"}),
    ("pattern", {"type": "string", "pattern": "(a)\\1"}),
    ("pattern", {"type": "string", "pattern": "["}),
    ("uniqueItems", closed({"deep": {"type": "array", "items": {"type": "array", "uniqueItems": True}}})),
    ("not", {"$defs": {"a": {"not": {"type": "null"}}}, "$ref": "#/$defs/a"}),
    ("example.com", {"$ref": "https://example.com/schema.json"}),
    ("$ref", {"$ref": "#/$defs/missing"}),
    ("fit", {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ("fit", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ("Unsatisfiable", False),
    ("Unsatisfiable", {"enum": []}),
    ("Unsatisfiable", {"type": "integer", "minimum": 5, "maximum": 3}),
    ("Unsatisfiable", {"type": "string", "minLength": 5, "maxLength": 3}),
    ("Unsatisfiable", {"type": "array", "minItems": 5, "maxItems": 3}),
    ("Unsatisfiable", closed({"a": False})),
    ("Unsatisfiable", {"type": "object", "required": ["a"], "additionalProperties": False}),
    ("Unsatisfiable", {"type": "integer", "const": "a"}),
    ("Unsatisfiable", {"allOf": [{"type": "integer"}, {"type": "string"}]}),
    ("type", {"type": "float"}),
    ("type", {"type": 5}),
    ("minimum", {"type": "integer", "minimum": "5"}),
    ("properties", {"type": "object", "properties": []}),
    ("required", {"type": "object", "required": "a"}),
    ("items", {"type": "array", "items": 5}),
    ("enum", {"enum": "abc"}),
    ("anyOf", {"anyOf": {}}),
    ("anyOf", {"anyOf": []}),
    ("minLength", {"type": "string", "minLength": -1}),
    ("multipleOf", {"type": "integer", "multipleOf": 0}),
    ("integer", {"type": "integer", "minimum": 1e20}),
    ("object", [1]),
    ("object", "x"),
]
"""The word that the refusal holds: the keyword, or what else is wrong."""
