"""A forced call is written as the family's chat template renders it, wherever a grammar can promise its schema so."""

import json
from pathlib import Path
from typing import Any

import pytest

from troupellm.models.chat_parsers.catalog import chat_syntax_named
from troupellm.models.chat_parsers.compiled_syntax import plan_of
from troupellm.models.chat_parsers.forced_arguments import MOST_TAGS
from troupellm.models.chat_parsers.forced_calls import calls_guide, calls_or
from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.parser import Parser
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.chat_template.template_process import TemplateProcesses
from troupellm.models.hub.source import BUILTIN_FOLDER
from troupellm.models.structured_outputs.backend import GuideError
from troupellm.models.structured_outputs.backends import make_backend, program_text
from troupellm.models.structured_outputs.structural_tag import MOST_EXCLUDED
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.params.chat_events import assemble
from troupellm.protocol.params.guide import GuideSpec
from troupellm.protocol.params.tools import tool_use
from troupellm.tests.support.chat.cut_texts import read_in_all_cuts
from troupellm.tests.support.chat.written_formats import DISTINCT_PARSERS, FORMATS, Format

TEMPLATES = Path(__file__).parents[1] / "chat_templates"
JSON_ONLY = ("deepseek_v4-2", "dots-7", "minicpm5", "muse", "hy_v", "k2_horizon", "kimi_k3")
"""Rows of other spellings, and families whose calls are forced as JSON."""
ROWS = {f"{row.parser}-{place}": row for place, row in enumerate(FORMATS)}
OWN = {
    name: row
    for name, row in ROWS.items()
    if not name.startswith(JSON_ONLY) and chat_syntax_named(row.parser, "none").calls.written.own
}
FLAT = [name for name, row in OWN.items() if row.parser not in ("gemma4", "functiongemma", "minimax_m3")]
"""Families whose lists and objects are JSON."""
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["celsius", "old fahrenheit"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "wind": {"type": "boolean"},
    },
    "required": ["city", "days"],
}
PLACES = {
    "type": "object",
    "properties": {"places": {"type": "array", "items": {"$ref": "#/$defs/Place"}}, "first": {"$ref": "#/$defs/Place"}},
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = [
    {"function": {"name": "weather", "parameters": WEATHER}},
    {"function": {"name": "places", "parameters": PLACES}},
    {"function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
NOTE = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NOTES = [
    {
        "function": {
            "name": "note",
            "parameters": {"type": "object", "properties": {"notes": {"type": "array", "items": NOTE}, "last": NOTE}},
        }
    }
]
PARIS: dict[str, Any] = {"city": 'Paris <b>,\n"now"  [x]', "days": 3, "unit": "old fahrenheit", "note": "a = b; c"}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(BUILTIN_FOLDER)


@pytest.fixture(scope="module")
def backend(tokenizer):
    return make_backend("llguidance", tokenizer, tokenizer.size)


@pytest.fixture(scope="module")
def fits(tokenizer, backend):
    def check(guide: GuideSpec, text: str) -> bool:
        """Whether all of a text can be written under a guide, and may end there."""
        matcher = backend.compile(program_text(guide, "llguidance", 64, backend.special_tokens))
        for token in tokenizer.encode(text, add_special_tokens=False):
            if not matcher.accept([token]) or matcher.error is not None:
                return False
        return matcher.accepting or matcher.stopped

    return check


def forced(parser: str, tools: Any = TOOLS, **more: Any) -> GuideSpec:
    guide = calls_guide(chat_syntax_named(parser, "none"), tool_use(tools, "required", **more), after="")
    assert guide is not None
    return guide


def text_of(row: Format, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The calls without a mark that ends the message."""
    return row.calls(calls).removesuffix("<|content_model_end_sampling|>")


def _same(one: str, other: str) -> bool:
    return chat_syntax_named(one, "none").calls is chat_syntax_named(other, "none").calls


def read(parser: str, text: str, tools: Any = TOOLS) -> list[tuple[str, Any]]:
    plan = plan_of(chat_syntax_named(parser, "none"))
    chat_parser = Parser(plan, offered_tools=OfferedTools(tools), new_id=lambda number, name: "x")
    message = assemble(chat_parser.feed(text) + chat_parser.finish())
    assert message.content is None
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize("name", OWN)
def test_calls_as_the_template_renders_them_are_what_can_be_written(name: str, fits):
    row = OWN[name]
    calls = [("weather", PARIS), ("weather", {"city": "Rome", "days": 1}), ("now", {})]
    text = text_of(row, calls)
    assert fits(forced(row.parser), text), text
    assert read(row.parser, text) == calls
    assert not fits(forced(row.parser, parallel=False), text)
    assert fits(forced(row.parser, parallel=False), text_of(row, calls[:1]))


@pytest.mark.parametrize("name", OWN)
def test_arguments_that_break_the_schema_cannot_be_written(name: str, fits):
    row, guide = OWN[name], forced(OWN[name].parser)
    for arguments in (
        {"city": "Paris"},
        {"days": 3},
        {"city": "Paris", "days": "three"},
        {"city": "Paris", "days": 3.5},
        {"city": "Paris", "days": 3, "unit": "kelvin"},
        {"city": "Paris", "days": 3, "wind": "often"},
        {"city": "Paris", "days": 3, "other": 1},
    ):
        assert not fits(guide, text_of(row, [("weather", arguments)])), arguments
    for text in ("", "Hello.", text_of(row, [("other", {})])):
        assert not fits(guide, text), text


@pytest.mark.parametrize(
    ("parser", "marks"),
    [
        ("qwen3_coder", ["</parameter>", "\n<parameter=days>", "\n</function>"]),
        ("glm45", ["</arg_value>", "\n<arg_key>", "\n</tool_call>"]),
        ("minimax_m2", ["</parameter>", '\n<parameter name="days">', "\n</invoke>"]),
        ("deepseek_v4", ["</｜DSML｜parameter>", '\n<｜DSML｜parameter name="days"', "\n</｜DSML｜invoke>"]),
        ("solar_open2", ["<|tool_arg:end|>", "<|tool_arg:start|>", "<|tool_call:end|>"]),
        ("gemma4", ['<|"|>']),
    ],
)
def test_a_text_holds_no_mark_at_which_the_parser_would_end_it(parser: str, marks: list[str], fits):
    row = next(row for row in OWN.values() if _same(row.parser, parser))
    for text, good in [("a < b\n\n<b>", True), *((f"a{mark}b", False) for mark in marks)]:
        written = text_of(row, [("weather", {"city": text, "days": 1})])
        assert fits(forced(parser), written) is good, written


@pytest.mark.parametrize("name", FLAT)
def test_lists_and_objects_stand_as_json(name: str, fits):
    row, guide = OWN[name], forced(OWN[name].parser)
    calls = [("places", {"places": [{"x": 1.5}, {"x": 2}], "first": {"x": 0}})]
    text = text_of(row, calls)
    assert fits(guide, text), text
    assert read(row.parser, text) == calls
    assert not fits(guide, text_of(row, [("places", {"first": {"y": 0}})]))


@pytest.mark.parametrize("name", FLAT)
def test_texts_in_lists_and_objects_hold_the_marks_of_the_form(name: str, fits):
    row, calls = OWN[name], chat_syntax_named(OWN[name].parser, "none").calls
    assert calls is not None
    own = calls.written.own[0]
    before, _, after = own.argument.partition("{value}")
    marks = [mark.strip() for mark in (before.replace("{key}", "last").replace("{type}", "false"), after)]
    notes = [{"text": f'a "{mark}" {{b [\\'} for mark in marks]
    written = [("note", {"notes": notes, "last": {"text": marks[1]}}), ("note", {"notes": []})]
    text = text_of(row, written)
    assert fits(forced(row.parser, NOTES), text), text
    assert read(row.parser, text, NOTES) == written
    found = read_in_all_cuts(chat_syntax_named(row.parser, "none"), text, NOTES)
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == written


@pytest.mark.parametrize("name", DISTINCT_PARSERS)
def test_a_tool_whose_schema_needs_quotes_is_called_with_an_object(name: str, fits):
    written = chat_syntax_named(name, "none")
    if written.calls is None or not written.calls.written.own:
        return
    form, keys = written.calls.written, written.calls
    patterned = {"type": "object", "patternProperties": {"^[a-z]$": {"type": "integer"}}, "additionalProperties": False}
    tools = [{"function": {"name": "count", "parameters": patterned}}]
    body = f'{{"{keys.name_keys[0]}": "count", "{keys.argument_keys[0]}": {{"n": 3}}}}'
    text = form.before + form.call.replace("{json}", body) + form.after
    guide = forced(name, tools)
    assert fits(guide, text), text
    assert read(name, text, tools) == [("count", {"n": 3})]
    assert not fits(guide, text.replace('"n"', '"nn"'))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "[0-9]+"},
        {"type": "string", "minLength": 1},
        {"type": "string", "enum": ["a\nb", "c"]},
        {"type": "string", "const": "</parameter>"},
        {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    ],
)
def test_a_text_with_rules_is_forced_as_json(schema: dict[str, Any], fits):
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    guide = forced("qwen3_coder", tools)
    assert '{\\"name\\": \\"f\\"' in guide.source
    assert not fits(guide, "<tool_call>\n<function=f>\n<parameter=a>\nc\n</parameter>\n</function>\n</tool_call>")


def test_more_arguments_than_a_grammar_should_have_are_forced_as_json():
    properties = {f"a{number}": {"type": "integer"} for number in range(MOST_TAGS - 1)}
    few = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    more = [*few, {"function": {"name": "g", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
    assert "<parameter=" in forced("qwen3_coder", few).source
    assert "<parameter=" not in forced("qwen3_coder", more).source


@pytest.mark.parametrize(("parser", "marks"), [("lfm2", "tool_call"), ("llama4_pythonic", "python")])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            'weather(city="Paris \\"x\\"", days=3, wind=True)',
            [("weather", {"city": 'Paris "x"', "days": 3, "wind": True})],
        ),
        (
            'now(), weather(city="a", days=1, note=null)',
            [("now", {}), ("weather", {"city": "a", "days": 1, "note": None})],
        ),
        ('places(first={"x": 1})', [("places", {"first": {"x": 1}})]),
        ("places()", [("places", {})]),
        ("weather(days=3)", None),
        ("weather(city=3, days=3)", None),
        ('weather(city="a", days=3, wind=1)', None),
        ('weather(city="a" days=3)', None),
        ('{"name": "now", "arguments": {}}', None),
    ],
)
def test_calls_in_python_are_lists_of_calls(parser: str, marks: str, text: str, calls: Any, fits):
    whole = f"<|{marks}_start|>[{text}]<|{marks}_end|>"
    assert fits(forced(parser), whole) is (calls is not None)
    if calls is not None:
        assert read(parser, whole) == calls


@pytest.mark.parametrize(
    ("value", "good"), [("null", True), ("7", True), ("x y", True), ("true", True), ("", True), ("</parameter>", False)]
)
def test_a_value_of_several_types_is_read_as_the_first_that_it_can_be(value: str, good: bool, fits):
    either = {"type": ["string", "null", "integer"]}
    tools = [{"function": {"name": "f", "parameters": {"type": "object", "properties": {"a": either}}}}]
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert fits(forced("qwen3_coder", tools), text) is good


@pytest.mark.parametrize(
    ("flag", "value", "good"), [("true", "x", True), ("false", "null", True), ("false", "x", False)]
)
def test_a_flag_says_if_a_value_is_a_text(flag: str, value: str, good: bool, fits):
    either = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    tools = [{"function": {"name": "f", "parameters": {"type": "object", "properties": {"a": either}}}}]
    parameter = f'<｜DSML｜parameter name="a" string="{flag}">{value}</｜DSML｜parameter>'
    call = f'<｜DSML｜invoke name="f">\n{parameter}\n</｜DSML｜invoke>'
    text = f"<｜DSML｜tool_calls>\n{call}\n</｜DSML｜tool_calls>"
    assert fits(forced("deepseek_v4", tools), text) is good
    if good:
        assert read("deepseek_v4", text, tools) == [("f", {"a": "x" if value == "x" else None})]


@pytest.mark.parametrize("name", [name for name in DISTINCT_PARSERS if chat_syntax_named(name, "none").calls])
@pytest.mark.parametrize(("tool", "key"), [("get-weather.v2", "x-y.z"), ("3d", "_x1"), ("f", "a b"), ("f", "<k>")])
def test_odd_names_are_written_in_a_form_in_which_they_are_read(name: str, tool: str, key: str, fits):
    calls = chat_syntax_named(name, "none").calls
    assert calls is not None
    parameters = {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]}
    tools = [{"function": {"name": tool, "parameters": parameters}}]
    for own in calls.written.own:
        said = own.argument.replace("{key}", key).replace("{type}", "false").replace("{value}", "3")
        before, _, after = own.around or (calls.written.before, "", calls.written.after)
        text = before + own.call.replace("{name}", tool).replace("{arguments}", said) + after
        assert not fits(forced(name, tools), text) or read(name, text, tools) == [(tool, {key: 3})], text


def test_a_free_text_excludes_so_many_texts_at_most(backend, fits):
    for most, end in ((MOST_EXCLUDED, "</a>"), (MOST_EXCLUDED + 1, "</a>"), (1, "")):
        content = {"type": "any_text", "excludes": [f"\n{number}/" for number in range(most)]}
        tag = {"type": "tag", "begin": "<a>", "content": content, "end": end}
        guide = GuideSpec(kind="structural_tag", source=json.dumps({"format": tag}))
        if most > MOST_EXCLUDED:
            with pytest.raises(GuideError, match="excludes"):
                program_text(guide, "llguidance", 64, backend.special_tokens)
            continue
        assert fits(guide, f"<a>0/ \n x{end}")
        assert not fits(guide, f"<a>x\n0/{end}")


def test_a_strict_tool_is_called_in_the_own_form_or_not_at_all(fits):
    tools = [{"function": {"name": "weather", "parameters": WEATHER, "strict": True}}, TOOLS[2]]
    syntax = chat_syntax_named("qwen3_coder", "none")
    guide = calls_guide(syntax, tool_use(tools), after="")
    assert guide is not None
    either = calls_or(syntax, tool_use(tools), GuideSpec(kind="regex", source="yes|no"))
    row = next(row for row in FORMATS if row.parser == "nemotron_v3")
    good, bad = (row.calls([("weather", {"city": "Rome", "days": days})]) for days in (1, "one"))
    for found in (guide, either):
        assert fits(found, good)
        assert not fits(found, bad)
    assert fits(guide, f"Let me look.\n{good}")
    assert fits(guide, "I do not know.")
    assert fits(either, "yes")


def test_a_rendered_call_of_a_real_template_is_what_is_forced(fits):
    processes = TemplateProcesses()
    try:
        source = (TEMPLATES / "glm_4_5.jinja").read_text("utf-8")
        template = ChatTemplate({"default": source}, {}, processes)
        call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        chat = [{"role": "user", "content": "How is it?"}, turn]
        whole = template.render(chat, tools=None, add_generation_prompt=False)
    finally:
        processes.close()
    text = whole[whole.index("<tool_call>") : whole.index("</tool_call>")] + "</tool_call>"
    assert fits(forced("glm45"), text), text
