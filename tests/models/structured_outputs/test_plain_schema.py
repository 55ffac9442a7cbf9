"""Schemas lose what constrains nothing, and nothing else."""

import json
import re
from itertools import product

import jsonschema
import pytest

from troupellm.models.structured_outputs.backend import GuideError
from troupellm.models.structured_outputs.backends import check_start, mask_words, program_text
from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.models.structured_outputs.schema_disjoint import MOST_OPTIONS
from troupellm.models.structured_outputs.schema_normalise import ENFORCED_FORMATS, plain_schema
from troupellm.models.structured_outputs.schema_regex import without_look_ahead
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.params.guide import GuideSpec
from troupellm.tests.support.guides.guide_corpus import REFUSED, corpus, idle_corpus
from troupellm.tests.support.guides.idle_schemas import DECIMAL, DIGIT, refer
from troupellm_xgrammar.backend import xgrammar_text

SCALARS = [None, True, 0, 1, 3, 9, 10, -1, 2.5, "", "a", "abc", "abcdef", "ABCDEF", "2024-02-29", "#", "."]
LISTS = [[], [0], [1, 1], [1, 2, 3], [1, 2, 3, 4], [5, "abc"], ["abc"], [5, "abc", 1], [[1, 1]], [True]]
OBJECTS = [
    {}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, {"a": "x"}, {"x": 1, "y": 2, "z": 3, "w": 4},
    {"kind": "cat", "age": 1}, {"kind": "dog", "age": 1}, {"kind": "cow", "age": 1}, {"kind": "cat"},
    {"uniqueItems": False, "if": 1, "format": "x"}, {"then": 1}, {"minContains": 0, "type": "string"},
    {"format": 1, "if": 1, "then": 1, "not": 1, "propertyNames": 1}, {"value": 1, "next": None},
    {"value": 1, "next": {"value": 2, "next": None}}, {"value": 1, "next": {"value": 2}},
]  # fmt: skip
VALUES = [*SCALARS, *LISTS, *OBJECTS]


def fits(schema) -> list[bool]:
    judge = jsonschema.Draft202012Validator(schema)
    return [judge.is_valid(value) for value in VALUES]


@pytest.mark.parametrize(("name", "schema"), idle_corpus() + corpus()[::5])
def test_the_same_values_fit(name, schema):
    assert fits(plain_schema(schema)) == fits(schema)


IDLE_OF_DIGIT = [
    {"format": "int32"}, {"deprecated": True}, {"nullable": True}, {"uniqueItems": True}, {"minProperties": 3},
    {"required": ["a"]}, {"not": False}, {"if": {"minimum": 2}}, {"then": {"minimum": 2}}, {"exclusiveMinimum": False},
    {"$schema": "https://example.com/schema"}, {"$recursiveAnchor": True}, {"dependencies": {"a": ["b"]}},
]  # fmt: skip


@pytest.mark.parametrize("more", IDLE_OF_DIGIT)
def test_what_constrains_nothing_goes_wherever_a_schema_may_stand(more):
    written = DIGIT | more
    assert plain_schema(written) == DIGIT
    for around in (
        lambda part: {"properties": {"format": part}, "required": ["format"]},
        lambda part: {"type": "array", "items": part},
        lambda part: {"prefixItems": [part, part]},
        lambda part: {"anyOf": [part, {"type": "null"}]},
        lambda part: {"additionalProperties": part},
        lambda part: {"$defs": {"if": part}, "$ref": "#/$defs/if"},
        lambda part: {"components": {"schemas": {"A": part}}, "$ref": "#/components/schemas/A"},
    ):
        assert plain_schema(around(around(written))) == around(around(DIGIT))


@pytest.mark.parametrize("keyword", ["const", "enum", "default", "examples"])
def test_values_are_not_taken_for_schemas(keyword):
    value = DIGIT | {"format": "int32", "uniqueItems": False, "if": {}, "dependentRequired": {}}
    schema = {keyword: [value] if keyword in ("enum", "examples") else value}
    assert plain_schema(schema) == schema


KEPT = [
    {"uniqueItems": True},
    {"minProperties": 1},
    {"maxProperties": 1, "properties": {"a": {}, "b": {}}},
    {"maxProperties": 1, "properties": {"a": {}}},
    {"contains": {}},
    {"contains": {"const": 1}, "minContains": 0},
    {"propertyNames": {"minLength": 1}},
    {"propertyNames": {"type": "str"}},
    {"propertyNames": {"enum": ["a"]}},
    {"not": {"type": "null"}},
    {"if": {"const": 1}, "then": False},
    {"if": {"const": 1}, "else": {"const": 2}},
    {"dependentRequired": {"if": ["b"]}},
    {"dependentRequired": {"a": ["b", "c"]}, "required": ["b"]},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"dependencies": {"a": ["b"]}},
    {"unevaluatedItems": False},
    {"unevaluatedProperties": False, "properties": {"a": {}}},
    {"items": [{}], "additionalItems": False},
    {"patternProperties": {"a": False}},
    {"minItems": 1},
    {"minLength": 1},
    {"type": "str", "uniqueItems": True},
    {"type": ["array", "null"], "uniqueItems": True},
    {"$dynamicRef": "#x"},
    {"minItems": "0"},
    {"format": 5},
    {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "x", "$anchor": "y", "$defs": {}},
    *({"type": "string", "format": name} for name in sorted(ENFORCED_FORMATS)),
]


@pytest.mark.parametrize("nothing", [{}, True, {"description": "never"}])
def test_a_schema_that_denies_everything_is_false(nothing):
    assert plain_schema({"type": "string", "not": nothing}) is False
    around = {"properties": {"a": {"not": nothing}, "b": {}}, "additionalProperties": {"not": nothing}}
    assert plain_schema(around) == {"properties": {"a": False, "b": {}}, "additionalProperties": False}
    assert fits(plain_schema(around)) == fits(around)


@pytest.mark.parametrize("most", [0, 1])
def test_items_of_short_lists_are_unique_anyway(most):
    schema = {"type": "array", "uniqueItems": True, "maxItems": most}
    assert plain_schema(schema) == {"type": "array", "maxItems": most}
    assert fits(plain_schema(schema)) == fits(schema)


@pytest.mark.parametrize("schema", KEPT)
def test_keywords_that_may_constrain_stay_in_the_schema(schema):
    assert plain_schema(schema) == schema


@pytest.mark.parametrize("schema", [schema for _, schema in REFUSED if not isinstance(schema, dict)])
def test_what_is_no_object_stays(schema):
    assert plain_schema(schema) is schema


def test_an_anchor_stays_one():
    schema = {"$defs": {"a": {"$dynamicAnchor": "here", **DIGIT}}, "$ref": "#here"}
    assert plain_schema(schema)["$defs"]["a"] == {**DIGIT, "$anchor": "here"}
    assert fits(plain_schema(schema)) == fits(schema)


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}}


@pytest.mark.parametrize(
    "options",
    [
        [CAT, DOG],
        [CAT, DOG, {"type": ["null", "integer"]}, {"const": "cat"}],
        [{"const": 1}, {"enum": [2, "1"]}, {"const": True}],
        [CAT, {"type": "object", "additionalProperties": False}],
        [CAT, {"properties": {"kind": {"const": "dog"}}}],
        [refer("cat"), refer("also dog")],
        [False, {}],
    ],
)
def test_schemas_that_exclude_each_other_need_no_one_of(options):
    made = plain_schema({"$defs": {"cat": CAT, "dog": DOG, "also dog": refer("dog")}, "oneOf": options})
    assert made["anyOf"] == options
    assert "oneOf" not in made


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"const": 1.0}],
        [{"const": [1]}, {"const": [2]}],
        [{"const": 10**400}, {"const": 1}],
        [{"properties": {"kind": {"const": "cat"}}, "required": ["kind"]}, {"properties": {"kind": {"const": "dog"}}}],
        [CAT | {"required": []}, DOG],
        [CAT, {"type": "object", "patternProperties": {"k": {}}, "additionalProperties": False}],
        [refer("cat"), refer("missing")],
        [refer("cat"), {"$ref": "#anchor"}],
        [refer("loop"), {"type": "null"}],
        [{"const": number} for number in range(MOST_OPTIONS + 1)],
    ],
)
def test_what_may_overlap_stays_one_of(options):
    schema = {"$defs": {"cat": CAT, "loop": refer("loop")}, "oneOf": options}
    assert plain_schema(schema) == schema


@pytest.mark.parametrize(
    "more", [{"$defs": {"a": {"$id": "b"}}}, {"properties": {"x": {"$ref": "#/oneOf/0"}}}, {"anyOf": [CAT, DOG]}]
)
def test_one_of_stays_where_references_or_another_keyword_need_it(more):
    schema = {"oneOf": [CAT, DOG], **more}
    assert plain_schema(schema) == schema


@pytest.mark.parametrize("pattern", [DECIMAL, r"^(?!\.)(?!.*\.\.)([a-z.]*)[a-z]@b$", r"^(?!\.)[a.]*$"])
def test_look_aheads_become_patterns_that_say_the_same(pattern):
    made = without_look_ahead({"pattern": pattern, "allOf": [{"minLength": 0}]})
    assert made["allOf"][0] == {"minLength": 0}
    patterns = [made["pattern"], *(part["pattern"] for part in made["allOf"][1:])]
    assert not any("(?!" in one for one in patterns)
    texts = ["".join(letters) for length in range(5) for letters in product("a.-1b@", repeat=length)]
    texts += [text + "@b" for text in texts]
    for text in texts:
        assert all(re.search(one, text) for one in patterns) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize("pattern", [r"^(?!\.)a|b", r"^(?!a)b", r"(?!\.)a", r"^(?!\.)(?=a)a", "^a$"])
def test_a_pattern_without_look_ahead_stays_as_it_is(pattern):
    assert without_look_ahead({"pattern": pattern}) == {"pattern": pattern}


NOT_ENFORCED = ("regex", "iri", "uri-reference", "uri-template", "json-pointer", "idn-email", "no such thing")


@pytest.mark.parametrize("name", NOT_ENFORCED)
def test_formats_that_are_not_enforced_constrain_nothing(library: GuideLibrary, tokenizer: Tokenizer, name):
    spec = GuideSpec(kind="json_schema", source=json.dumps({"type": "string", "format": name}))
    backend = library.backend("llguidance")
    check_start(backend, backend.compile(program_text(spec, "llguidance", 64, {})), mask_words(tokenizer, 2048))
    assert json.loads(xgrammar_text(spec, 64))["schema"] == '{"type": "string"}'


def test_a_structural_tag_loses_it_too(library: GuideLibrary, tokenizer: Tokenizer):
    schema = {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": DIGIT | {"format": "int32"},
    }
    tag = {
        "format": {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "<"}
    }
    spec = GuideSpec(kind="structural_tag", source=json.dumps(tag))
    backend = library.backend("llguidance")
    check_start(backend, backend.compile(program_text(spec, "llguidance", 64, {})), mask_words(tokenizer, 2048))
    made = json.loads(json.loads(xgrammar_text(spec, 64))["structural_tag"])
    assert made["format"]["content"]["json_schema"] == {"type": "object", "additionalProperties": DIGIT}


@pytest.mark.parametrize("schema", [{"type": "object", "propertyNames": {"pattern": "a"}}, {"not": {}}, 5])
def test_xgrammar_refuses_in_structural_tags_what_it_would_pass_over(schema):
    new = {"format": {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": schema}]}}
    old = {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}
    for tag in (new, old):
        with pytest.raises(GuideError):
            xgrammar_text(GuideSpec(kind="structural_tag", source=json.dumps(tag)), 64)


def test_xgrammar_checks_what_references_lead_to():
    for place in ("#/components/a", "#/components/b", "#a"):
        schema = {"components": {"a": {"type": "array", "uniqueItems": True}}, "$ref": place}
        with pytest.raises(GuideError, match=re.escape("uniqueItems" if place.endswith("/a") else "$ref")):
            xgrammar_text(GuideSpec(kind="json_schema", source=json.dumps(schema)), 64)
