"""Phi 4 mini."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, Written

PHI4_MINI: Final = CallSyntax(
    forms=("functools{json}", "<|tool_call|>{json}<|/tool_call|>"),
    written=Written(before="functools[", call="{json}", between=", ", after="]"),
)
