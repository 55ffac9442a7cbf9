"""Families that write arguments in tags: Dots, Muse, Step 3, MiniCPM5, Seed-OSS, MiMo, Hunyuan 3 and 4, K2 Horizon,
Solar Open 2, Kimi K3.

Under a grammar some of them write calls as JSON within their marks.
"""

from typing import Final

from troupellm.models.chat_parsers.minimax import INVOKE, OWN_INVOKE, PARAMETER
from troupellm.models.chat_parsers.syntax import CallSyntax, OwnCall, Thinking, Written

DOTS: Final = CallSyntax(
    forms=("<dots_function_call>{json}</dots_function_call>", f"<dots_function_call> {INVOKE}", INVOKE),
    parameter=PARAMETER,
    written=Written(
        before="<dots_function_call>\n",
        call="{json}\n",
        own=(OWN_INVOKE,),
        after="</dots_function_call>",
    ),
)

_ATEM: Final = "<atem:invoke name={name}> {parameters} </atem:invoke>"
MUSE: Final = CallSyntax(
    forms=("<atem:function_calls>{json}</atem:function_calls>", f"<atem:function_calls> {_ATEM}", _ATEM),
    parameter="<atem:parameter name={key}>{value}</atem:parameter>",
    written=Written(before="<atem:function_calls>", call="{json}", between="\n", after="</atem:function_calls>"),
)
MUSE_THINK: Final = Thinking(
    opens=("to=self<|message|>",),
    closes=("<|eom|>", "<|eot|>"),
    header=("<|start|>", "<|message|>"),
    drops=("<|eom|>", "<|eot|>"),
)

_STEPTML: Final = "<steptml:invoke name={name}> {parameters} </steptml:invoke>"
STEP3: Final = CallSyntax(
    forms=(
        "<｜tool_call_begin｜>{json}<｜tool_call_end｜>",
        f"<｜tool_call_begin｜>{{word}}<｜tool_sep｜> {_STEPTML} <｜tool_call_end｜>",
    ),
    section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    parameter="<steptml:parameter name={key}>{value}</steptml:parameter>",
    written=Written(
        before="<｜tool_calls_begin｜>\n",
        call="<｜tool_call_begin｜>{json}<｜tool_call_end｜>\n",
        own=(
            OwnCall(
                call="<｜tool_call_begin｜>function<｜tool_sep｜>"
                '<steptml:invoke name="{name}">{arguments}</steptml:invoke><｜tool_call_end｜>\n',
                argument='<steptml:parameter name="{key}">{value}</steptml:parameter>',
            ),
        ),
        after="<｜tool_calls_end｜>",
    ),
)
STEP_THINK: Final = Thinking(begins="always")

MINICPM5: Final = CallSyntax(
    forms=("<function name={name}> {parameters} </function>", "<tool_call>\n{json}\n</tool_call>"),
    parameter="<param name={key}>{?<![CDATA[?}{value}{?]]>?}</param>",
    parameters=("<parameter name={key}>{?<![CDATA[?}{value}{?]]>?}</parameter>",),
    written=Written(call="<tool_call>\n{json}\n</tool_call>", between="\n"),
)

_ARGUMENT: Final = "\n<parameter={key}>{value}</parameter>"
SEED_OSS: Final = CallSyntax(
    forms=(
        "<seed:tool_call>{json}</seed:tool_call>",
        "<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
        "<function={name}>\n{parameters}</function>",
    ),
    parameter="<parameter={key}>{value}</parameter>\n",
    written=Written(
        call="<seed:tool_call>{json}</seed:tool_call>",
        own=(
            OwnCall(
                call="<seed:tool_call>\n<function={name}>{arguments}\n</function>\n</seed:tool_call>",
                argument=_ARGUMENT,
            ),
        ),
        between="\n",
    ),
)
SEED_THINK: Final = Thinking(opens=("<seed:think>",), closes=("</seed:think>",))

MIMO: Final = CallSyntax(
    forms=(
        "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
        "<function={name}>\n{parameters}</function>",
        "<tool_call>\n{json}\n</tool_call>",
    ),
    parameter="<parameter={key}>{value}</parameter>\n",
    written=Written(
        call="<tool_call>\n{json}\n</tool_call>",
        own=(OwnCall(call="<tool_call>\n<function={name}>{arguments}\n</function>\n</tool_call>", argument=_ARGUMENT),),
        between="\n",
    ),
)

HUNYUAN: Final = CallSyntax(
    forms=(
        "<tool_call{suffix}>{name}{?<tool_sep{suffix}>?}{parameters}</tool_call{suffix}>",
        "<tool_call{suffix}>{json}</tool_call{suffix}>",
    ),
    section=("<tool_calls{suffix}>", "</tool_calls{suffix}>"),
    parameter="<arg_key{suffix}>{key}</arg_key{suffix}>\n<arg_value{suffix}>{value}</arg_value{suffix}>",
    written=Written(
        before="<tool_calls{suffix}>",
        call="<tool_call{suffix}>{json}</tool_call{suffix}>",
        after="</tool_calls{suffix}>",
    ),
)
HUNYUAN_THINK: Final = Thinking(opens=("<think{suffix}>",), closes=("</think{suffix}>",), off_effort="no_think")

K2_HORIZON: Final = CallSyntax(
    forms=(
        "<ifm|tool_call>{json}</ifm|tool_call>",
        "<ifm|tool_call>{name}\n{parameters}</ifm|tool_call>",
    ),
    section=("<ifm|tool_calls>", "</ifm|tool_calls>"),
    parameter="<ifm|arg_key>{key}</ifm|arg_key>{?<ifm|arg_type>{type}</ifm|arg_type>?}"
    "<ifm|arg_value>{value}</ifm|arg_value>",
    written=Written(before="<ifm|tool_calls>", call="<ifm|tool_call>{json}</ifm|tool_call>", after="</ifm|tool_calls>"),
)
K2_THINK: Final = Thinking(
    opens=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
    closes=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
)

SOLAR_OPEN2: Final = CallSyntax(
    forms=(
        "<|tool_call:start|>{json}<|tool_call:end|>",
        "<|tool_call:start|>{name}\n{parameters}<|tool_call:end|>",
    ),
    parameter="<|tool_arg:start|>{key}<|tool_arg:value|>{value}<|tool_arg:end|>",
    written=Written(
        call="<|tool_call:start|>{json}<|tool_call:end|>",
        own=(
            OwnCall(
                call="<|tool_call:start|>{name}\n{arguments}<|tool_call:end|>",
                argument="<|tool_arg:start|>{key}<|tool_arg:value|>{value}<|tool_arg:end|>",
            ),
        ),
        between="\n",
    ),
)
SOLAR_THINK: Final = Thinking(opens=("<|think:start|>",), closes=("<|think:end|>",))

_K3_CALL: Final = "<|open|>call tool={name} {?index={word}?}<|sep|> {parameters} <|close|>call<|sep|>"
KIMI_K3: Final = CallSyntax(
    forms=(
        "<|open|>tools<|sep|>{json}<|close|>tools<|sep|>",
        f"<|open|>tools<|sep|> {_K3_CALL}",
        _K3_CALL,
    ),
    parameter="<|open|>argument key={key} {?type={type}?}<|sep|>{value}<|close|>argument<|sep|>",
    block="<|open|>json {?type={word}?}<|sep|>{arguments}<|close|>json<|sep|>",
    entities=True,
    written=Written(before="<|open|>tools<|sep|>", call="{json}", between="\n", after="<|close|>tools<|sep|>"),
)
KIMI_K3_THINK: Final = Thinking(
    opens=("<|open|>think<|sep|>",),
    closes=("<|close|>think<|sep|>",),
    drops=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
