"""Requests' settings of their output's form, as a guide; contradictions are refused by name."""

import json

import msgspec
import pytest

from troupellm.protocol.api.chat import CompletionRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.guide import MAX_SOURCE_BYTES, GuideSpec
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.server.openai.structured_outputs import guide_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def wanted(**fields) -> GuideSpec | None:
    return guide_of(msgspec.convert({"prompt": "x"} | fields, CompletionRequest))


def test_a_request_without_a_format_has_no_guide():
    assert wanted() is None
    assert wanted(response_format={"type": "text"}, guided_json_object=False) is None


@pytest.mark.parametrize(
    ("fields", "kind", "source", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            "json_schema",
            SCHEMA,
            "response_format.json_schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": False}}, "json_schema", False, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "grammar", "start: /a/", "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"regex": "a+"}, "regex", "a+", "regex"),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"', "ebnf"),
        ({"json_schema": '{"type":"integer"}'}, "json_schema", '{"type":"integer"}', "json_schema"),
        ({"json_schema": {"type": "integer"}}, "json_schema", '{"type":"integer"}', "json_schema"),
        ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
        ({"guided_grammar": "root ::= [a]"}, "grammar", "root ::= [a]", "guided_grammar"),
        ({"guided_json_object": True}, "json_object", "", "guided_json_object"),
    ],
)
def test_every_spelling_of_a_guide_is_read(fields, kind, source, field):
    guide = wanted(**fields)
    assert guide is not None
    assert (guide.kind, guide.field) == (kind, field)
    assert (guide.source if isinstance(source, str) else json.loads(guide.source)) == source


@pytest.mark.parametrize("tag", [{"type": "structural_tag", "format": {"type": "any_text"}}])
def test_a_structural_tag_is_read_from_both_fields(tag):
    for guide in (wanted(response_format=tag), wanted(structured_outputs={"structural_tag": tag})):
        assert guide is not None
        assert guide.kind == "structural_tag"
        assert json.loads(guide.source) == tag


def test_options_of_a_guide_are_read_from_both_fields():
    guide = wanted(
        structured_outputs={"json": SCHEMA, "disable_any_whitespace": True, "disable_additional_properties": True},
        guided_decoding_backend="guidance:disable-any-whitespace",
    )
    assert guide is not None
    assert (guide.any_whitespace, guide.additional_properties, guide.backend) == (False, False, "llguidance")
    chosen = wanted(structured_outputs={"json": SCHEMA, "backend": "xgrammar"}, guided_decoding_backend="guidance")
    assert chosen is not None
    assert chosen.backend == "xgrammar"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": "yes"}}},
            "response_format.json_schema.strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": SCHEMA, "backend": "outlines"}}, "structured_outputs.backend"),
        ({"structured_outputs": {"json": SCHEMA, "backend": "x"}}, "structured_outputs.backend"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
        ({"guided_choice": ["a"], "guided_whitespace_pattern": " "}, "guided_choice"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json"),
        ({"guided_json": SCHEMA, "regex": "a"}, "guided_json"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs.regex",
        ),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "lm-format-enforcer"}, "guided_decoding_backend"),
        ({"guided_regex": "a" * (MAX_SOURCE_BYTES + 1)}, "guided_regex"),
    ],
)
def test_impossible_response_formats_are_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        wanted(**fields)
    assert refused.value.param == param
    assert len(refused.value.message) <= 512


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": "json"},
        {"structured_outputs": []},
        {"structured_outputs": {"regex": 3}},
        {"structured_outputs": {"unheard_of": 1}},
        {"guided_choice": "a"},
    ],
)
def test_bodies_of_wrong_types_are_not_read(fields):
    with pytest.raises(msgspec.ValidationError):
        wanted(**fields)


def test_structured_outputs_params_become_a_guide():
    guide = StructuredOutputsParams(choice=("yes", "no")).spec()
    assert guide.kind == "choice"
    assert json.loads(guide.source) == ["yes", "no"]
