"""Qwen3-Coder and Qwen 3.5: arguments in tags."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, OwnCall, Written

QWEN_CODER: Final = CallSyntax(
    forms=(
        "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
        "<function={name}>\n{parameters}</function>",
        "<tool_call>\n{json}\n</tool_call>",
    ),
    parameter="<parameter={key}>\n{value}\n</parameter>\n",
    written=Written(
        call="<tool_call>\n{json}\n</tool_call>",
        between="\n",
        own=(
            OwnCall(
                call="<tool_call>\n<function={name}>{arguments}\n</function>\n</tool_call>",
                argument="\n<parameter={key}>\n{value}\n</parameter>",
            ),
        ),
    ),
)
