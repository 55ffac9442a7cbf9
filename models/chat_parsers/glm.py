"""GLM 4 (a name and a line of JSON), GLM 4.5 to 4.7 (arguments in tags)."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, OwnCall, Thinking, Written

GLM4: Final = CallSyntax(forms=(), bare="{name}\n{arguments}", written=Written(call="{name}\n{arguments}"))

GLM45: Final = CallSyntax(
    forms=("<tool_call>{name}\n{parameters}</tool_call>", "<tool_call>\n{json}\n</tool_call>"),
    parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    written=Written(
        call="<tool_call>\n{json}\n</tool_call>",
        between="\n",
        own=(
            OwnCall(
                call="<tool_call>{name}{arguments}</tool_call>",
                argument="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
            ),
            OwnCall(
                call="<tool_call>{name}{arguments}\n</tool_call>",
                argument="\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>",
            ),
        ),
    ),
)

LING_THINK: Final = Thinking(default_on=False)
"""Ling 3 thinks only on request."""
