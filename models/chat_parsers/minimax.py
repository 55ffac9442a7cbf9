"""MiniMax M2 (arguments in tags with a name) and M3 (arguments in tags that are their names)."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, OwnCall, Thinking, Written

INVOKE: Final = "<invoke name={name}> {parameters} </invoke>"
PARAMETER: Final = "<parameter name={key}>{value}</parameter>"
OWN_INVOKE: Final = OwnCall(
    call='<invoke name="{name}">{arguments}\n</invoke>\n', argument='\n<parameter name="{key}">{value}</parameter>'
)
_M3: Final = "]<]minimax[>["
_M3_INVOKE: Final = f"{_M3}<invoke name={{name}}> {{elements}} {_M3}</invoke>"

MINIMAX_M2: Final = CallSyntax(
    forms=(
        "<minimax:tool_call>{json}</minimax:tool_call>",
        f"<minimax:tool_call> {INVOKE}",
        INVOKE,
    ),
    parameter=PARAMETER,
    written=Written(
        before="<minimax:tool_call>\n",
        call="{json}\n",
        own=(OWN_INVOKE,),
        after="</minimax:tool_call>",
    ),
)

MINIMAX_M3: Final = CallSyntax(
    forms=(
        f"{_M3}<tool_call>{{json}}{_M3}</tool_call>",
        f"{_M3}<tool_call> {_M3_INVOKE}",
        _M3_INVOKE,
    ),
    prefix=_M3,
    written=Written(
        before=f"{_M3}<tool_call>\n",
        call="{json}\n",
        own=(
            OwnCall(
                call=f'{_M3}<invoke name="{{name}}">{{arguments}}{_M3}</invoke>\n',
                argument=f"{_M3}<{{key}}>{{value}}{_M3}</{{key}}>",
                nested=True,
            ),
        ),
        after=f"{_M3}</tool_call>",
    ),
)

MINIMAX_M2_THINK: Final = Thinking(begins="always")
MINIMAX_M3_THINK: Final = Thinking(opens=("<mm:think>",), closes=("</mm:think>",))
