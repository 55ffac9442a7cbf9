"""Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, and the built-in model."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, Thinking, Written

HERMES: Final = CallSyntax(
    forms=("<tool_call>\n{json}\n</tool_call>",),
    written=Written(call="<tool_call>\n{json}\n</tool_call>", between="\n"),
)

THINK: Final = Thinking()
