"""Model output is data: every output can be sent as an answer, and complete arguments are JSON."""

import json

import msgspec
import pytest
from recorded_dialects import TOOLS

from troupellm.models.chat_parsers.catalog import chat_syntax_named
from troupellm.models.chat_parsers.compiled_syntax import plan_of
from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.parser import NO_LIMIT, Parser
from troupellm.models.chat_parsers.values import value_text
from troupellm.protocol.params.chat_events import assemble
from troupellm.protocol.params.outputs import Message

HEAD = "<|channel|>commentary to=functions.get_weather<|message|>"


def parser_of(tools: str, *, forced: bool = False, most_calls: int = NO_LIMIT) -> Parser:
    return Parser(
        plan_of(chat_syntax_named(tools, "none")),
        offered_tools=OfferedTools(TOOLS),
        new_id=lambda number, name: f"functions.{name}:{number}",
        forced=forced,
        most_calls=most_calls,
    )


def read(tools: str, text: str, *, forced: bool = False, cut: bool = False) -> tuple[Message, bool]:
    """The message, and whether its calls are whole; the same whether it comes at once or in single characters."""
    read_all, read_each = parser_of(tools, forced=forced), parser_of(tools, forced=forced)
    pieces = read_all.feed(text) + read_all.finish(cut=cut)
    each = [piece for character in text for piece in read_each.feed(character)]
    message = assemble(pieces)
    assert assemble(each + read_each.finish(cut=cut)) == message
    assert read_each.has_whole_calls == read_all.has_whole_calls
    msgspec.json.encode(pieces)
    return message, read_all.has_whole_calls


def test_a_name_of_which_no_text_can_be_made_is_no_call():
    text = r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'
    message, _ = read("hermes", text)
    assert message.tool_calls == ()
    assert message.content == text


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "<b>"])
def test_a_name_that_no_tool_may_have_is_no_call(name: str):
    assert read("hermes", f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>')[0].tool_calls == ()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (r'{"city": "\ud800", "x\udc00": "\ud83d\ude00"}', {"city": "\ud800", "x\udc00": "\U0001f600"}),
        (r'"{\"city\": \"\ud800\"}"', {"city": "\ud800"}),
        ('{"city": 1e999, "x": [-1e999, 1e300]}', {"city": "1e999", "x": ["-1e999", 1e300]}),
        ('{"city": NaN, "x": -Infinity}', {"city": "NaN", "x": "-Infinity"}),
    ],
)
def test_arguments_before_the_name_are_json_that_can_be_sent(arguments: str, wanted: object):
    message, whole = read("hermes", f'<tool_call>{{"arguments": {arguments}, "name": "get_weather"}}</tool_call>')
    (call,) = message.tool_calls
    assert whole
    assert json.loads(call.arguments, parse_constant=pytest.fail) == wanted
    call.arguments.encode()


@pytest.mark.parametrize(
    ("text", "wanted"), [(r'["\ud800"]', ["\ud800"]), ("1e999", "1e999"), ("[1e999]", "[1e999]"), ("1e30", 1e30)]
)
def test_values_without_quotes_are_json_that_can_be_sent(text: str, wanted: object):
    found = value_text(text, frozenset())
    found.encode()
    assert json.loads(found, parse_constant=pytest.fail) == wanted


@pytest.mark.parametrize(
    ("body", "arguments", "cut", "whole"),
    [
        ('{"city": "Paris"}', '{"city": "Paris"}', False, True),
        ("", "{}", False, True),
        ("<|call|>", "{}", True, True),
        ("", "", True, False),
        ('{"city": "Pa', '{"city": "Pa', True, False),
        ("Paris<|call|>", "Paris", False, False),
        ("print(1)", "print(1)", False, False),
    ],
)
def test_a_message_to_a_function_is_its_arguments(body: str, arguments: str, cut: bool, whole: bool):
    message, found = read("openai", HEAD + body, cut=cut)
    (call,) = message.tool_calls
    assert (call.name, call.arguments, found) == ("get_weather", arguments, whole)


@pytest.mark.parametrize("recipient", ["python", "browser.search", "assistant", "functions.", "functions.<b>"])
def test_a_message_to_anybody_else_is_no_call(recipient: str):
    message, _ = read("openai", f"<|channel|>commentary to={recipient}<|message|>print(1)")
    assert (message.tool_calls, message.content) == ((), "print(1)")


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}'),
        ("hermes", '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}'),
        ("pythonic", '[get_weather(city="Paris")'),
        ("mistral_v11", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"),
        ("glm45", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"),
        ("openai", HEAD + '{"city": "Paris"}'),
    ],
)
def test_a_call_is_whole_once_it_has_all_its_arguments(tools: str, text: str):
    """Wherever the text is cut. Nothing of a forced call's beginning is shown as content."""
    assert read(tools, text, forced=True, cut=True)[1]
    for length in range(len(text)):
        message, whole = read(tools, text[:length], forced=True, cut=True)
        assert message.content in (None, "")
        if whole:
            assert json.loads(message.tool_calls[0].arguments) == {"city": "Paris"}
        else:
            assert not message.tool_calls or length < len(text)
    assert not read(tools, text[: text.index("Paris") + 2], forced=True, cut=True)[1]


def test_what_is_no_call_is_shown_where_nothing_is_forced():
    text = '<tool_call>\n{"name": "add",'
    assert read("hermes", text)[0].content == text


def test_only_calls_that_are_shown_count_as_whole():
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parser = parser_of("hermes", most_calls=1)
    parser.feed(call + '<tool_call>{"name": "now", "arguments": {"a')
    parser.finish(cut=True)
    assert parser.has_whole_calls


@pytest.mark.parametrize("gap", ["\n", "\n</parameter>\n"])
def test_a_parameter_ends_where_the_next_one_begins(gap: str):
    parameters = f"<parameter=city>\nRome{gap}<parameter=days>\n2"
    message, whole = read(
        "qwen3_coder", f"<tool_call>\n<function=get_weather>\n{parameters}\n</function>\n</tool_call>!"
    )
    assert json.loads(message.tool_calls[0].arguments) == {"city": "Rome", "days": 2}
    assert (message.content, whole) == ("!", True)


def test_a_parameter_that_comes_twice_is_taken_once():
    text = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\na\n</parameter>\n<parameter=city>\nb\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    assert read("qwen3_coder", text)[0].tool_calls[0].arguments == '{"city": "a", "days": 2}'


def test_no_two_calls_have_the_same_id():
    call = "<|tool_call_begin|>functions.now:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    text = "<|tool_calls_section_begin|>" + "".join(call.format(number) for number in (1, 1, 0, 1))
    calls = read("kimi_k2", text + "<|tool_calls_section_end|>")[0].tool_calls
    assert len({found.id for found in calls}) == len(calls) == 4
    assert calls[0].id == "functions.now:1"


def test_more_arguments_than_any_function_has_are_text():
    """Reading each costs time: what is behind them is handed on as it is."""
    text = "[get_weather(" + "a=1," * 1000 + "b=2)]"
    message, whole = read("pythonic", text)
    (call,) = message.tool_calls
    assert not whole
    assert call.arguments.count('"a": 1') == 256
    assert call.arguments.count("a=1") == 1000 - 256


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a,b' 'c)' x", "'a,b' 'c)' x"),
        ("['a]', \"b'\", 'c\\'d', {'x': ')'}]", ["a]", "b'", "c'd", {"x": ")"}]),
        ("'" + "x," * 20_000 + "'", "x," * 20_000),
    ],
)
def test_texts_end_where_their_quotes_do(text: str, value: object):
    message, whole = read("pythonic", f"[get_weather(city={text}, days=2)]")
    assert json.loads(message.tool_calls[0].arguments) == {"city": value, "days": 2}
    assert whole
