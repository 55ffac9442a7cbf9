"""Granite 3 and its function-calling models; Granite 4 writes like Hermes."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, Thinking, Written

GRANITE: Final = CallSyntax(
    forms=("<|tool_call|>{json}", "<tool_call>{json}{?</tool_call>?}"),
    bare="{json}",
    written=Written(before="<|tool_call|>[", call="{json}", between=", ", after="]"),
)

GRANITE_FUNCTIONS: Final = CallSyntax(
    forms=("<function_call>{json}",), written=Written(call="<function_call> {json}", between="\n")
)

GRANITE_THINK: Final = Thinking(
    opens=("Here is my thought process:", "Here's my thought process:", "<think>"),
    closes=("Here is my response:", "Here's my response:", "</think>"),
    drops=("<response>", "</response>"),
    switches=("thinking",),
    default_on=False,
)
