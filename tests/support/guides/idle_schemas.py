"""Schemas with keywords that constrain nothing, and schemas as their makers write them."""

from typing import Any

from troupellm.tests.support.guides.guide_schemas import Named, Schema, closed

DIGIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
WORD: dict[str, Any] = {"type": "string", "pattern": "^[a-z]{1,5}$"}
LIST: dict[str, Any] = {"type": "array", "items": DIGIT, "maxItems": 3}
MAP: dict[str, Any] = {"type": "object", "additionalProperties": DIGIT, "maxProperties": 3}
ONLY_CAT, ONLY_DOG = ({"kind": {"const": kind}, "age": DIGIT} for kind in ("cat", "dog"))


def idle() -> Named:
    pair = {"a": DIGIT, "b": DIGIT}
    tuple_ = {"type": "array", "prefixItems": [DIGIT, WORD], "items": False, "minItems": 2}
    return [
        ("uniqueItems false", LIST | {"uniqueItems": False}),
        ("minItems 0", LIST | {"minItems": 0}),
        ("minContains alone", LIST | {"minContains": 2}),
        ("maxContains alone", LIST | {"maxContains": 1}),
        ("unevaluatedItems beside items", LIST | {"unevaluatedItems": False}),
        ("unevaluatedItems true", LIST | {"unevaluatedItems": True}),
        ("additionalItems without a list", tuple_ | {"additionalItems": {"type": "null"}}),
        ("minProperties 0", MAP | {"minProperties": 0}),
        ("as few properties as are required", closed(pair, required=["a"], minProperties=1)),
        ("as many properties as are listed", closed(pair, required=[], maxProperties=2)),
        ("unevaluatedProperties beside others", closed(pair, unevaluatedProperties=False)),
        ("names are strings", MAP | {"propertyNames": {"type": "string"}}),
        ("names are anything", MAP | {"propertyNames": True}),
        ("names are annotated", MAP | {"propertyNames": {"type": ["null", "string"], "minLength": 0, "title": "N"}}),
        ("dependentRequired of nothing", closed(pair, dependentRequired={"a": []})),
        ("dependentRequired of what is required", closed(pair, dependentRequired={"a": ["b"], "c": ["a"]})),
        ("dependentSchemas of anything", closed(pair, dependentSchemas={"a": True, "b": {"title": "B"}})),
        ("dependencies of both kinds", closed(pair, dependencies={"a": ["b"], "b": {}})),
        ("if alone", DIGIT | {"if": {"minimum": 3}}),
        ("then alone", DIGIT | {"then": {"minimum": 3}}),
        ("else alone", DIGIT | {"else": {"minimum": 3}}),
        ("if with nothing behind it", DIGIT | {"if": {"minimum": 3}, "then": {"title": "large"}, "else": True}),
        ("not false", DIGIT | {"not": False}),
        ("for other types", DIGIT | {"uniqueItems": True, "contains": DIGIT, "propertyNames": {"pattern": "^a"}}),
        ("for other types, too", WORD | {"dependentRequired": {"a": ["b"]}, "unevaluatedItems": False}),
        ("$dynamicAnchor", {"$dynamicAnchor": "here", **DIGIT}),
        ("within definitions", {"$defs": {"d": LIST | {"uniqueItems": False}}, "$ref": "#/$defs/d"}),
        ("within alternatives", {"anyOf": [LIST | {"uniqueItems": False}, MAP | {"propertyNames": {}}]}),
        ("names like keywords", closed(dict.fromkeys(("format", "if", "then", "not", "propertyNames"), DIGIT))),
        ("constants that look like schemas", {"const": {"uniqueItems": False, "if": 1, "format": "x"}}),
        ("choices that look like schemas", {"enum": [{"then": 1}, {"minContains": 0, "type": "string"}]}),
        *((f"string of {name}", {"type": "string", "maxLength": 6, "format": name}) for name in UNKNOWN_FORMATS),
        *((f"number of {name}", DIGIT | {"format": name}) for name in ("int32", "int64", "double", "float")),
    ]


UNKNOWN_FORMATS = ("password", "binary", "byte", "int32", "multi-host-uri", "no such thing", "unknown")


def exclusive_ones() -> Named:
    """`oneOf` schemas that exclude each other."""
    cat, dog = closed(ONLY_CAT), closed(ONLY_DOG)
    pets: dict[str, Schema] = {"cat": cat, "dog": dog, "old": {"$ref": "#/$defs/dog"}}
    node = closed({"value": DIGIT, "next": {"oneOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
    return [
        ("oneOf by a constant, referred to", {"$defs": pets, "oneOf": [refer("cat"), refer("old")]}),
        ("oneOf, one of them null", {"$defs": pets, "oneOf": [refer("cat"), {"type": "null"}]}),
        (
            "oneOf by what is required",
            {"$defs": {"a": closed({"a": DIGIT}), "b": closed({"b": DIGIT})}, "oneOf": [refer("a"), refer("b")]},
        ),
        ("oneOf in itself", {"$defs": {"node": node}, "$ref": "#/$defs/node"}),
    ]


def refer(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def from_makers() -> Named:
    """As pydantic and zod write them, and the makers of OpenAPI documents."""
    pets = {"Cat": closed(ONLY_CAT, title="Cat"), "Dog": closed(ONLY_DOG, title="Dog")}
    discriminator = {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"}
    order = {
        "id": {"format": "uuid", "title": "Id", "type": "string"},
        "at": {"format": "date-time", "title": "At", "type": "string"},
        "secret": {"format": "password", "title": "Secret", "type": "string", "writeOnly": True, "maxLength": 6},
        "status": {"$ref": "#/$defs/Status", "default": "open"},
        "note": {"anyOf": [{"maxLength": 5, "type": "string"}, {"type": "null"}], "default": None, "title": "Note"},
        "pet": {"discriminator": discriminator, "oneOf": [refer("Cat"), refer("Dog")], "title": "Pet"},
        "price": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 9}, {"type": "string", "pattern": DECIMAL}]},
    }
    status = {"enum": ["open", "closed"], "title": "Status", "type": "string"}
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": DIGIT}
    count = {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
    owner = closed({"name": WORD, "tags": LIST | {"uniqueItems": False}})
    return [
        (
            "pydantic",
            closed(order, required=["id", "at", "pet", "price"], title="Order") | {"$defs": {"Status": status, **pets}},
        ),
        ("zod", {"$schema": "http://json-schema.org/draft-07/schema#", **closed({"count": count, "scores": record})}),
        (
            "OpenAPI",
            closed(
                {
                    "id": DIGIT | {"format": "int64", "example": 3},
                    "file": {"type": "string", "format": "binary", "maxLength": 4, "nullable": False},
                    "owner": {"$ref": "#/components/schemas/Owner", "deprecated": True},
                }
            )
            | {"components": {"schemas": {"Owner": owner}}},
        ),
    ]


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""The pattern that pydantic writes for decimals."""
