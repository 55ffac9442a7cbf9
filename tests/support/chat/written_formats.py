"""How each family writes calls and thoughts, as its published chat template does: writers of texts for tests."""

import json
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import msgspec

from troupellm.models.chat_parsers.catalog import TOOL_PARSERS

DISTINCT_PARSERS = sorted({id(found): name for name, found in sorted(TOOL_PARSERS.items(), reverse=True)}.values())
"""One name for each description of calls."""

Call = tuple[str, dict[str, Any]]
WriteCall = Callable[[str, dict[str, Any]], str]


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """One row: the parser's name, and how its texts are written."""

    parser: str
    call: WriteCall
    reasoning: str = ""
    """The parser of thoughts; that of the calls if there is one by the same name."""
    before: str = ""
    between: str = "\n"
    after: str = ""
    joined: Callable[[Sequence[Call]], str] | None = None
    """Writes all calls where they share a list."""
    thinks: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    lead: str = ""
    """The first mark of a call."""
    wraps: tuple[str, str] = ("", "")
    """Marks around the answer that are not shown."""
    suffix: str = ""

    def calls(self, calls: Sequence[Call]) -> str:
        if self.joined is not None:
            return self.joined(calls)
        return self.before + self.between.join([self.call(*call) for call in calls]) + self.after


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tags(call: str, parameter: str) -> WriteCall:
    """Arguments in tags: templates with NAME and ARGS, and with KEY and VALUE."""

    def write(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            parameter.replace("KEY", key).replace("VALUE", plain(value)) for key, value in arguments.items()
        )
        return call.replace("NAME", name).replace("ARGS", inner)

    return write


def objects(opens: str, closes: str, *, name_key: str = "name", key: str = "arguments") -> WriteCall:
    return lambda name, arguments: opens + dumped({name_key: name, key: arguments}) + closes


def listed(opens: str, closes: str, *, name_key: str = "name", key: str = "arguments") -> dict[str, Any]:
    """A list of objects between two marks, as the fields of a `Format`."""

    def joined(calls: Sequence[Call]) -> str:
        return opens + dumped([{name_key: name, key: arguments} for name, arguments in calls]) + closes

    return {"call": lambda name, arguments: joined([(name, arguments)]), "joined": joined, "lead": opens.strip()}


def dsml(mark: str, space: str = "") -> WriteCall:
    def write(name: str, arguments: dict[str, Any]) -> str:
        parameters = "".join(
            f'<{mark}{space}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{plain(value)}'
            f"</{mark}{space}parameter>\n"
            for key, value in arguments.items()
        )
        return f'<{mark}{space}invoke name="{name}">\n{parameters}</{mark}{space}invoke>'

    return write


def minimax_m3(name: str, arguments: dict[str, Any]) -> str:
    mark = "]<]minimax[>["

    def element(key: str, value: Any) -> str:
        if isinstance(value, dict):
            inner = "".join(element(*item) for item in value.items())
        elif isinstance(value, list):
            inner = "".join(element("item", entry) for entry in value)
        else:
            inner = plain(value)
        return f"{mark}<{key}>{inner}{mark}</{key}>"

    inner = "".join(element(*item) for item in arguments.items())
    return f'{mark}<invoke name="{name}">{inner}{mark}</invoke>'


def pairs(quote: str, opens: str, closes: str) -> WriteCall:
    def said(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{said(entry)}" for key, entry in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(said, value)) + "]"
        return dumped(value)

    return lambda name, arguments: f"{opens}call:{name}{said(arguments)}{closes}"


def kimi_k3(name: str, arguments: dict[str, Any]) -> str:
    kinds = {str: "string", bool: "boolean", list: "array", dict: "object", int: "integer", type(None): "null"}
    inner = "".join(
        f'<|open|>argument key="{escape(key)}" type="{kinds[type(value)]}"<|sep|>{plain(value)}<|close|>argument<|sep|>'
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{escape(name)}" index="1"<|sep|>{inner}<|close|>call<|sep|>'


def kimi_k3_block(name: str, arguments: dict[str, Any]) -> str:
    block = f'<|open|>json type="object"<|sep|>{dumped(arguments)}<|close|>json<|sep|>'
    return f'<|open|>call tool="{name}" index="1"<|sep|>{block}<|close|>call<|sep|>'


def k2_horizon(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(
        f"<ifm|arg_key>{key}</ifm|arg_key>"
        f"<ifm|arg_type>{'string' if isinstance(value, str) else 'other'}</ifm|arg_type>"
        f"<ifm|arg_value>{plain(value)}</ifm|arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<ifm|tool_call>{name}\n{inner}</ifm|tool_call>"


def plamo3(name: str, arguments: dict[str, Any]) -> str:
    def around(part: str, text: str) -> str:
        return f"<|plamo:begin_{part}:plamo|>{text}<|plamo:end_{part}:plamo|>"

    said = f"<|plamo:constrain|>json<|plamo:msg|>{dumped(arguments)}"
    return around("tool_request", around("tool_name", name) + around("tool_arguments", said))


def olmo3(calls: Sequence[Call]) -> str:
    lines = [f"{name}({', '.join(f'{key}={dumped(value)}' for key, value in args.items())})" for name, args in calls]
    return "<function_calls>" + "\n".join(lines) + "</function_calls>"


def apertus(calls: Sequence[Call]) -> str:
    return "<|tools_prefix|>" + dumped([{name: arguments} for name, arguments in calls]) + "<|tools_suffix|>"


def muse(calls: Sequence[Call]) -> str:
    write = tags('<atem:invoke name="NAME">\nARGS</atem:invoke>', '<atem:parameter name="KEY">VALUE</atem:parameter>\n')
    return "<|start|>assistant".join(
        f" to={name}<|message|><atem:function_calls>\n{write(name, arguments)}\n</atem:function_calls><|eom|>"
        for name, arguments in calls
    )


_INVOKE = tags('<invoke name="NAME">\nARGS</invoke>', '<parameter name="KEY">VALUE</parameter>\n')
_CODER = tags("<tool_call>\n<function=NAME>\nARGS</function>\n</tool_call>", "<parameter=KEY>\nVALUE\n</parameter>\n")
_GLM = tags("<tool_call>NAME\nARGS</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n")


def _around(opens: str, closes: str, write: WriteCall) -> dict[str, Any]:
    return {"before": opens + "\n", "call": write, "after": "\n" + closes, "lead": opens}


def _hunyuan(suffix: str, separator: str) -> dict[str, Any]:
    write = tags(
        f"<tool_call{suffix}>NAME{separator}\nARGS</tool_call{suffix}>",
        f"<arg_key{suffix}>KEY</arg_key{suffix}>\n<arg_value{suffix}>VALUE</arg_value{suffix}>\n",
    )
    thinks = (f"<think{suffix}>\n", f"\n</think{suffix}>\n")
    return _around(f"<tool_calls{suffix}>", f"</tool_calls{suffix}>", write) | {"suffix": suffix, "thinks": thinks}


def _alike(names: Sequence[str], **fields: Any) -> list[Format]:
    return [Format(parser=name, **fields) for name in names]


_COHERE = listed("<|START_ACTION|>", "<|END_ACTION|>", name_key="tool_name", key="parameters") | {
    "thinks": ("<|START_THINKING|>", "<|END_THINKING|>")
}

FORMATS: list[Format] = [
    Format(parser="deepseek_v32", **_around("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", dsml("｜DSML｜"))),
    Format(parser="deepseek_v4", **_around("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", dsml("｜DSML｜"))),
    Format(parser="deepseek_v4", **_around("<｜GCML｜toolcalls>", "</｜GCML｜toolcalls>", dsml("｜GCML｜"))),
    Format(parser="deepseek_v41", **_around("<｜DSML｜ calls>", "</｜DSML｜ calls>", dsml("｜DSML｜", " "))),
    Format(
        parser="minimax_m2",
        thinks=("", "\n</think>\n\n"),
        **_around("<minimax:tool_call>", "</minimax:tool_call>", _INVOKE),
    ),
    Format(
        parser="minimax_m3",
        thinks=("<mm:think>", "</mm:think>"),
        **_around("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>", minimax_m3),
    ),
    Format(parser="dots", **_around("<dots_function_call>", "</dots_function_call>", _INVOKE)),
    Format(
        parser="dots",
        call=objects("<dots_function_call>", "</dots_function_call>"),
        lead="<dots_function_call>",
    ),
    *_alike(
        ["muse", "muse_glimmer", "musespark1x"],
        call=lambda name, arguments: muse([(name, arguments)]),
        joined=muse,
        thinks=(" to=self<|message|>", "<|eom|><|start|>assistant"),
        wraps=(" to=user<|message|>", "<|eom|><|start|>assistant"),
    ),
    Format(
        parser="step3",
        thinks=("<think>", "</think>"),
        **_around(
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_end｜>",
            tags(
                "<｜tool_call_begin｜>function<｜tool_sep｜>"
                '<steptml:invoke name="NAME">ARGS</steptml:invoke><｜tool_call_end｜>',
                '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
            ),
        ),
    ),
    *_alike(["step3p5", "step5"], call=_CODER, lead="<tool_call>", thinks=("", "</think>")),
    *_alike(["nemotron_v3", "minicpmv", "granite_thinking_parser"], call=_CODER, lead="<tool_call>"),
    Format(
        parser="mimo",
        lead="<tool_call>",
        call=tags("<tool_call>\n<function=NAME>\nARGS</function>\n</tool_call>", "<parameter=KEY>VALUE</parameter>\n"),
    ),
    Format(
        parser="minicpm5",
        lead="<function",
        call=tags('<function name="NAME">ARGS</function>', '<param name="KEY"><![CDATA[VALUE]]></param>'),
    ),
    Format(
        parser="minicpm5",
        lead="<function",
        call=tags("<function name='NAME'>ARGS</function>", "<parameter name='KEY'>VALUE</parameter>"),
    ),
    Format(
        parser="seed_oss",
        lead="<seed:tool_call>",
        thinks=("<seed:think>", "</seed:think>"),
        call=tags(
            "<seed:tool_call>\n<function=NAME>\nARGS</function>\n</seed:tool_call>",
            "<parameter=KEY>VALUE</parameter>\n",
        ),
    ),
    *_alike(["ling3", "poolside_v1", "glm45", "glm47"], call=_GLM, lead="<tool_call>"),
    Format(parser="hy_v3", **_hunyuan("", "<tool_sep>")),
    Format(parser="hy_v3", **_hunyuan(":opensource", "<tool_sep:opensource>")),
    Format(parser="hy_v4", **_hunyuan(":open", "")),
    Format(
        parser="k2_horizon",
        thinks=("<ifm|think_fast>\n", "\n</ifm|think>\n"),
        **_around("<ifm|tool_calls>", "</ifm|tool_calls>", k2_horizon),
    ),
    Format(
        parser="k2_horizon",
        thinks=("<ifm|think>", "</ifm|think>"),
        **_around("<ifm|tool_calls>", "</ifm|tool_calls>", objects("<ifm|tool_call>", "</ifm|tool_call>")),
    ),
    Format(
        parser="solar_open2",
        lead="<|tool_call:start|>",
        thinks=("<|think:start|>", "<|think:end|>"),
        call=tags(
            "<|tool_call:start|>NAME\nARGS<|tool_call:end|>",
            "<|tool_arg:start|>KEY<|tool_arg:value|>VALUE<|tool_arg:end|>",
        ),
    ),
    *[
        Format(
            parser="kimi_k3",
            before="<|open|>tools<|sep|>",
            call=call,
            between="",
            after="<|close|>tools<|sep|><|close|>message<|sep|>",
            lead="<|open|>tools<|sep|>",
            thinks=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
            wraps=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        )
        for call in (kimi_k3, kimi_k3_block)
    ],
    Format(
        parser="gemma4",
        call=pairs('<|"|>', "<|tool_call>", "<tool_call|>"),
        lead="<|tool_call>",
        between="",
        thinks=("<|channel>thought\n", "<channel|>"),
    ),
    Format(
        parser="functiongemma",
        reasoning="none",
        call=pairs("<escape>", "<start_function_call>", "<end_function_call>"),
        lead="<start_function_call>",
        between="",
    ),
    Format(parser="cohere_command3", wraps=("<|START_RESPONSE|>", "<|END_RESPONSE|>"), **_COHERE),
    Format(parser="cohere_command4", wraps=("<|START_TEXT|>", "<|END_TEXT|>"), **_COHERE),
    Format(parser="jamba", reasoning="none", **listed("<tool_calls>", "</tool_calls>")),
    Format(parser="hunyuan_a13b", wraps=("<answer>\n", "\n</answer>"), **listed("<tool_calls>", "</tool_calls>")),
    Format(
        parser="ernie45",
        call=objects("<tool_call>\n", "\n</tool_call>"),
        lead="<tool_call>",
        wraps=("<response>\n", "\n</response>\n"),
    ),
    Format(
        parser="longcat",
        call=objects("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
        lead="<longcat_tool_call>",
        thinks=("<longcat_think>\n", "\n</longcat_think>\n"),
    ),
    Format(parser="nemotron_json", reasoning="qwen3", **listed("<TOOLCALL>", "</TOOLCALL>")),
    *[
        Format(parser="xlam", reasoning="qwen3", **listed(*marks))
        for marks in (("[TOOL_CALLS]", ""), ("<tool_call>", "</tool_call>"), ("```json\n", "\n```"), ("```\n", "\n```"))
    ],
    Format(parser="gigachat3", call=objects("<|function_call|>", ""), lead="<|function_call|>"),
    Format(parser="gigachat3", call=objects("function call<|role_sep|>\n", ""), lead="function call<|role_sep|>"),
    Format(
        parser="apertus",
        call=lambda name, arguments: apertus([(name, arguments)]),
        joined=apertus,
        lead="<|tools_prefix|>",
        thinks=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    Format(
        parser="olmo3",
        call=lambda name, arguments: olmo3([(name, arguments)]),
        joined=olmo3,
        lead="<function_calls>",
    ),
    Format(
        parser="plamo3",
        thinks=("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
        **_around("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>", plamo3),
    ),
    Format(
        parser="inkling",
        call=objects("<|message_model|><|content_invoke_tool_json|>", "<|end_message|>", key="args"),
        between="",
        after="<|content_model_end_sampling|>",
        lead="<|content_invoke_tool_json|>",
        thinks=("<|content_thinking|>", "<|end_message|><|message_model|>"),
        wraps=("<|content_text|>", "<|end_message|>"),
    ),
]
