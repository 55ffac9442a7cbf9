"""Stop strings count in an answer's content, and neither in thoughts nor in tool calls, however the text arrives."""

import random
from itertools import pairwise
from typing import Any

import pytest
from recorded_dialects import TOOLS

from troupellm.actors.stop_regions import RegionText, StopRegions
from troupellm.models.dialects.catalog import REASONING_PARSERS, TOOL_PARSERS, dialect_named
from troupellm.models.dialects.stop_scope import stop_scope

WEATHER = '{"name": "get_weather", "arguments": {"city": "STOP"}}'


def counted(parsers: tuple[str, str], pieces: list[str], *, inside: bool) -> tuple[str, str]:
    """The text in which stop strings count, and the rest."""
    scope = stop_scope(dialect_named(*parsers), TOOLS, inside=inside)
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
        (("openai", "openai_gptoss"), ("<|channel|>analysis<|message|>STOP<|end|><|start|>assistant<|channel|>final"
         "<|message|>b STOP"), "<|start|>assistantb STOP", False),
        (("openai", "openai_gptoss"), "<|channel|>commentary to=functions.now<|message|>STOP<|call|>",
         "<|channel|>commentary ", False),
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
    dialect: Any = dialect_named(
        name if name in TOOL_PARSERS else "none", name if name in REASONING_PARSERS else "none"
    )
    scope = stop_scope(dialect, TOOLS, inside=None)
    if scope is None:
        assert dialect.thinking is None
        assert dialect.calls is None
        return
    text = RegionText(StopRegions(scope.regions, None))
    mark = scope.regions[0].opens
    assert text.split(f"a{mark}")[0] == ("a", True)
