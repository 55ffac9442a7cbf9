"""MiniMax M2 (arguments in tags with a name) and M3 (arguments in tags that are their names)."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, Thinking, Written

INVOKE: Final = "<invoke name={name}> {parameters} </invoke>"
PARAMETER: Final = "<parameter name={key}>{value}</parameter>"
_M3: Final = "]<]minimax[>["
_M3_INVOKE: Final = f"{_M3}<invoke name={{name}}> {{elements}} {_M3}</invoke>"

MINIMAX_M2: Final = CallSyntax(
    forms=(
        "<minimax:tool_call>{json}</minimax:tool_call>",
        f"<minimax:tool_call> {INVOKE}",
        INVOKE,
    ),
    parameter=PARAMETER,
    # A grammar cannot enforce a schema's rules for texts without quotes.
    written=Written(before="<minimax:tool_call>", call="{json}", between="\n", after="</minimax:tool_call>"),
)

MINIMAX_M3: Final = CallSyntax(
    forms=(
        f"{_M3}<tool_call>{{json}}{_M3}</tool_call>",
        f"{_M3}<tool_call> {_M3_INVOKE}",
        _M3_INVOKE,
    ),
    prefix=_M3,
    written=Written(before=f"{_M3}<tool_call>", call="{json}", between="\n", after=f"{_M3}</tool_call>"),
)

MINIMAX_M2_THINK: Final = Thinking(begins="always")
MINIMAX_M3_THINK: Final = Thinking(opens=("<mm:think>",), closes=("</mm:think>",))
