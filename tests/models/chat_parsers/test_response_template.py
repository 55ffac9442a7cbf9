"""A tokenizer's own response template becomes a description, as far as it is made of marks."""

import json
from pathlib import Path
from typing import Any

import pytest
from cut_texts import read_in_all_cuts
from recorded_dialects import TOOLS
from tiny_model import write_tiny_model

from troupellm.models.chat_parsers.catalog import HF, chat_syntax_named
from troupellm.models.chat_parsers.response_template import compiled
from troupellm.models.chat_parsers.served_parser import chat_format_of
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ConfigError

THINKING = {"open": "<think>", "close": "</think>", "content": "text"}
FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
SMOL = {
    "thinking": THINKING,
    "tool_calls": {
        "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    "content": {"close": "<|im_end|>", "content": "text"},
}  # fmt: skip
CODER = {
    "tool_calls": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>", "close": "</tool_call>", "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>"},
        "transform": FUNCTION,
    },
}  # fmt: skip
COHERE = {
    "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
    "tool_calls": {
        "open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json", "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
    },
    "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
}  # fmt: skip
GEMMA = {
    "tool_calls": {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}, "transform": FUNCTION,
    },
}  # fmt: skip
NAMED = {
    "tool_calls": {
        "open_pattern": r"\[CALL\](?P<name>[\w.-]+)\[ARGS\]", "close": "[END]", "content": "json",
        "transform": FUNCTION,
    },
}  # fmt: skip
OSS = {
    "tool_calls": {
        "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>", "close": "<|call|>",
        "content": "json", "transform": FUNCTION,
    },
}  # fmt: skip
PARIS = ("get_weather", {"city": "Paris"})


def spec_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields}


@pytest.mark.parametrize(
    ("fields", "text", "content", "reasoning"),
    [
        (SMOL, '<think>Hm.</think>Hi.<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>',
         "Hi.", "Hm."),
        (CODER, "Hi.<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function></tool_call>",
         "Hi.", None),
        (COHERE, ('<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": '
         '"get_weather", "parameters": {"city": "Paris"}}]<|END_ACTION|>'), None, "Hm."),
        (GEMMA, '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>', None, None),
        (NAMED, '[CALL]get_weather[ARGS]{"city": "Paris"}[END]', None, None),
        (OSS, '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Paris"}<|call|>', None, None),
    ],
    ids=["json", "tags", "list", "pairs", "named", "channels"],
)  # fmt: skip
def test_answers_are_read_as_the_template_says(
    fields: dict[str, Any], text: str, content: str | None, reasoning: str | None
):
    found = read_in_all_cuts(chat_syntax_named(HF, HF, own=compiled(spec_of(fields))), text, TOOLS)
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [PARIS]
    assert (found.content, found.reasoning) == (content, reasoning)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_calls": {"open_pattern": "(a|b)+", "content": "json"}}, "open_pattern: only literal texts"),
        ({"tool_calls": {"open": "<a>", "close": "</a>", "content": "kv-lines"}}, "'kv-lines' needs the name"),
        ({"tool_calls": {"content": "json"}}, "tool_calls must have open"),
        ({"thinking": {"open": "<a>"}}, "thinking must have open and close"),
        ({"thinking": 3}, "an object of objects"),
        ({"tool_calls": {"open": ["{x}"], "content": "json"}}, "open must be a text without braces"),
    ],
)
def test_a_template_that_is_not_made_of_marks_is_refused(fields: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason) as caught:
        compiled(spec_of(fields))
    assert caught.value.param == "tool_call_parser"


def test_a_tokenizer_without_a_template_has_no_such_parser():
    with pytest.raises(ConfigError, match="no response_template"):
        chat_syntax_named(HF, "none")


@pytest.mark.parametrize("names", [{"tool_call_parser": "hf", "reasoning_parser": "hf"}, {}])
def test_a_model_folder_brings_its_template(tmp_path: Path, names: dict[str, str]):
    folder = write_tiny_model(tmp_path / "m")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(settings | {"response_template": spec_of(SMOL)}), encoding="utf-8")
    chat_format = chat_format_of(
        ModelConfig(model=str(folder), **names), Tokenizer.load(folder), ChatTemplate.load(folder, None), folder
    )
    assert chat_format.chat_syntax.calls is not None
    assert chat_format.chat_syntax.thinking is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_calls": {"open_pattern": "(a|b)+", "content": "json"}},
        {"thinking": {"open": "<a>", "close": "<a>b"}, "tool_calls": {"open": "<a", "content": "json"}},
    ],
)
def test_a_template_that_cannot_be_used_stops_only_those_that_ask_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
):
    folder = write_tiny_model(tmp_path / "m")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(settings | {"response_template": spec_of(fields)}), encoding="utf-8")
    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder, None)
    assert chat_format_of(ModelConfig(model=str(folder)), tokenizer, template, folder).chat_syntax.calls is None
    assert caplog.text.count("response_template is not used") == 1
    with pytest.raises(ConfigError):
        chat_format_of(ModelConfig(model=str(folder), tool_call_parser=HF), tokenizer, template, folder)


def test_marks_with_a_suffix_are_found_in_the_vocabulary(tmp_path: Path):
    folder = write_tiny_model(tmp_path / "m")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(settings | {"token_suffix": ":open"}), encoding="utf-8")
    names = {"tool_call_parser": "hy_v3", "reasoning_parser": "hy_v3"}
    chat_format = chat_format_of(
        ModelConfig(model=str(folder), **names), Tokenizer.load(folder), ChatTemplate.load(folder, None), folder
    )
    assert chat_format.chat_syntax.thinking.opens == ("<think:open>",)
