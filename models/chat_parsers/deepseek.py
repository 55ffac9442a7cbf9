"""DeepSeek V3, R1 and V3.1."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, OwnCall, Thinking, Written

_SECTION: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

DEEPSEEK_V3: Final = CallSyntax(
    forms=("<｜tool▁call▁begin｜>{word}<｜tool▁sep｜>{name}\n```json\n{arguments}\n``` <｜tool▁call▁end｜>",),
    section=_SECTION,
    written=Written(
        before=_SECTION[0],
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        between="\n",
        after=_SECTION[1],
    ),
)

DEEPSEEK_V31: Final = CallSyntax(
    forms=("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",),
    section=_SECTION,
    written=Written(
        before=_SECTION[0],
        call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        after=_SECTION[1],
    ),
)

DEEPSEEK_R1: Final = Thinking(begins="always")
DEEPSEEK_THINK: Final = Thinking(switches=("thinking",))


def _dsml(mark: str, space: str = "") -> tuple[str, str]:
    """The syntax of one call and one of its arguments behind a token such as ｜DSML｜."""
    call = f"<{mark}{space}invoke name={{name}}> {{parameters}} </{mark}{space}invoke>"
    parameter = f"<{mark}{space}parameter name={{key}} {{?string={{type}}?}}>{{value}}</{mark}{space}parameter>"
    return call, parameter


def _own_dsml(lead: str) -> OwnCall:
    return OwnCall(
        call=f'<{lead}invoke name="{{name}}">{{arguments}}\n</{lead}invoke>\n',
        argument=f'\n<{lead}parameter name="{{key}}" string="{{type}}">{{value}}</{lead}parameter>',
        types="flag",
    )


_DSML: Final = _dsml("｜DSML｜")
_GCML: Final = _dsml("｜GCML｜")
_SPACED: Final = _dsml("｜DSML｜", "\u2423")

DEEPSEEK_V32: Final = CallSyntax(
    forms=("<｜DSML｜function_calls>{json}</｜DSML｜function_calls>", f"<｜DSML｜function_calls> {_DSML[0]}", _DSML[0]),
    parameter=_DSML[1],
    written=Written(
        before="<｜DSML｜function_calls>\n",
        call="{json}\n",
        own=(_own_dsml("｜DSML｜"),),
        after="</｜DSML｜function_calls>",
    ),
)

DEEPSEEK_V4: Final = CallSyntax(
    forms=(
        "<｜DSML｜tool_calls>{json}</｜DSML｜tool_calls>",
        f"<｜DSML｜tool_calls> {_DSML[0]}",
        _DSML[0],
        _GCML[0],
    ),
    sections=tuple(
        (f"<{mark}{name}>", f"</{mark}{name}>")
        for mark, names in (("｜DSML｜", ("toolcalls", "tool")), ("｜GCML｜", ("tool_calls", "toolcalls", "tool")))
        for name in names
    ),
    parameter=_DSML[1],
    parameters=(_GCML[1],),
    written=Written(
        before="<｜DSML｜tool_calls>\n",
        call="{json}\n",
        own=(_own_dsml("｜DSML｜"),),
        after="</｜DSML｜tool_calls>",
    ),
)

DEEPSEEK_V41: Final = CallSyntax(
    forms=(
        "<｜DSML｜\u2423calls>{json}</｜DSML｜\u2423calls>",
        f"<｜DSML｜\u2423calls> {_SPACED[0]}",
        _SPACED[0],
    ),
    parameter=_SPACED[1],
    written=Written(
        before="<｜DSML｜ calls>\n",
        call="{json}\n",
        own=(_own_dsml("｜DSML｜ "),),
        after="</｜DSML｜ calls>",
    ),
)
