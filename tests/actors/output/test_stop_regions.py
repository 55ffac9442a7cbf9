"""Stop strings count in an answer's content, and neither in thoughts nor in tool calls, however the text arrives."""

import random
from itertools import pairwise
from typing import Any

import pytest
from recorded_dialects import TOOLS

from troupellm.actors.output.stop_regions import RegionText, StopRegions
from troupellm.models.chat_parsers.catalog import REASONING_PARSERS, TOOL_PARSERS, chat_syntax_named
from troupellm.models.chat_parsers.stop_scope import stop_scope

OSS = ("openai", "openai_gptoss")
WEATHER = '{"name": "get_weather", "arguments": {"city": "STOP"}}'


def counted(parsers: tuple[str, str], pieces: list[str], *, inside: bool) -> tuple[str, str]:
    """The text in which stop strings count, and the rest."""
    scope = stop_scope(chat_syntax_named(*parsers), TOOLS, inside=inside)
    assert scope is not None
    text = RegionText(StopRegions(scope.regions, scope.closes if inside else None))
    parts = [part for piece in pieces for part in text.split(piece)] + text.rest()
    assert "".join([said for said, _ in parts]) == "".join(pieces)
    return "".join([said for said, counts in parts if counts]), "".join([said for said, counts in parts if not counts])


@pytest.mark.parametrize(
    ("parsers", "text", "outside", "inside"),
    [
        (("hermes", "qwen3"), "<think>a STOP</think>b STOP", "b STOP", False),
        (("hermes", "qwen3"), "a STOP</think>b", "b", True),
        (("hermes", "qwen3"), f"a\n<tool_call>\n{WEATHER}\n</tool_call>\nb", "a\n\nb", False),
        (("hermes", "qwen3"), "Write <tool_call> and STOP", "Write <tool_call> and STOP", False),
        (("hermes", "none"), "a < b <tool", "a < b <tool", False),
        (("qwen3_coder", "none"), "a<tool_call>\n<function=send>\n<parameter=text>\nSTOP\n</parameter>\n</function>b",
         "ab", False),
        (("kimi_k2", "kimi_k2"), "a<|tool_calls_section_begin|>STOP<|tool_calls_section_end|>b", "ab", False),
        (("llama3_json", "none"), f"a\n{WEATHER}", "a\n", False),
        (("llama3_json", "none"), '{"city": "STOP"}', '{"city": "STOP"}', False),
        (("pythonic", "none"), "[get_weather(city='STOP')]b", "b", False),
        (OSS, ("<|channel|>analysis<|message|>STOP<|end|><|start|>assistant<|channel|>final"
         "<|message|>b STOP"), "b STOP", False),
        (OSS, "<|channel|>commentary to=functions.now<|message|>STOP<|call|>",
         "", False),
        (OSS, "<|channel|>commentary to=now <|constrain|>json<|message|>STOP<|call|>", "", False),
        (OSS, " to=now<|channel|>commentary<|message|>STOP<|end|><|start|>assistant<|message|>b",
         " b", False),
        (OSS, "<|channel|>final<|message|>to=functions.now STOP", "to=functions.now STOP", False),
        (OSS, "<|channel|>commentary to=else<|message|>a STOP", "a STOP", False),
        (OSS, "a to=functions.now STOP", "a to=functions.now STOP", False),
        (("hermes", "qwen3"), "Use <think> and STOP", "Use <think> and STOP", False),
        (("hermes", "qwen3"), "\n<think>STOP</think>Use <think> and STOP", "\nUse <think> and STOP", False),
        (("none", "inkling"), "a<|content_thinking|>STOP<|end_message|>b", "ab", False),
        (("qwen3_coder", "none"), "Use <function=x> and STOP", "Use <function=x> and STOP", False),
        (("qwen3_coder", "none"), "Use <function=nowhere>STOP", "Use <function=nowhere>STOP", False),
        (("qwen3_coder", "none"), "a<function=now>STOP</function>b", "ab", False),
        (("glm45", "none"), "a<tool_call>now\nSTOP</tool_call>b", "ab", False),
        (("glm45", "none"), "Use <tool_call> and STOP", "Use <tool_call> and STOP", False),
        (("glm4", "none"), "now\n{STOP", "", False),
        (("glm4", "none"), "Not now\n{STOP", "Not now\n{STOP", False),
        (("glm4", "qwen3"), "<think>STOP</think>\nnow\n{STOP", "\n", False),
        (("pythonic", "none"), "See [now(STOP)]", "See [now(STOP)]", False),
        (("none", "minimax_m2"), "a STOP</think>b", "b", True),
        (("hermes", "none"), "<tool_call>" + " " * 300 + "STOP", "<tool_call>" + " " * 300 + "STOP", False),
        (("hermes", "none"), "<tool_call>" + " " * 300 + WEATHER, "<tool_call>" + " " * 300 + WEATHER, False),
    ],
)  # fmt: skip
def test_stop_strings_count_in_content_only(parsers: tuple[str, str], text: str, outside: str, inside: bool):
    whole = counted(parsers, [text], inside=inside)
    assert whole[0] == outside
    assert counted(parsers, list(text), inside=inside) == whole
    chance = random.Random(len(text))
    for _ in range(25):
        edges = [0, *sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(1, 12))), len(text)]
        assert counted(parsers, [text[a:b] for a, b in pairwise(edges)], inside=inside) == whole


@pytest.mark.parametrize("name", sorted({*TOOL_PARSERS, *REASONING_PARSERS}))
def test_every_format_has_regions_that_can_be_told_apart(name: str):
    chat_syntax: Any = chat_syntax_named(
        name if name in TOOL_PARSERS else "none", name if name in REASONING_PARSERS else "none"
    )
    scope = stop_scope(chat_syntax, TOOLS, inside=None)
    if scope is None:
        assert chat_syntax.thinking is None
        assert chat_syntax.calls is None
        return
    region = scope.regions[0]
    parts = RegionText(StopRegions(scope.regions, None)).split(f"{'a' if region.at == 'any' else ''}{region.opens}")
    assert parts[0] == (("a", True) if region.at == "any" else (region.opens, False))


def test_a_name_that_is_part_of_another_one_begins_a_region():
    tools: Any = [{"function": {"name": name, "parameters": {}}} for name in ("get", "forget")]
    scope = stop_scope(chat_syntax_named("glm4", "qwen3"), tools, inside=False)
    assert scope is not None
    for name, text in (("get", "get\n{STOP"), ("forget", "forget\n{STOP")):
        assert RegionText(StopRegions(scope.regions, None)).split(text) == [(f"{name}\n{{", False), ("STOP", False)]
