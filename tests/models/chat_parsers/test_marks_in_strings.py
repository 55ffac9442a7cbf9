"""Lists and objects between tags: a mark within one of their strings is text."""

import json
from typing import Any

import pytest

from troupellm.models.chat_parsers.catalog import chat_syntax_named
from troupellm.tests.support.chat.cut_texts import Meaning, read_in_all_cuts

TOOLS: list[dict[str, Any]] = [{"name": "note", "parameters": {"properties": {"notes": {"type": "array"}}}}]
END = "\n</parameter>\n</function>\n</tool_call>"


def coder(value: str) -> str:
    return f"<tool_call>\n<function=note>\n<parameter=notes>\n{value}{END}"


def solar(value: str) -> str:
    return f"<|tool_call:start|>note\n<|tool_arg:start|>notes<|tool_arg:value|>{value}<|tool_arg:end|><|tool_call:end|>"


def read(parser: str, text: str, **options: Any) -> Meaning:
    return read_in_all_cuts(chat_syntax_named(parser, "none"), text, TOOLS, start="answer", **options)


@pytest.mark.parametrize(
    ("parser", "text", "notes"),
    [
        ("qwen3_coder", coder('["a </parameter> b"]'), ["a </parameter> b"]),
        ("qwen3_coder", coder('["</parameter></function></tool_call>"]'), ["</parameter></function></tool_call>"]),
        ("qwen3_coder", coder('["\\"</parameter>\\"", "\\\\", {"a": "</parameter>"}]'),
         ['"</parameter>"', "\\", {"a": "</parameter>"}]),
        ("qwen3_coder", coder("['5\" </parameter>', \"it's </parameter>\"]"), ['5" </parameter>', "it's </parameter>"]),
        ("qwen3_coder", coder('["a\n<parameter=x> b"]'), ["a\n<parameter=x> b"]),
        ("glm45", '<tool_call>note\n<arg_key>notes</arg_key>\n<arg_value>["</arg_value>"]</arg_value>\n</tool_call>',
         ["</arg_value>"]),
        ("minimax_m2", ('<minimax:tool_call><invoke name="note"><parameter name="notes">["</parameter></invoke>"]'
         "</parameter></invoke></minimax:tool_call>"), ["</parameter></invoke>"]),
        ("solar_open2", solar('["<|tool_arg:end|>"]'), ["<|tool_arg:end|>"]),
    ],
)  # fmt: skip
def test_a_mark_in_a_string_is_part_of_it(parser: str, text: str, notes: list[Any]) -> None:
    for behind in ("", "\nDone."):
        found = read(parser, text + behind)
        assert found == Meaning(behind.strip() or None, None, (("note", json.dumps({"notes": notes})),), whole=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (coder('["a'), '["a'),
        (coder('["a", "b]'), '["a", "b]'),
        (coder("it's so"), "it's so"),
        (coder('{"a": "</parameter>"}'), '{"a": "</parameter>"}'),
    ],
)
def test_the_first_mark_ends_a_value_that_is_no_list(text: str, value: str) -> None:
    """The string was never closed, there is no list, or another type was asked for."""
    for behind in ("", "\nDone."):
        found = read("qwen3_coder", text + behind)
        assert found == Meaning(behind.strip() or None, None, (("note", json.dumps({"notes": value})),), whole=True)


def test_a_special_token_ends_a_string() -> None:
    marks = frozenset({"<|tool_call:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>", "<|tool_call:end|>"})
    found = read("solar_open2", solar('["a'), hidden=marks)
    assert found.calls == (("note", '{"notes": "[\\"a"}'),)


def test_a_limit_behind_a_mark_in_a_string_leaves_the_arguments_open() -> None:
    found = read("qwen3_coder", coder('["a </parameter> b').removesuffix(END), cut=True)
    assert found == Meaning(None, None, (("note", '{"notes": '),), whole=False)


def test_a_string_that_is_never_closed_is_looked_at_for_so_long_only() -> None:
    """Else a model that forgets a quote would show nothing more of its answer."""
    long = "Much more. " * 8_000
    found = read("qwen3_coder", coder('["a') + long)
    assert found.calls == (("note", '{"notes": "[\\"a"}'),)
    assert (found.content or "").strip() == long.strip()
