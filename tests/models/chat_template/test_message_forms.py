"""The forms in which templates read contents and reasoning, and the arguments of past calls."""

import pytest

from troupellm.models.chat_template.message_forms import text_of
from troupellm.models.chat_template.template import ChatTemplate

TEXT = "{% for m in messages %}{{ m.content + '' }};{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }},{% endfor %};{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %};{% endfor %}"
)
PRINTED = "{% for m in messages %}{{ m.content }};{% endfor %}"
AS_JSON = "{% for m in messages %}{{ m.content | tojson }};{% endfor %}"
TWO = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("source", "of_text", "of_parts"),
    [
        (TEXT, "hi;", "one\ntwo;"),
        (PARTS, "hi,;", "one,two,;"),
        (BOTH, "hi;", "<one><two>;"),
        (PRINTED, "hi;", "one\ntwo;"),
        (AS_JSON, '"hi";', '"one\\ntwo";'),
    ],
    ids=["text", "parts", "both", "printed", "as JSON"],
)
def test_a_template_gets_contents_in_the_form_that_it_shows(source, of_text, of_parts):
    template = ChatTemplate({"default": source}, {})
    assert template.render([{"role": "user", "content": "hi"}]) == of_text
    assert template.render([{"role": "user", "content": TWO}]) == of_parts


@pytest.mark.parametrize("source", [TEXT, PARTS, BOTH])
def test_an_answer_goes_on_from_a_content_of_parts(source):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "on"}]}]
    shown = ChatTemplate({"default": source}, {}).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert shown.endswith("on")


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ messages[0].reasoning_content }}", "why"),
        ("{{ messages[0]['reasoning'] }}", "why"),
        ("{{ messages[0].get('thinking') }}", "why"),
        ("{{ messages[0].reasoning_content }}{{ messages[0].reasoning }}", "whywhy"),
        ("{{ messages[0].keys() | list }}", "['role', 'content']"),
    ],
)
def test_reasoning_has_the_names_that_the_template_reads(given, source, shown):
    message = {"role": "assistant", "content": "so", given: "why"}
    assert ChatTemplate({"default": source}, {}).render([message]) == shown


@pytest.mark.parametrize(("content", "shown"), [("", "why"), ("so", "")])
def test_thinking_is_not_given_beside_a_content_with_calls(content, shown):
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    message = {"role": "assistant", "content": content, "reasoning_content": "why", "tool_calls": [call]}
    assert ChatTemplate({"default": "{{ messages[0].thinking }}"}, {}).render([message]) == shown


@pytest.mark.parametrize(
    ("source", "arguments", "shown"),
    [
        ("{{ a }}", {"x": "é"}, '{"x": "é"}'),
        ("{{ a | tojson }}", {"x": "é"}, '{"x": "é"}'),
        ("{{ '' + a }}", {"x": "é"}, '{"x": "é"}'),
        ("{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}", {"x": "é"}, "x=é"),
        ("{{ a }}", "not JSON", "not JSON"),
        ("{{ '' + a }}", "not JSON", "not JSON"),
        ("{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}", "not JSON", "arguments=not JSON"),
        ("{% for k, v in a | items %}{{ k }}={{ v }}{% endfor %}", "not JSON", "arguments=not JSON"),
    ],
)
def test_arguments_have_the_form_that_the_template_reads(source, arguments, shown):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    whole = (
        "{% for m in messages if m.tool_calls %}{% set a = m.tool_calls[0].function.arguments %}"
        + source
        + "{% endfor %}"
    )
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert ChatTemplate({"default": whole}, {}).render([message]) == shown


def test_parts_other_than_text_have_no_text():
    assert text_of([{"type": "image"}, "a", {"type": "text", "text": "b"}]) == "a\nb"
    assert text_of(None) == ""
