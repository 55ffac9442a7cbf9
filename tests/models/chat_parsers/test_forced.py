"""Guides for calls, compiled: what they let through is what the family's parser reads, and nothing else fits."""

import json

import pytest

from troupellm.models.chat_parsers.catalog import chat_syntax_named
from troupellm.models.chat_parsers.compiled_syntax import plan_of
from troupellm.models.chat_parsers.forced_calls import calls_guide, calls_or, may_think
from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.parser import Parser
from troupellm.models.hub.source import BUILTIN_FOLDER
from troupellm.models.structured_outputs.backend import GuideError
from troupellm.models.structured_outputs.backends import make_backend, program_text
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.chat_events import assemble
from troupellm.protocol.params.guide import GuideSpec
from troupellm.protocol.params.tools import tool_use
from troupellm.tests.support.chat.written_formats import DISTINCT_PARSERS
from troupellm.tests.support.guides.idle_schemas import from_makers

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOLS = [
    {"function": {"name": "count", "parameters": SCHEMA, "strict": True}},
    {"function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(BUILTIN_FOLDER)


@pytest.fixture(scope="module")
def backend(tokenizer):
    return make_backend("llguidance", tokenizer, tokenizer.size)


def fits(backend, tokenizer, guide: GuideSpec, text: str) -> bool:
    """Whether all of a text can be written under a guide, and may end there."""
    matcher = backend.compile(program_text(guide, "llguidance", 64, backend.special_tokens))
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.accept([token]) or matcher.error is not None:
            return False
    return matcher.accepting or matcher.stopped


def written(name: str, call: str, arguments: str, *, as_json: bool = False) -> str:
    """One call as a family's grammar has it.

    Args:
        as_json: as it has calls that do not fit the family's own form.
    """
    chat_syntax = chat_syntax_named(name, "none")
    if chat_syntax.channels is not None:
        return chat_syntax.channels.call.replace("{name}", call).replace("{arguments}", arguments)
    found = chat_syntax.calls
    assert found is not None
    form = found.written
    if form.own and not as_json:
        own = form.own[0]
        said = own.between.join(
            own.argument.replace("{key}", key).replace("{type}", "false").replace("{value}", json.dumps(value))
            for key, value in json.loads(arguments).items()
        )
        before, _, after = own.around or (form.before, "", form.after)
        return before + own.call.replace("{name}", call).replace("{arguments}", said) + after
    body = f'{{"{found.name_keys[0]}": "{call}", "{found.argument_keys[0]}": {arguments}}}'
    text = (
        form.call.replace("{json}", body)
        .replace("{named}", f'{{"{call}": {arguments}}}')
        .replace("{name}", call)
        .replace("{arguments}", arguments)
    )
    return form.before + text.replace("{id}", f"functions.{call}:0") + form.after


@pytest.mark.parametrize("name", DISTINCT_PARSERS)
def test_a_required_call_is_all_there_can_be(name: str, backend, tokenizer):
    chat_syntax = chat_syntax_named(name, "none")
    guide = calls_guide(chat_syntax, tool_use(TOOLS, "required"), after="", reasoning=False)
    for call, arguments, good in [
        ("count", '{"n": 3}', True),
        ("stop", "{}", True),
        ("count", "{}", False),
        ("count", '{"n": "x"}', False),
        ("other", "{}", False),
    ]:
        text = written(name, call, arguments)
        assert fits(backend, tokenizer, guide, text) is good, text
        if good:
            parser = Parser(plan_of(chat_syntax), offered_tools=OfferedTools(TOOLS), new_id=lambda number, name: "x")
            message = assemble(parser.feed(text) + parser.finish())
            assert message.content is None
            (found,) = message.tool_calls
            assert (found.name, json.loads(found.arguments)) == (call, json.loads(arguments))
    assert not fits(backend, tokenizer, guide, "Hello.")
    assert not fits(backend, tokenizer, guide, "")


@pytest.mark.parametrize("name", DISTINCT_PARSERS)
def test_a_strict_tool_is_called_well_or_not_at_all(name: str, backend, tokenizer):
    guide = calls_guide(chat_syntax_named(name, "none"), tool_use(TOOLS), after="")
    if name in ("glm4", "openai"):  # where text cannot be told from a call, or has marks of its own
        assert guide is None
        return
    assert fits(backend, tokenizer, guide, "Hello there, [you] <b>and</b> you.")
    alone = name in ("lfm2", "llama4_pythonic", "olmo3")  # where a call with any arguments makes the others JSON too
    assert fits(backend, tokenizer, guide, written(name, "count", '{"n": 3}', as_json=alone))
    assert fits(backend, tokenizer, guide, written(name, "stop", '{"anything": [1]}', as_json=True))
    assert not fits(backend, tokenizer, guide, written(name, "count", '{"m": 3}', as_json=alone))


ORDER = (
    '{"id": "123e4567-e89b-12d3-a456-426614174000", "at": "2026-11-22T10:00:00Z", "note": null,'
    ' "pet": {"kind": "dog", "age": 3}, "price": "2.50"}'
)
OWNED = '{"id": 3, "file": "x", "owner": {"name": "ann", "tags": [1, 1]}}'


@pytest.mark.parametrize(
    ("maker", "arguments", "wrong"),
    [
        ("pydantic", ORDER, ORDER.replace("dog", "cow")),
        ("pydantic", ORDER, ORDER.replace("2.50", "-.")),
        ("pydantic", ORDER, ORDER.replace("11-22T", "11-31T")),
        ("zod", '{"count": 3, "scores": {"ann": 1}}', '{"count": 3, "scores": {"ann": 10}}'),
        ("OpenAPI", OWNED, OWNED.replace("ann", "Ann")),
    ],
)
def test_strict_tools_as_makers_of_schemas_write_them(maker, arguments, wrong, backend, tokenizer):
    tools = [{"function": {"name": "order", "parameters": dict(from_makers())[maker], "strict": True}}]
    guide = calls_guide(chat_syntax_named("hermes", "none"), tool_use(tools, "required"), after="", reasoning=False)
    assert fits(backend, tokenizer, guide, written("hermes", "order", arguments))
    assert not fits(backend, tokenizer, guide, written("hermes", "order", wrong))


def test_a_free_answer_with_tags_or_a_call(backend, tokenizer):
    tag = {"type": "tag", "begin": "<x>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</x>"}
    source = json.dumps({"format": {"type": "triggered_tags", "triggers": ["<x>"], "tags": [tag]}})
    either = calls_or(
        chat_syntax_named("hermes", "none"), tool_use(TOOLS), GuideSpec(kind="structural_tag", source=source)
    )
    assert fits(backend, tokenizer, either, "See <x>1</x> there")
    assert not fits(backend, tokenizer, either, "See <x>a</x> there")
    assert fits(backend, tokenizer, either, written("hermes", "count", '{"n": 3}'))


def test_an_older_tag_beside_tools_is_refused_by_name():
    old = GuideSpec(kind="structural_tag", source='{"structures": [], "triggers": ["<"]}', field="response_format")
    with pytest.raises(InvalidRequest) as refused:
        calls_or(chat_syntax_named("hermes", "none"), tool_use(TOOLS), old)
    assert (refused.value.param, refused.value.code) == ("response_format", "unsupported_parameter")


def test_an_answer_of_some_form_or_a_call(backend, tokenizer):
    for guide in (
        GuideSpec(kind="json_schema", source=json.dumps({"type": "array", "items": {"type": "integer"}})),
        GuideSpec(kind="choice", source='["[1, 2]", "no"]'),
        GuideSpec(kind="regex", source=r"\[1, 2\]"),
        GuideSpec(kind="grammar", source='start: "[1, " /2/ "]"'),
        GuideSpec(kind="structural_tag", source='{"format": {"type": "const_string", "value": "[1, 2]"}}'),
    ):
        either = calls_or(chat_syntax_named("hermes", "none"), tool_use(TOOLS), guide)
        assert fits(backend, tokenizer, either, "[1, 2]")
        assert fits(backend, tokenizer, either, written("hermes", "count", '{"n": 3}'))
        assert not fits(backend, tokenizer, either, written("hermes", "count", '{"n": true}'))
        assert not fits(backend, tokenizer, either, "Hello.")


FORMS = [
    GuideSpec(kind="json_schema", source=json.dumps({"type": "array", "items": {"type": "integer"}})),
    GuideSpec(kind="choice", source='["[1, 2]", "no", "(\\\\d+)"]'),
    GuideSpec(kind="regex", source=r"\[1, 2\]"),
    GuideSpec(kind="grammar", source='start: "[1, " /2/ "]"'),
    GuideSpec(kind="structural_tag", source='{"format": {"type": "const_string", "value": "[1, 2]"}}'),
]


@pytest.mark.parametrize("guide", FORMS, ids=lambda guide: guide.kind)
@pytest.mark.parametrize("marks", [[("<think>", "</think>")], [("Hm:", "So:"), ("<think>", "</think>")]])
def test_an_answer_of_some_form_perhaps_behind_thoughts(backend, tokenizer, guide, marks):
    """A model that does not think is bound from the first token; one that thinks, behind its thoughts."""
    made = may_think(guide, marks)
    assert fits(backend, tokenizer, made, "[1, 2]")
    for begin, end in marks:
        assert fits(backend, tokenizer, made, f"{begin} one [two {end}[1, 2]")
        assert not fits(backend, tokenizer, made, f"{begin} one {end}Hello.")
        assert not fits(backend, tokenizer, made, f"{begin} one")
    for text in ("Hello.", "", "one </think>[1, 2]", "[1, 2] Hello."):
        assert not fits(backend, tokenizer, made, text), text


def test_words_to_choose_from_are_texts_and_not_patterns(backend, tokenizer):
    words = ["a.c", "(x|y)", "[z]", "1+1=2?", "\\d{2}$", "^-#&~ /", "new\nline", "é"]
    made = may_think(GuideSpec(kind="choice", source=json.dumps(words)), [("<think>", "</think>")])
    for word in words:
        assert fits(backend, tokenizer, made, word), word
    for text in ("abc", "x", "z", "11=2", "12", "a", "(x|y"):
        assert not fits(backend, tokenizer, made, text), text


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "mistral"])
def test_a_call_that_must_come_perhaps_behind_thoughts(name, backend, tokenizer):
    use, marks = tool_use(TOOLS, "required"), [("<think>", "</think>")]
    guide = calls_guide(chat_syntax_named(name, "none"), use, after="", marks=marks)
    call = written(name, "count", '{"n": 3}')
    assert fits(backend, tokenizer, guide, call)
    assert fits(backend, tokenizer, guide, f"<think>Hm.</think>{call}")
    assert not fits(backend, tokenizer, guide, f"Hm.</think>{call}")
    assert not fits(backend, tokenizer, guide, "<think>Hm.</think>")


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"properties": {"a": {"pattern": "("}}}, "pattern: ( ^ error: unclosed group"),
        ({"properties": {"a": {"$ref": "#/nope"}}}, "$ref: pointer '/nope' does not exist"),
        (
            {"oneOf": [{"required": ["a"]}, {}]},
            "oneOf is only supported where its schemas exclude each other; use anyOf",
        ),
        ({"properties": {"a": {"type": "no"}}}, "Invalid type: no"),
        ({"properties": {"a": {"contains": {}}}}, "the keyword contains is not supported"),
    ],
)
def test_what_is_wrong_with_a_schema_is_said_without_the_grammar_around_it(parameters, said, backend):
    tools = [*TOOLS, {"function": {"name": "bad", "parameters": parameters, "strict": True}}]
    guide = calls_guide(chat_syntax_named("hermes", "none"), tool_use(tools, "required"), after="")
    with pytest.raises(GuideError) as refused:
        backend.compile(program_text(guide, "llguidance", 64, backend.special_tokens))
    assert str(refused.value) == said


def test_unique_items_are_left_to_the_model_unless_the_tool_is_strict(backend, tokenizer):
    pair = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2}
    parameters = {"type": "object", "properties": {"a": pair, "never": {"not": {}}}, "required": ["a"]}
    chat_syntax = chat_syntax_named("hermes", "none")
    guide = calls_guide(
        chat_syntax, tool_use([{"function": {"name": "f", "parameters": parameters}}], "required"), after=""
    )
    for arguments, good in (('{"a": [1, 2]}', True), ('{"a": [1]}', False), ('{"a": [1, 2], "never": 1}', False)):
        assert fits(backend, tokenizer, guide, written("hermes", "f", arguments)) is good, arguments
    strict = {"function": {"name": "f", "parameters": parameters, "strict": True}}
    guide = calls_guide(chat_syntax, tool_use([strict], "required"), after="")
    with pytest.raises(GuideError, match="uniqueItems"):
        backend.compile(program_text(guide, "llguidance", 64, backend.special_tokens))


@pytest.mark.parametrize(
    ("parameters", "open_to_others"),
    [
        (None, False),
        ({"type": "object", "properties": {}}, False),
        ({"properties": {}, "description": "None.", "required": []}, False),
        ({"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}}, True),
        ({"type": "object", "properties": {}, "patternProperties": {"^a": {"type": "integer"}}}, True),
        ({"type": "object"}, True),
        ({}, True),
    ],
)
def test_a_function_that_declares_no_arguments_is_called_without_any(parameters, open_to_others, backend, tokenizer):
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    guide = calls_guide(chat_syntax_named("hermes", "none"), tool_use(tools, "required"), after="")
    assert fits(backend, tokenizer, guide, written("hermes", "f", "{}"))
    assert fits(backend, tokenizer, guide, written("hermes", "f", '{"a": 1}')) is open_to_others


def test_a_declared_property_fits_the_pattern_of_its_name_too(backend, tokenizer):
    parameters = {
        "type": "object",
        "properties": {"ab": {"type": "string", "maxLength": 3}, "ax": {"type": "boolean"}},
        "patternProperties": {"^a": {"type": ["string", "integer"], "minLength": 2}},
        "additionalProperties": False,
    }
    guide = calls_guide(
        chat_syntax_named("hermes", "none"),
        tool_use([{"function": {"name": "f", "parameters": parameters}}], "required"),
        after="",
    )
    for arguments, good in (
        ('{"ab": "xy"}', True),
        ('{"ab": "x"}', False),
        ('{"ab": 1}', False),
        ('{"ab": "wxyz"}', False),
        ('{"ax": true}', False),
        ('{"ac": 1}', True),
        ("{}", True),
    ):
        assert fits(backend, tokenizer, guide, written("hermes", "f", arguments)) is good, arguments


def test_thousands_of_words_or_a_call(backend, tokenizer):
    words = [f"a rather long word, number {number:05d}" for number in range(6000)]
    guide = GuideSpec(kind="choice", source=json.dumps(words))
    either = calls_or(chat_syntax_named("hermes", "none"), tool_use(TOOLS), guide)
    assert len(either.source) < 1.2 * len(guide.source)
    assert fits(backend, tokenizer, either, words[4321])
    assert not fits(backend, tokenizer, either, words[4321][:-1])
