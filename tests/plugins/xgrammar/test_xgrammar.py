"""The second backend: the corpus as far as it takes it, its refusals, and the choice of it per request."""

import json
import re
from importlib.util import find_spec

import jsonschema
import pytest

from troupellm.models.structured_outputs.backend import GuideError
from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.guide import GuideProgram, GuideSpec
from troupellm.tests.support.environment.absence import need_xgrammar
from troupellm.tests.support.guides.guide_corpus import corpus
from troupellm.tests.support.guides.guide_crowd import Crowd
from troupellm_xgrammar import backend as xgrammar_backend
from troupellm_xgrammar.backend import MOST_GRAMMAR_CHARACTERS, xgrammar_text
from troupellm_xgrammar.schema import check_schema

INSTALLED = find_spec("xgrammar") is not None
needs_xgrammar = pytest.mark.usefixtures("xgrammar")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def xgrammar() -> None:
    need_xgrammar()


def program(kind: str, source: str, **options) -> GuideProgram:
    text = xgrammar_text(GuideSpec(kind=kind, source=source, **options), 64)
    return GuideProgram(backend="xgrammar", text=text)


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("not", {"not": {"type": "null"}}),
        ("multipleOf", {"type": "integer", "multipleOf": 3}),
        ("minimum", {"type": "number", "minimum": 3}),
        ("oneOf", {"type": "object", "properties": {"a": {"type": "integer", "oneOf": []}}}),
        ("maxLength", {"type": ["string", "null"], "maxLength": 3}),
        ("minimum", {"$defs": {"a": {}}, "$ref": "#/$defs/a", "minimum": 3}),
        ("maxLength", {"type": "string", "pattern": "a", "maxLength": 3}),
        ("enum", {"type": "string", "enum": ["a", 1]}),
        ("required", {"type": "object", "required": ["a"]}),
        ("const", {"type": "integer", "const": True}),
        ("format", {"type": "array", "items": {"type": "string", "format": "date"}}),
    ],
)
def test_what_it_would_pass_over_is_refused_by_name(keyword, schema):
    with pytest.raises(GuideError, match=re.escape(f"the keyword {keyword}")):
        check_schema(schema)


def test_xgrammar_refuses_forms_that_it_does_not_have():
    with pytest.raises(GuideError):
        program("json_object", "", whitespace_pattern=" ")
    for source in ("[1]", "false", "{"):
        with pytest.raises(GuideError):
            program("json_schema", source)


def test_large_grammars_are_refused_by_name():
    large = "a" * (MOST_GRAMMAR_CHARACTERS + 1)
    tags = [{"type": "regex", "pattern": large}, {"type": "tag", "content": {"type": "grammar", "grammar": large}}]
    wanted = [("regex", large), ("grammar", large)]
    wanted += [("structural_tag", json.dumps({"type": "structural_tag", "format": tag})) for tag in tags]
    for kind, source in wanted:
        with pytest.raises(GuideError, match=f"more than {MOST_GRAMMAR_CHARACTERS} characters"):
            program(kind, source)
    assert program("regex", large[:-1]).text


@needs_xgrammar
def test_what_takes_too_much_memory_when_compiled_is_refused(library: GuideLibrary, monkeypatch):
    made = program("regex", "[ab]c").text
    backend = library.backend("xgrammar")
    assert not backend.compile(made).stopped
    monkeypatch.setattr(xgrammar_backend, "MOST_COMPILED_BYTES", 1)
    with pytest.raises(GuideError, match="memory"):
        backend.compile(made)


@pytest.mark.skipif(INSTALLED, reason="xgrammar is here")
@pytest.mark.anyio
async def test_without_it_a_request_that_names_it_is_refused(tiny_engine):
    async with tiny_engine() as engine:
        with pytest.raises(InvalidRequest, match="xgrammar is not installed"):
            await engine.generate([5], guide=GuideSpec(kind="regex", source="a", backend="xgrammar"))
        assert (await engine.generate([5], guide=GuideSpec(kind="regex", source="a"))).choices[0].text == "a"


@needs_xgrammar
@pytest.mark.slow
def test_the_corpus_as_far_as_it_goes(library: GuideLibrary, tokenizer, helper):
    served = []
    for name, schema in corpus():
        try:
            served.append((name, schema, program("json_schema", json.dumps(schema))))
        except GuideError:
            continue
    assert len(served) > 100
    finished = 0
    for begin in range(0, len(served), 64):
        crowd = Crowd(library, tokenizer, helper, seed=5)
        crowd.decoding = "replace"  # its strings may hold bytes that are no text, which readers see as U+FFFD
        for row, (_, _, made) in enumerate(served[begin : begin + 64]):
            crowd.add(row, made)
        crowd.run(500)
        finished += len(crowd.finished)
        for row, text in crowd.finished.items():
            name, schema, _ = served[begin + row]
            try:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            except (ValueError, jsonschema.ValidationError) as error:
                pytest.fail(f"{name}: {schema}: {text!r}: {error}")
    assert finished > 0.9 * len(served)


@needs_xgrammar
@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", "[ab]{2,4}c", "[ab]{2,4}c"),
        ("choice", '["yes", "no", "n\\"o"]', 'yes|no|n"o'),
        ("grammar", 'root ::= "x" [0-9] | "y"', "x[0-9]|y"),
        ("json_object", "", r"\{.*\}"),
    ],
)
def test_texts_follow_every_kind_of_guide(library: GuideLibrary, tokenizer, helper, kind, source, pattern):
    crowd = Crowd(library, tokenizer, helper)
    for row in range(4):
        crowd.add(row, program(kind, source))
    crowd.run(300)
    assert crowd.finished
    assert all(re.fullmatch(pattern, text, re.DOTALL) for text in crowd.finished.values())


@needs_xgrammar
@pytest.mark.anyio
@pytest.mark.slow
async def test_xgrammar_is_chosen_per_request_and_per_server(tiny_engine):
    spec = GuideSpec(kind="regex", source="[ab]{2,4}c")
    async with tiny_engine(guide_backend="xgrammar", guide_timeout=30.0) as engine:
        for backend in ("", "xgrammar", "guidance"):
            chosen = GuideSpec(kind="regex", source=spec.source, backend=backend)
            answer = await engine.generate([5], guide=chosen, max_tokens=20, seed=5)
            assert re.fullmatch("[ab]{2,4}c", answer.choices[0].text)
        assert engine.snapshot().guide.compiles == 2
