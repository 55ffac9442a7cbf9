"""The effect of a request on a dialect: where answers begin, which tokens stay, which guides bind them."""

import json
from pathlib import Path

import msgspec
import pytest

from troupellm.actors.output.detokenizer import TextTables
from troupellm.models.chat_parsers.catalog import chat_syntax_named
from troupellm.models.chat_parsers.served_parser import ChatFormat, ChatParser
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import ChatPrompt
from troupellm.protocol.params.chat_events import Content
from troupellm.protocol.params.guide import EarlyEnd, GuideSpec
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.params.tools import NO_TOOLS, ToolUse, tool_use
from troupellm.tests.support.chat.recorded_dialects import TOOLS
from troupellm.tests.support.checkpoints.tiny_model import CHAT_TEMPLATE
from troupellm.tests.support.workers.echo_worker import write_echo_model

USER = ({"role": "user", "content": "<think> is a mark"},)
OFF = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
SWITCHED = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n" + OFF + "{% endif %}")
OPENED = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""More than may be done while requests come."""


@pytest.fixture
def chat_format(tmp_path: Path):
    def make(tools: str, reasoning: str, template: str = CHAT_TEMPLATE, special: tuple[str, ...] = ()) -> ChatFormat:
        folder = write_echo_model(tmp_path / "m", special=special, template=template)
        return ChatFormat(chat_syntax_named(tools, reasoning), Tokenizer.load(folder), ChatTemplate.load(folder, None))

    return make


def chat_parser_of(chat_format: ChatFormat, use: ToolUse = NO_TOOLS, **prompt: object) -> ChatParser:
    chat_parser = chat_format.chat_parser(
        ChatPrompt(**({"messages": USER} | prompt)), use, token=lambda nbytes: "0" * 2 * nbytes
    )
    assert chat_parser is not None
    return chat_parser


def test_plain_models_are_not_parsed(chat_format):
    assert chat_format("none", "none").chat_parser(ChatPrompt(messages=USER), token=str) is None
    assert chat_format("hermes", "none").chat_parser(ChatPrompt(messages=USER), token=str) is None


@pytest.mark.parametrize(
    ("template", "kwargs", "after", "inside"),
    [
        (SWITCHED, None, "", None),
        (SWITCHED, {"enable_thinking": True}, "", None),
        (SWITCHED, {"enable_thinking": False}, "", False),
        (OPENED, None, "</think>", True),
    ],
)
def test_guides_wait_for_the_end_of_thoughts(chat_format, template, kwargs, after, inside):
    chat_parser = chat_parser_of(chat_format("hermes", "qwen3", template), template_kwargs=kwargs)
    params = chat_parser.applied(SamplingParams(guide=GuideSpec(kind="json_object")))
    assert params.guide.after == after
    assert (params.guide.kind == "structural_tag") is (inside is None)
    assert (params.thinking.start, params.thinking.end, params.thinking.open) == ("<think>", "</think>", inside)


@pytest.mark.parametrize(("reasoning", "count"), [("qwen3", 14), ("granite", 10), ("openai_gptoss", 8), ("none", 0)])
def test_each_usual_way_to_begin_an_answer_is_looked_at_once(chat_format, monkeypatch, reasoning, count):
    """When the model is loaded, and of heavy templates each may take as long as a rendering may."""
    seen: list[dict[str, object]] = []

    def render(template, messages, **kwargs):
        seen.append(kwargs)
        return ""

    monkeypatch.setattr(ChatTemplate, "render", render)
    made = chat_format("none", reasoning)
    assert len(seen) == len({str(sorted(kwargs.items())) for kwargs in seen}) == count
    if count:
        chat_parser_of(made, template_kwargs=made.with_effort(None, "low"))
    assert len(seen) == count


def test_a_dialect_whose_answers_always_begin_with_thoughts(chat_format):
    chat_parser = chat_parser_of(chat_format("none", "deepseek_r1"))
    assert chat_parser.applied(SamplingParams()).thinking.open is True
    assert chat_parser.after == "</think>"


def test_where_the_prompt_is_behind_the_thoughts_no_budget_ends_them_within_the_answer(chat_format):
    made = chat_format("none", "deepseek_r1", SWITCHED)
    begun = [*USER, {"role": "assistant", "content": "so far"}]
    going_on = chat_parser_of(made, messages=begun, add_generation_prompt=False, continue_final_message=True)
    for chat_parser in (chat_parser_of(made, template_kwargs={"enable_thinking": False}), going_on):
        assert chat_parser.applied(SamplingParams()).thinking.open is False


def test_a_model_that_thinks_only_when_told_to(chat_format):
    made = chat_format("granite", "granite")
    assert chat_parser_of(made).after == ""
    guide = GuideSpec(kind="json_object")
    assert chat_parser_of(made).applied(SamplingParams(guide=guide)).guide == guide
    thinking = chat_parser_of(made, template_kwargs={"thinking": True}).applied(SamplingParams(guide=guide)).guide
    reasoning, plain = json.loads(thinking.source)["format"]["elements"]
    marks = [(tag["begin"], tag["end"]) for tag in reasoning["tags"]]
    assert marks[0] == ("Here is my thought process:", "Here is my response:")
    assert marks[2] == ("<think>", "</think>")
    assert plain == {"type": "json_schema", "json_schema": {"type": "object"}}


def test_a_guide_that_cannot_stand_behind_others_waits_for_the_end_of_thoughts(chat_format):
    old = GuideSpec(kind="structural_tag", source='{"structures": [], "triggers": []}')
    chat_parser = chat_parser_of(chat_format("hermes", "qwen3"))
    assert chat_parser.applied(SamplingParams(guide=old)).guide == msgspec.structs.replace(old, after="</think>")


def test_an_answer_that_is_continued_begins_where_it_was_left(chat_format):
    made = chat_format("hermes", "qwen3")
    for content, inside in (("<think>one", True), ("<think>one</think>two", False), ("two", False)):
        messages = [*USER, {"role": "assistant", "content": content}]
        chat_parser = chat_parser_of(made, messages=messages, add_generation_prompt=False, continue_final_message=True)
        assert chat_parser.thinking.open is inside


def test_a_guide_waits_for_no_channel_where_the_prompt_is_in_the_answers(chat_format):
    """It would wait for ever, and let no end come meanwhile."""
    made, params = chat_format("openai", "openai_gptoss"), SamplingParams(guide=GuideSpec(kind="json_object"))
    begun = [*USER, {"role": "assistant", "content": '{"a":'}]
    assert chat_parser_of(made).applied(params).guide.after == "<|channel|>final<|message|>"
    going_on = chat_parser_of(made, messages=begun, add_generation_prompt=False, continue_final_message=True)
    assert going_on.applied(params).guide == params.guide


def test_where_calls_are_messages_a_guide_that_sleeps_lets_them_end(chat_format):
    """A call comes instead of the channel that the guide waits for."""
    made, params = chat_format("openai", "openai_gptoss"), SamplingParams(guide=GuideSpec(kind="json_object"))
    ends = [chat_parser_of(made, use).applied(params).guide.early_end for use in (NO_TOOLS, tool_use(TOOLS))]
    assert ends[0] is None
    assert ends[1] == EarlyEnd(
        token="<|call|>",
        starts=("<|start|>", "<|channel|>"),
        opens="<|message|>",
        ends=("<|end|>", "<|return|>", "<|call|>"),
        recipient="to=functions.",
    )


def test_effort_is_handed_to_the_template_and_turns_thinking_off(chat_format):
    made = chat_format("hermes", "qwen3", SWITCHED)
    assert made.with_effort(None, None) is None
    assert made.with_effort({"a": 1}, None) == {"a": 1}
    high = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    assert made.with_effort(None, "high") == high
    assert made.with_effort({"enable_thinking": False}, "high") == high | {"enable_thinking": False}
    assert made.with_effort(None, "none")["enable_thinking"] is False
    assert chat_format("none", "none").with_effort(None, "low") == {"reasoning_effort": "low"}


def test_marks_that_are_special_tokens_stay_in_the_text_and_others_do_not(chat_format):
    made = chat_format("mistral", "mistral", special=("[TOOL_CALLS]", "[THINK]", "[/THINK]", "[OTHER]"))
    use = tool_use(TOOLS)
    ids = {text: made.tokenizer.added_tokens[text] for text in ("[TOOL_CALLS]", "[THINK]", "[/THINK]", "[OTHER]")}
    assert chat_parser_of(made).kept_token_ids == (ids["[THINK]"], ids["[/THINK]"])
    kept = chat_parser_of(made, use).applied(SamplingParams()).kept_token_ids
    assert kept == (ids["[TOOL_CALLS]"], ids["[THINK]"], ids["[/THINK]"])
    tables = TextTables(made.tokenizer)
    tokens = [ids["[THINK]"], 65, ids["[OTHER]"], 66, ids["[TOOL_CALLS]"]]
    shown = {keep: tables.decoder(skip_special_tokens=True, kept=keep).feed(tokens) for keep in ((), kept)}
    assert shown[()] == made.tokenizer.decode([65, 66])
    assert shown[kept].startswith("[THINK]")
    assert shown[kept].endswith("[TOOL_CALLS]")
    assert "[OTHER]" not in shown[kept]
    tables.trusted = False
    assert tables.decoder(skip_special_tokens=True, kept=kept).feed(tokens) == shown[kept]


def test_tool_choice_required_and_a_regex_exclude_each_other(chat_format):
    made = chat_format("hermes", "none")
    guided = SamplingParams(guide=GuideSpec(kind="regex", source="a+", field="structured_outputs.regex"))
    with pytest.raises(InvalidRequest, match="structured_outputs.regex and tool_choice exclude") as caught:
        chat_parser_of(made, tool_use(TOOLS, "required")).applied(guided)
    assert caught.value.param == "structured_outputs.regex"


@pytest.mark.parametrize("tools", ["hermes", "openai"])
@pytest.mark.parametrize("field", ["response_format", "response_format.json_schema"])
def test_where_a_call_must_come_the_format_of_texts_says_nothing(chat_format, tools, field):
    chat_parser = chat_parser_of(chat_format(tools, "none"), tool_use(TOOLS, "required"))
    guided = SamplingParams(guide=GuideSpec(kind="json_object", field=field))
    assert chat_parser.applied(guided).guide == chat_parser.applied(SamplingParams()).guide == chat_parser.guide
    assert chat_parser.guide is not None


@pytest.mark.parametrize(
    ("guide", "plain"),
    [
        (GuideSpec(kind="json_object"), {"type": "json_schema", "json_schema": {"type": "object"}}),
        (GuideSpec(kind="json_schema", source='{"a": 1}'), {"type": "json_schema", "json_schema": {"a": 1}}),
        (GuideSpec(kind="regex", source="a+"), {"type": "regex", "pattern": "a+"}),
        (GuideSpec(kind="grammar", source="start: x"), {"type": "grammar", "grammar": "start: x"}),
    ],
)
def test_an_answer_of_some_form_may_call_tools_instead(chat_format, guide, plain):
    chat_parser = chat_parser_of(chat_format("hermes", "none"), tool_use(TOOLS))
    combined = chat_parser.applied(SamplingParams(guide=guide)).guide
    calls, other = json.loads(combined.source)["format"]["elements"]
    assert other == plain
    assert calls["tags"][0]["begin"] == '<tool_call>\n{"name": "get_weather", "arguments": '
    assert calls["tags"][0]["end"] == "}\n</tool_call>"


def test_only_strict_tools_are_bound_where_nobody_must_call(chat_format):
    made = chat_format("hermes", "none")
    assert chat_parser_of(made, tool_use(TOOLS)).guide is None
    strict = [{"function": tool["function"] | {"strict": tool["function"]["name"] == "now"}} for tool in TOOLS]
    wanted = json.loads(chat_parser_of(made, tool_use(strict)).guide.source)["format"]
    assert (wanted["type"], wanted["triggers"]) == ("triggered_tags", ["<tool_call>"])
    schemas = [tag["content"]["json_schema"] for tag in wanted["tags"]]
    nothing = {"type": "object", "additionalProperties": False, "properties": {}}
    assert schemas == [{"type": "object"}, {"type": "object"}, nothing]


def test_ids_have_the_shape_of_the_family(chat_format):
    use = tool_use(TOOLS)
    shapes = {"hermes": "call_" + "0" * 24, "mistral": "0" * 9, "kimi_k2": "functions.now:0"}
    for name, shape in shapes.items():
        assert chat_parser_of(chat_format(name, "none"), use)._new_id(0, "now") == shape


OPENED_BY_NAME = CHAT_TEMPLATE.replace(
    "assistant\n{% endif %}", "assistant\n{% if messages | length > 1 %}<think>\n{% endif %}{% endif %}"
)
"""Opens thoughts in longer chats only, so that a chat of one message does not show it."""


@pytest.mark.parametrize(
    ("template", "messages", "thinks"),
    [
        (OPENED, [*USER], True),
        (OPENED, [{"role": "user", "content": "</think>"}], True),
        (CHAT_TEMPLATE, [*USER], False),
        (CHAT_TEMPLATE, [*USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}], False),
        (CHAT_TEMPLATE, [{"role": "user", "content": [{"type": "text", "text": "<think>"}]}], False),
        (OPENED_BY_NAME, [*USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}], True),
        (OPENED_BY_NAME, [*USER], False),
        (CHAT_TEMPLATE, [{"role": "user", "content": "word " * 5000 + "<think> and more"}], False),
        (OPENED, [{"role": "user", "content": "word " * 5000 + "</think> and more"}], True),
    ],
)
def test_the_rendered_prompt_tells_whether_an_answer_begins_in_thoughts(chat_format, template, messages, thinks):
    """Marks in the texts of messages say nothing of the answer."""
    made = chat_format("hermes", "qwen3", template)
    text = made.template.render(messages, add_generation_prompt=True)
    ids = made.tokenizer.encode(text, add_special_tokens=False)
    chat_parser = chat_parser_of(made, messages=messages)
    parser = chat_parser.new_parser(ids)
    pieces = parser.feed("Hm.</think>Hi.") + parser.finish()
    assert [type(piece).__name__ for piece in pieces] == (["Reasoning", "Content"] if thinks else ["Content"])


WITH_CALLS = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.reasoning_content or '' }}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}",
)


@pytest.mark.parametrize("template", [WITH_CALLS, WITH_CALLS.replace("<|im_start|>", "# ").replace("<|im_end|>", "")])
@pytest.mark.parametrize(
    "said",
    [
        {"tool_calls": [{"function": {"name": "write", "arguments": {"text": "open with\n<think> é here"}}}]},
        {"tool_calls": [{"function": {"name": "write", "arguments": '{"text": "open with <think>"}'}}]},
        {"reasoning_content": "The mark is <think>."},
    ],
)
def test_marks_in_earlier_calls_and_thoughts_say_nothing_of_the_answer(chat_format, template, said):
    made = chat_format("hermes", "qwen3", template)
    messages = [*USER, {"role": "assistant", "content": None} | said, {"role": "tool", "content": "ok"}]
    ids = made.tokenizer.encode(made.template.render(messages, add_generation_prompt=True), add_special_tokens=False)
    parser = chat_parser_of(made, messages=messages).new_parser(ids)
    assert parser.feed("The file is written.") + parser.finish() == [Content("The file is written.")]


def test_a_mark_before_the_last_special_token_says_nothing_of_the_answer(chat_format):
    """It stands in a text that no message has."""
    told = CHAT_TEMPLATE.replace("{% if add_", "<|im_start|>system\nUse <think>.<|im_end|>\n{% if add_")
    made = chat_format("hermes", "qwen3", told)
    assert made.tokenizer.added_tokens["<|im_start|>"] in made.tokenizer.special_token_ids
    messages = [{"role": "user", "content": "Hi."}]
    ids = made.tokenizer.encode(made.template.render(messages, add_generation_prompt=True), add_special_tokens=False)
    parser = chat_parser_of(made, messages=messages).new_parser(ids)
    assert parser.feed("Hi.") + parser.finish() == [Content("Hi.")]


def test_stop_strings_of_a_chat_count_in_content_only(chat_format):
    made = chat_format("hermes", "qwen3")
    scope = chat_parser_of(made, tool_use(TOOLS)).applied(SamplingParams(stop="x")).stop_scope
    assert [region.opens for region in scope.regions] == ["<think>", "<tool_call>"]
    assert scope.open is None
    assert chat_parser_of(made).applied(SamplingParams()).stop_scope is None
    guided = SamplingParams(stop="x", guide=GuideSpec(kind="json_object"))
    assert chat_parser_of(made).applied(guided).stop_scope.open is False
    assert chat_parser_of(chat_format("none", "deepseek_r1")).applied(guided).stop_scope.open is True


def test_an_answer_under_a_guide_is_read_as_the_guide_lets_it_begin(chat_format):
    """The guide is made before the prompt is rendered."""
    made = chat_format("hermes", "qwen3", OPENED_BY_NAME)
    messages = [*USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    text = made.template.render(messages, add_generation_prompt=True)
    ids = made.tokenizer.encode(text, add_special_tokens=False)
    for guide, kinds in ((None, ["Reasoning"]), (GuideSpec(kind="json_object"), ["Content"])):
        chat_parser = chat_parser_of(made, messages=messages)
        chat_parser.applied(SamplingParams(guide=guide))
        parser = chat_parser.new_parser(ids)
        assert [type(piece).__name__ for piece in parser.feed("{}") + parser.finish()] == kinds
