"""DeepSeek V3, R1 and V3.1."""

from typing import Final

from troupellm.models.dialects.syntax import CallSyntax, Thinking, Written

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
