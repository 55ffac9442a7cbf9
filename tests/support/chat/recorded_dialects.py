"""Recorded texts of models of each family, and their meaning."""

from typing import Any

import msgspec

from troupellm.protocol.params.outputs import ToolCall

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["C", "F"]}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "send",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "to": {"type": "array", "items": {"type": "string"}},
                    "options": {"type": "object"},
                    "loud": {"type": "boolean"},
                    "note": {"type": ["string", "null"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tool_parser: str = "none"
    reasoning_parser: str = "none"
    text: str
    content: str | None = None
    reasoning: str | None = None
    calls: tuple[tuple[str, Any], ...] = ()
    """Name and arguments; arguments that are text stay as they are, anything else is compared as JSON."""
    ids: tuple[str, ...] = ()
    """Of calls that bring their own."""
    start: str = "free"


def _call(name: str, arguments: Any) -> tuple[str, Any]:
    return name, arguments


PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": "Rome", "days": 2})
NOW = ("now", {})
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, SEP, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

CASES = (
    # hermes, and the built-in model
    Case(name="hermes-one", tool_parser="hermes",
        text='<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', calls=(PARIS,)),
    Case(name="hermes-two-with-text", tool_parser="hermes",
        text='I will look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\nDone.',
        content="I will look.\nDone.", calls=(PARIS, ROME)),
    Case(name="hermes-arguments-first", tool_parser="hermes",
        text='<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', calls=(PARIS,)),
    Case(name="hermes-arguments-as-text", tool_parser="hermes",
        text='<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        calls=(PARIS,)),
    Case(name="hermes-no-arguments", tool_parser="hermes",
        text='<tool_call>\n{"name": "now"}\n</tool_call><tool_call>{"name":"now","arguments":null}</tool_call>',
        calls=(NOW, NOW)),
    Case(name="hermes-function-inside", tool_parser="hermes",
        text='<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}</tool_call>', calls=(NOW,)),
    Case(name="hermes-surplus-bracket", tool_parser="hermes",
        text='<tool_call>\n{"name": "now", "arguments": {}}}\n</tool_call>', calls=(NOW,)),
    Case(name="hermes-mark-in-text", tool_parser="hermes",
        text='<tool_call>{"name": "send", "arguments": {"text": "</tool_call> <tool_call>"}}</tool_call>',
        calls=(("send", {"text": "</tool_call> <tool_call>"}),)),
    Case(name="hermes-several-in-one", tool_parser="hermes",
        text='<tool_call>\n{"name": "now", "arguments": {}}\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        "</tool_call>", calls=(NOW, PARIS)),
    Case(name="hermes-unclosed", tool_parser="hermes",
        text='<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}', calls=(PARIS,)),
    Case(name="hermes-cut", tool_parser="hermes",
        text='<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa',
        calls=(("get_weather", '{"city": "Pa'),)),
    Case(name="hermes-broken-arguments", tool_parser="hermes",
        text='<tool_call>{"name": "now", "arguments": {"a": 1]}</tool_call>after',
        content="after", calls=(("now", '{"a": 1]}'),)),
    Case(name="hermes-no-call", tool_parser="hermes", text="Write <tool_call> and then  <tool_call>{x}.",
        content="Write <tool_call> and then  <tool_call>{x}."),
    Case(name="hermes-cut-in-the-name", tool_parser="hermes", text='So: <tool_call>\n{"name": "get_w',
        content='So: <tool_call>\n{"name": "get_w'),
    Case(name="hermes-unicode", tool_parser="hermes",
        text='<tool_call>{"name": "send", "arguments": {"text": "naïve 🎉 \\u00e9"}}</tool_call>',
        calls=(("send", {"text": "naïve 🎉 é"}),)),
    Case(name="troupe", tool_parser="troupe",
        text='Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n'
        "</tool_call>",
        content="Let me look.", calls=(ROME,)),
    Case(name="granite4", tool_parser="granite4",
        text='<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', calls=(NOW,)),
    # llama
    Case(name="llama-bare", tool_parser="llama3_json",
        text='{"name": "get_weather", "parameters": {"city": "Paris"}}', calls=(PARIS,)),
    Case(name="llama-tag", tool_parser="llama3_json",
        text='<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}', calls=(PARIS, ROME)),
    Case(name="llama-typed", tool_parser="llama4_json",
        text='{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', calls=(PARIS,)),
    Case(name="llama-other-json", tool_parser="llama3_json", text='{"name": "Bob", "parameters": {"a": 1}}',
        content='{"name": "Bob", "parameters": {"a": 1}}'),
    Case(name="llama-plain-json", tool_parser="llama3_json", text='{"answer": 42}', content='{"answer": 42}'),
    Case(name="llama-text", tool_parser="llama3_json", text=" Hello {you}", content=" Hello {you}"),
    # pythonic
    Case(name="pythonic", tool_parser="pythonic",
        text="[get_weather(city='Paris'), get_weather(city=\"Rome\", days=2)]", calls=(PARIS, ROME)),
    Case(name="pythonic-values", tool_parser="pythonic",
        text="[send(text='it\\'s (a), \"b\"', to=['x', 'y',], options={'a': None, 'b': (1, "
        "-2.5e3)}, loud=True), now()]",
        calls=(("send", {"text": "it's (a), \"b\"", "to": ["x", "y"], "options": {"a": None, "b": [1, -2500.0]},
                         "loud": True}), NOW)),
    Case(name="pythonic-wrapped", tool_parser="llama4_pythonic",
        text="<|python_start|>[get_weather(city='Paris')]<|python_end|>", calls=(PARIS,)),
    Case(name="pythonic-list", tool_parser="pythonic", text="[1, 2, 3] is a list", content="[1, 2, 3] is a list"),
    Case(name="pythonic-unknown", tool_parser="pythonic", text="[open('x')]", content="[open('x')]"),
    Case(name="pythonic-code", tool_parser="pythonic", text="[now(), __import__('os').system('x')]",
        content=", __import__('os').system('x')]", calls=(NOW,)),
    Case(name="pythonic-expression", tool_parser="pythonic", text="[send(text=open('/etc/passwd').read())]",
        calls=(("send", {"text": "open('/etc/passwd').read()"}),)),
    Case(name="pythonic-position", tool_parser="pythonic", text="[get_weather('Rome', 2)]", calls=(ROME,)),
    Case(name="lfm2", tool_parser="lfm2", text='<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Ok.',
        content="Ok.", calls=(PARIS,)),
    # mistral
    Case(name="mistral-old", tool_parser="mistral",
        text='[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}, "id": "abcdefghi"}]', calls=(PARIS, ROME)),
    Case(name="mistral-new", tool_parser="mistral",
        text='Sure.[TOOL_CALLS]get_weather[ARGS]{"city": '
        '"Paris"}[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 2}',
        content="Sure.", calls=(PARIS, ROME)),
    Case(name="mistral-v11-id", tool_parser="mistral_v11",
        text='[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}', calls=(PARIS,), ids=("a1B2c3D4e",)),
    Case(name="mistral-v11-brackets", tool_parser="mistral", text='[TOOL_CALLS]get_weather{"city": "Paris"}',
        calls=(PARIS,)),
    Case(name="mistral-think", tool_parser="mistral", reasoning_parser="mistral",
        text='[THINK]Hm, weather.[/THINK]Let me see.[TOOL_CALLS]now[ARGS]{}', reasoning="Hm, weather.",
        content="Let me see.", calls=(NOW,)),
    Case(name="magistral-text", reasoning_parser="mistral", text="<think>\nHm.\n</think>\n\nYes.", reasoning="Hm.",
        content="Yes."),
    # granite
    Case(name="granite", tool_parser="granite",
        text='<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        calls=(PARIS, NOW)),
    Case(name="granite-words", tool_parser="granite",
        text='<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', calls=(PARIS,)),
    Case(name="granite-bare", tool_parser="granite", text='[{"name": "now", "arguments": {}}]', calls=(NOW,)),
    Case(name="granite-20b", tool_parser="granite-20b-fc",
        text='<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}\n<function_call> '
        '{"name": "now", "arguments": {}}', calls=(PARIS, NOW)),
    Case(name="granite-think", reasoning_parser="granite",
        text="Here is my thought process: one two\nHere is my response: three", reasoning="one two", content="three"),
    Case(name="granite-33-think", reasoning_parser="granite",
        text="<think>one</think><response>two</response>", reasoning="one", content="two"),
    # deepseek
    Case(name="deepseek-v3", tool_parser="deepseek_v3",
        text=f'{BEGIN}{ONE}function{SEP}get_weather\n```json\n{{"city": "Paris"}}\n```{ONE_END}\n'
        f'{ONE}function{SEP}get_weather\n```json\n{{"city": "Rome", "days": 2}}\n```{ONE_END}{END}',
        calls=(PARIS, ROME)),
    Case(name="deepseek-v31", tool_parser="deepseek_v31", reasoning_parser="deepseek_v3", start="thinking",
        text=f'Hm.</think>Let me look.{BEGIN}{ONE}get_weather{SEP}{{"city": "Paris"}}{ONE_END}'
        f'{ONE}now{SEP}{{}}{ONE_END}{END}', reasoning="Hm.", content="Let me look.", calls=(PARIS, NOW)),
    Case(name="deepseek-v31-answer", reasoning_parser="deepseek_v3", start="answer", text="Plain </think> text.",
        content="Plain </think> text."),
    Case(name="deepseek-r1", reasoning_parser="deepseek_r1", text="I think.\n</think>\n\nYes.", reasoning="I think.",
        content="Yes."),
    Case(name="deepseek-r1-mark", reasoning_parser="deepseek_r1", text="<think>\nI think.\n</think>\n\nYes.",
        reasoning="I think.", content="Yes."),
    Case(name="deepseek-r1-cut", reasoning_parser="deepseek_r1", text="I think and", reasoning="I think and"),
    # qwen
    Case(name="qwen3", tool_parser="hermes", reasoning_parser="qwen3",
        text='<think>\nThe user wants </b> weather.\n</think>\n\n<tool_call>\n{"name": "now", '
        '"arguments": {}}\n</tool_call>',
        reasoning="The user wants </b> weather.", calls=(NOW,)),
    Case(name="qwen3-json", tool_parser="qwen3_json", reasoning_parser="qwen3",
        text='<think>\nWhere, and when?\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Paris"}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        reasoning="Where, and when?", calls=(PARIS, NOW)),
    Case(name="qwen3-no-thought", reasoning_parser="qwen3", text="<think>\n\n</think>\n\nHi.", content="Hi."),
    Case(name="qwen3-plain", reasoning_parser="qwen3", text="What does <think> mean?",
        content="What does <think> mean?"),
    Case(name="qwen3-in-prompt", reasoning_parser="qwen3", start="thinking", text="Hm.\n</think>\n\nHi.",
        reasoning="Hm.", content="Hi."),
    Case(name="qwen3-coder", tool_parser="qwen3_coder",
        text="I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>", content="I look.", calls=(ROME,)),
    Case(name="qwen3-coder-values", tool_parser="qwen3_xml",
        text="<tool_call>\n<function=send>\n<parameter=text>\ndef f():\n    return \"<a>\" \\ 1\n\n</parameter>\n"
        "<parameter=to>\n[\"x\", \"y\"]\n</parameter>\n<parameter=loud>\nTrue\n</parameter>\n<parameter=note>\n17\n"
        "</parameter>\n<parameter=other>\n{\"a\": 1}\n</parameter>\n</function>\n</tool_call>",
        calls=(("send", {"text": 'def f():\n    return "<a>" \\ 1\n', "to": ["x", "y"], "loud": True, "note": "17",
                         "other": {"a": 1}}),)),
    Case(name="qwen3-coder-without-wrapper", tool_parser="qwen3_coder",
        text="<function=now>\n</function>\n</tool_call>", calls=(NOW,)),
    Case(name="qwen3-coder-cut", tool_parser="qwen3_coder",
        text="<tool_call>\n<function=get_weather>\n<parameter=city>\nRo", calls=(("get_weather", '{"city": "Ro'),)),
    Case(name="qwen3-coder-json", tool_parser="qwen3_coder",
        text='<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', calls=(NOW,)),
    # glm
    Case(name="glm45", tool_parser="glm45", reasoning_parser="glm45",
        text="<think>Hm.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>", reasoning="Hm.", calls=(ROME,)),
    Case(name="glm45-none", tool_parser="glm45", text="<tool_call>now\n</tool_call>", calls=(NOW,)),
    Case(name="glm47", tool_parser="glm47", reasoning_parser="glm45",
        text="<think>Hm.</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>now</tool_call>", reasoning="Hm.",
        calls=(ROME, NOW)),
    Case(name="glm4", tool_parser="glm4", text='get_weather\n{"city": "Paris"}', calls=(PARIS,)),
    Case(name="glm4-text", tool_parser="glm4", text='weather\n{"city": "Paris"}', content='weather\n{"city": "Paris"}'),
    # kimi
    Case(name="kimi", tool_parser="kimi_k2",
        text="Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>", content="Ok.", calls=(PARIS, NOW),
        ids=("functions.get_weather:0", "functions.now:1")),
    Case(name="kimi-thinking", tool_parser="kimi_k2", reasoning_parser="kimi_k2",
        text="<think>I need the time.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", reasoning="I need the time.",
        calls=(NOW,), ids=("functions.now:0",)),
    # gpt-oss
    Case(name="harmony", tool_parser="openai", reasoning_parser="openai_gptoss",
        text="<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        '<|message|>{"city": "Paris"}<|call|>', reasoning="Need weather.", content="I will look.", calls=(PARIS,)),
    Case(name="harmony-recipient-first", tool_parser="openai",
        text=' to=functions.now<|channel|>commentary json<|message|>{}', calls=(NOW,)),
    Case(name="harmony-final", reasoning_parser="openai_gptoss",
        text="<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello\n there.<|return|>",
        reasoning="Hm.", content="Hello\n there."),
    Case(name="harmony-plain", reasoning_parser="openai_gptoss", text="Just text.", content="Just text."),
    Case(name="harmony-two-calls", tool_parser="openai",
        text="<|channel|>commentary to=functions.now<|message|><|call|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather<|message|>{"city": "Rome", "days": 2}', calls=(NOW, ROME)),
    # internlm, phi
    Case(name="internlm", tool_parser="internlm",
        text='Ok.<|action_start|> <|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>\n',
        content="Ok.", calls=(PARIS,)),
    Case(name="phi4", tool_parser="phi4_mini_json",
        text='functools[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        calls=(PARIS, NOW)),
    Case(name="phi4-marks", tool_parser="phi4_mini_json",
        text='<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', calls=(NOW,)),
    Case(name="phi4-module", tool_parser="phi4_mini_json", text="Use functools.partial and functools[0].",
        content="Use functools.partial and functools[0]."),
)  # fmt: skip


def plain_calls(calls: tuple[ToolCall, ...], wanted: tuple[tuple[str, Any], ...]) -> list[tuple[str, Any]]:
    """Calls in the form in which a case has them."""
    found: list[tuple[str, Any]] = []
    for index, call in enumerate(calls):
        as_text = index < len(wanted) and isinstance(wanted[index][1], str)
        found.append((call.name, call.arguments if as_text else msgspec.json.decode(call.arguments)))
    return found
