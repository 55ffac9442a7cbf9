"""Families that write arguments as objects: Cohere, Jamba, Hunyuan A13B, ERNIE 4.5, LongCat, Nemotron Nano, xLAM,
GigaChat, Apertus, OLMo 3, PLaMo 3, Inkling, Gemma."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, OwnCall, Thinking, Written

COHERE: Final = CallSyntax(
    forms=("<|START_ACTION|>\n{json}\n<|END_ACTION|>",),
    name_keys=("tool_name", "name"),
    argument_keys=("parameters", "arguments"),
    written=Written(before="<|START_ACTION|>[", call="{json}", between=", ", after="]<|END_ACTION|>"),
)
_COHERE_MARKS: Final = (("<|START_THINKING|>",), ("<|END_THINKING|>",))
COHERE3_THINK: Final = Thinking(
    opens=_COHERE_MARKS[0], closes=_COHERE_MARKS[1], drops=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
)
COHERE4_THINK: Final = Thinking(
    opens=_COHERE_MARKS[0], closes=_COHERE_MARKS[1], drops=("<|START_TEXT|>", "<|END_TEXT|>")
)

JAMBA: Final = CallSyntax(
    forms=("<tool_calls>\n{json}\n</tool_calls>",),
    written=Written(before="<tool_calls>[", call="{json}", between=", ", after="]</tool_calls>"),
)
ANSWER_THINK: Final = Thinking(drops=("<answer>", "</answer>"))
ERNIE_THINK: Final = Thinking(drops=("<response>", "</response>"))

LONGCAT: Final = CallSyntax(
    forms=("<longcat_tool_call>\n{json}\n</longcat_tool_call>",),
    written=Written(call="<longcat_tool_call>\n{json}\n</longcat_tool_call>", between="\n"),
)
LONGCAT_THINK: Final = Thinking(opens=("<longcat_think>",), closes=("</longcat_think>",))

NEMOTRON_JSON: Final = CallSyntax(
    forms=("<TOOLCALL>{json}</TOOLCALL>",),
    written=Written(before="<TOOLCALL>[", call="{json}", between=", ", after="]</TOOLCALL>"),
)

XLAM: Final = CallSyntax(
    forms=("[TOOL_CALLS]{json}", "<tool_call>{json}</tool_call>", "```{?json?}{json}```"),
    bare="{json}",
    unsure=("```",),
    written=Written(before="[TOOL_CALLS][", call="{json}", between=", ", after="]"),
)

GIGACHAT3: Final = CallSyntax(
    forms=("<|function_call|>{json}", "function\u2423call<|role_sep|>\n{json}"),
    written=Written(call="<|function_call|>{json}"),
)
GIGACHAT_THINK: Final = Thinking(drops=("<|message_sep|>",))

APERTUS: Final = CallSyntax(
    forms=("<|tools_prefix|>{named}<|tools_suffix|>",),
    written=Written(before="<|tools_prefix|>[", call="{named}", between=", ", after="]<|tools_suffix|>"),
)
APERTUS_THINK: Final = Thinking(opens=("<|inner_prefix|>",), closes=("<|inner_suffix|>",))

OLMO3: Final = CallSyntax(
    forms=("<function_calls>\n{lines}\n</function_calls>", "<function_calls>\n{json}\n</function_calls>"),
    written=Written(
        call="<function_calls>\n{json}\n</function_calls>",
        own=(
            OwnCall(
                call="{name}({arguments})",
                argument="{key}={value}",
                between=", ",
                values="json",
                around=("<function_calls>", "\n", "</function_calls>"),
            ),
        ),
        between="\n",
    ),
)


def _begin(name: str) -> str:
    return f"<|plamo:begin_{name}:plamo|>"


def _end(name: str) -> str:
    return f"<|plamo:end_{name}:plamo|>"


_PLAMO_HEAD: Final = (
    f"{_begin('tool_request')} {_begin('tool_name')}{{name}}{_end('tool_name')} {_begin('tool_arguments')}"
)
_PLAMO_TAIL: Final = f"{{arguments}}{_end('tool_arguments')} {_end('tool_request')}"
PLAMO3: Final = CallSyntax(
    forms=(f"{_PLAMO_HEAD}{{?<|plamo:constrain|>json?}}{{?<|plamo:msg|>?}}{_PLAMO_TAIL}",),
    section=(_begin("tool_requests"), _end("tool_requests")),
    written=Written(
        before=_begin("tool_requests"),
        call=f"{_PLAMO_HEAD.replace(' ', '')}<|plamo:constrain|>json<|plamo:msg|>{_PLAMO_TAIL.replace(' ', '')}",
        after=_end("tool_requests"),
    ),
)
PLAMO_THINK: Final = Thinking(opens=(_begin("think"),), closes=(_end("think"),))

INKLING: Final = CallSyntax(
    forms=("<|content_invoke_tool_json|>{json}<|end_message|>",),
    argument_keys=("args", "arguments", "parameters"),
    written=Written(call="<|content_invoke_tool_json|>{json}<|end_message|>", between="<|message_model|>"),
)
INKLING_THINK: Final = Thinking(
    opens=("<|content_thinking|>",),
    closes=("<|end_message|>", "<|content_model_end_sampling|>"),
    anywhere=True,
    drops=("<|message_model|>", "<|content_text|>", "<|end_message|>", "<|content_model_end_sampling|>"),
)

GEMMA4: Final = CallSyntax(
    forms=("<|tool_call>{json}<tool_call|>", "<|tool_call> call:{name}{pairs}<tool_call|>"),
    quote='<|"|>',
    written=Written(
        call="<|tool_call>{json}<tool_call|>",
        own=(
            OwnCall(
                call="<|tool_call>call:{name}{{arguments}}<tool_call|>",
                argument="{key}:{value}",
                between=",",
                quote='<|"|>',
            ),
        ),
    ),
)
GEMMA4_THINK: Final = Thinking(opens=("<|channel>thought",), closes=("<channel|>",), default_on=False)

FUNCTIONGEMMA: Final = CallSyntax(
    forms=(
        "<start_function_call>{json}<end_function_call>",
        "<start_function_call> call:{name}{pairs}<end_function_call>",
    ),
    quote="<escape>",
    written=Written(
        call="<start_function_call>{json}<end_function_call>",
        own=(
            OwnCall(
                call="<start_function_call>call:{name}{{arguments}}<end_function_call>",
                argument="{key}:{value}",
                between=",",
                quote="<escape>",
            ),
        ),
    ),
)
