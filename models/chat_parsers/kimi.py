"""Kimi K2, whose calls carry ids of their own."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, Thinking, Written

_SECTION: Final = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

KIMI_K2: Final = CallSyntax(
    forms=("<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",),
    section=_SECTION,
    ids="numbered",
    written=Written(
        before=_SECTION[0],
        call="<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        after=_SECTION[1],
    ),
)

KIMI_THINK: Final = Thinking(switches=("thinking",))
