"""Probes of chat templates, and the form in which each template gets a conversation."""

import pytest

from troupellm.models.chat_template.message_forms import TemplateTraits, repaired
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.chat_template.template_process import RendersHere, TemplateRefused
from troupellm.models.chat_template.template_traits import probed
from troupellm.protocol.errors import InvalidRequest
from troupellm.tests.support.chat.template_kinds import KINDS


def template(name):
    return ChatTemplate({"default": KINDS[name]}, {})


def traits_of(source):
    def shown(messages):
        try:
            return RendersHere().render(source, {"messages": messages, "add_generation_prompt": True}, 1.0)
        except TemplateRefused:
            return ""

    return probed(shown)


def user(text="hi"):
    return {"role": "user", "content": text}


def answer(text="yes"):
    return {"role": "assistant", "content": text}


def calls(*ids, arguments=None):
    function = {"name": "look", "arguments": {"word": "x"} if arguments is None else arguments}
    return answer("") | {"tool_calls": [{"id": name, "type": "function", "function": function} for name in ids]}


def result(name, text="found"):
    return {"role": "tool", "tool_call_id": name, "name": "look", "content": text}


def system(text="rules"):
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("name", "conversation", "shown"),
    [
        ("free", [system(), user(), answer(), system("late"), user()], "<system>late</>"),
        (
            "strict system",
            [system(), user(), answer(), system("late"), user()],
            "</><user><system-reminder>late</system-reminder></><user>hi</>",
        ),
        ("strict system", [system("a"), system("b"), user()], "<system>a\n\nb</><user>"),
        ("plain", [system("a"), user("b")], "<user>a\n\nb</><assistant>"),
        ("free", [user("a"), user("b")], "<user>a</><user>b</>"),
        ("alternating", [user("a"), user("b"), answer("c"), answer("d")], "<user>a\n\nb</><assistant>c\n\nd</>"),
        ("alternating", [user(), calls("abcdef123"), result("abcdef123"), user("b")], "<assistant>OK.</><user>b</>"),
        ("alternating", [user(), answer("a"), result("c"), answer("b")], "</><user>Go on.</><assistant>b"),
        ("alternating", [answer("a"), user("b")], "<user>[earlier messages are missing]</><assistant>a</>"),
        ("plain", [user(), calls("c"), result("c"), user("b")], 'Call of look: {"word": "x"}</>'),
        ("plain", [user(), calls("c"), result("c"), user("b")], "<user>Result of look: found\n\nb</>"),
        ("items", [user(), calls("c", arguments="no object"), result("c")], "[look arguments=no object]"),
        ("strict system", [user(), calls("c", arguments="no object")], '[look {"arguments": "no object"}]'),
        ("free", [user(), calls("c", arguments="no object")], "[look no object]"),
        ("single calls", [user(), calls("c", "d"), result("d", "2"), result("c", "1")], "<tool>1</><assistant>[look"),
        ("single calls", [user(), calls("c", "d"), result("c", "1"), user()], "<tool>[no result]</><user>"),
    ],
)
def test_a_template_gets_the_conversation_in_a_form_that_it_shows(name, conversation, shown):
    text = template(name).render(conversation)
    assert shown in text
    assert template(name).render(conversation, source=KINDS[name]) == text, "also where it comes with the request"


def test_ids_of_any_server_have_the_length_that_the_template_wants():
    text = template("alternating").render([user(), calls("call_0123456789abcdef"), result("call_0123456789abcdef")])
    again = template("alternating").render([user(), calls("call_0123456789abcdef"), result("x")])
    assert text.split("[")[1].split(" ")[0] == again.split("[")[1].split(" ")[0]
    assert "abcdef123" in template("alternating").render([user(), calls("abcdef123"), result("abcdef123")])


@pytest.mark.parametrize(
    ("name", "trait", "value"),
    [
        ("free", "system_anywhere", True),
        ("strict system", "system_anywhere", False),
        ("plain", "system_first", False),
        ("free", "alternates", False),
        ("alternating", "alternates", True),
        ("free", "string_arguments", True),
        ("items", "string_arguments", True),
        ("strict system", "string_arguments", False),
        ("alternating", "short_ids", True),
        ("single calls", "parallel_calls", False),
    ],
)
def test_probes_find_the_traits_of_a_template(name, trait, value):
    assert getattr(traits_of(KINDS[name]), trait) is value


def test_late_system_messages_that_a_template_shows_at_the_start_become_texts_of_the_user():
    source = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    text = ChatTemplate({"default": source}, {}).render([system(), user(), answer(), system("late"), user("b")])
    assert text.index("<assistant>yes") < text.index("<system-reminder>late")


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ raise_exception('never') }}", "x", "{{ messages[7].content }}"])
def test_a_failed_probe_fails_nothing(source):
    loaded = ChatTemplate({"default": source}, {})
    assert traits_of(source) == TemplateTraits()
    if source != "x":
        with pytest.raises(InvalidRequest):
            loaded.render([user()])


def test_a_template_for_tools_only_is_probed_with_tools():
    source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + KINDS["strict system"]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    loaded = ChatTemplate({"default": "x", "tool_use": source.replace("in tools %}", "in tools + [] %}", 1)}, {})
    conversation = [system(), user(), answer(), system("late"), calls("c"), result("c"), user()]
    text = loaded.render(conversation, tools)
    assert "<user><system-reminder>late</system-reminder></><assistant>[look" in text
    assert "<tool>found</>" in text


def test_a_conversation_that_the_template_refuses_is_tried_in_a_plainer_form():
    source = (
        "{% for m in messages %}{% if m.role == 'tool' and m.content == 'odd' %}{{ raise_exception('odd') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    loaded = ChatTemplate({"default": source}, {})
    assert "<user>Result of look: odd" in loaded.render([user(), calls("c"), result("c", "odd"), user()])
    with pytest.raises(InvalidRequest, match="never"):
        ChatTemplate({"default": "{{ raise_exception('never') }}"}, {}).render([user(), calls("c"), result("c")])


@pytest.mark.parametrize("name", ["free", "strict system", "alternating", "plain"])
def test_an_answer_goes_on_from_its_beginning_in_any_form_of_turns(name):
    conversation = [user(), calls("c"), result("c"), user(), calls("d"), user("b"), answer("So ")]
    text = template(name).render(conversation, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<assistant>So ")


def test_results_find_their_calls_in_linear_time():
    compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    number = 200
    names = [f"c{place}" for place in range(number)]
    conversation = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": Name(name)} for name in names]},
        *({"role": "tool", "tool_call_id": Name(name), "content": name} for name in reversed(names)),
        {"role": "tool", "tool_call_id": "other", "content": "late"},
    ]
    made = repaired(conversation, TemplateTraits(parallel_calls=False))
    assert [message["content"] for message in made if message["role"] == "tool"] == [*names, "late"]
    assert compared <= 4 * number
