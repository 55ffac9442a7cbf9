import json

import pytest

from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.hub.source import BUILTIN_FOLDER
from troupellm.protocol.errors import InvalidRequest, ModelLoadError

USER = [{"role": "user", "content": "hi"}]
SIMPLE = (
    "{% for message in messages %}\n"
    "    {% if message.role == 'system' %}\n"
    "        {% continue %}\n"
    "    {% endif %}\n"
    "{{ message.role }}: {{ message.content | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def load(folder, template=None, override=None, **config):
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTemplate.load(folder, override)


def test_a_template_renders_as_transformers_does(tmp_path):
    template = load(tmp_path, SIMPLE, eos_token={"content": "</s>"})
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": " hi "}]
    text = template.render(messages, add_generation_prompt=True)
    assert text == "user: hi</s>\nassistant:"
    transformers_template = pytest.importorskip("transformers.utils.chat_template_utils")
    theirs, _ = transformers_template.render_jinja_template(
        conversations=[messages], chat_template=SIMPLE, add_generation_prompt=True, eos_token="</s>"
    )
    assert text == theirs[0]


def test_a_template_can_use_its_usual_helpers(tmp_path):
    template = load(
        tmp_path,
        "{{ {'b': 'é<', 'a': 1} | tojson }}|{{ [1] | tojson(indent=1) }}|{% generation %}{{ messages[0].content }}"
        "{% endgeneration %}|{{ strftime_now('%Y') | length }}|{{ mood }}",
    )
    assert template.render(USER, mood="calm") == '{"b": "é<", "a": 1}|[\n 1\n]|hi|4|calm'


def test_a_template_can_refuse_messages(tmp_path):
    template = load(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(USER)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_what_goes_wrong_while_rendering_is_an_invalid_request(tmp_path, text):
    with pytest.raises(InvalidRequest) as caught:
        load(tmp_path, text).render(USER)
    assert caught.value.param == "messages"


def test_named_templates_and_tools(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    template = load(tmp_path, named)
    assert template.render(USER) == "plain"
    assert template.render(USER, [{"type": "function"}]) == "1 tools"


def test_the_file_wins_over_the_configuration_and_the_override_over_both(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("from the file é", encoding="utf-8")
    assert load(tmp_path, "from the configuration").render(USER) == "from the file é"
    assert load(tmp_path, "x", override="{{ 'from the text' }}").render(USER) == "from the text"
    other = tmp_path / "other.jinja"
    other.write_text("from another file")
    assert load(tmp_path, "x", override=str(other)).render(USER) == "from another file"


def test_an_override_that_is_neither_file_nor_template(tmp_path):
    with pytest.raises(ModelLoadError, match="chat_template"):
        load(tmp_path, "x", override="nowhere.jinja")


@pytest.mark.parametrize(
    "broken",
    [
        "{% if %}",
        "{{ x",
        pytest.param("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", id="deep"),
        pytest.param("{% for a in b %}" * 30 + "{% endfor %}" * 30, id="too many loops for Python"),
        5,
        [{"name": "default"}],
        [1],
    ],
)
def test_a_broken_template_is_a_load_error(tmp_path, broken):
    with pytest.raises(ModelLoadError, match="chat.template"):
        load(tmp_path, broken)


def test_without_a_template_chats_are_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="no chat template"):
        load(tmp_path).render(USER)


def test_the_last_message_can_be_continued(tmp_path):
    template = load(tmp_path, "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}")
    messages = [*USER, {"role": "assistant", "content": "Once upon "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "[user]hi</s>[assistant]Once upon "
    trimming = load(tmp_path, SIMPLE)
    text = trimming.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "user: hi\nassistant: Once upon"
    for short in ("s", "<", "</s>", ">"):  # which the end mark has too
        begun = [*USER, {"role": "assistant", "content": short}]
        text = template.render(begun, add_generation_prompt=False, continue_final_message=True)
        assert text == f"[user]hi</s>[assistant]{short}"
    changing = load(tmp_path, "{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="changes the last message"):
        changing.render(messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest):
        template.render(messages, add_generation_prompt=True, continue_final_message=True)
    empty = [*USER, {"role": "assistant", "content": None}]
    with pytest.raises(InvalidRequest):
        template.render(empty, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("name", ["messages_", "enable_thinking"])
def test_a_template_sees_further_variables(tmp_path, name):
    assert load(tmp_path, "{{ " + name + " }}").render(USER, **{name: "yes"}) == "yes"


@pytest.mark.parametrize("name", ["conversation", "bos_token", "_private", "a.b"])
def test_names_that_are_not_the_callers_to_set(tmp_path, name):
    with pytest.raises(InvalidRequest) as caught:
        load(tmp_path, "x").render(USER, **{name: "no"})
    assert caught.value.param == "chat_template_kwargs"


def test_the_builtin_template_takes_tools_and_tool_results():
    template = ChatTemplate.load(BUILTIN_FOLDER, None)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    text = template.render(messages, [{"type": "function", "function": {"name": "add"}}])
    assert '{"name": "add", "arguments": {"a": 1}}' in text
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "written",
    ["{{ call.function.arguments | tojson }}", "{{ call.function.arguments }}", "{{ '' + call.function.arguments }}"],
)
def test_arguments_of_past_calls_are_json_however_a_template_writes_them(written: str):
    source = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}" + written + "{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": {"city": "Zürich", "n": [1, None]}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert ChatTemplate({"default": source}, {}).render(messages) == '{"city": "Zürich", "n": [1, null]}'


def test_a_template_that_breaks_over_something_else_says_so():
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        ChatTemplate({"default": "{{ '' + 1 }}"}, {}).render([{"role": "user", "content": "x"}])
