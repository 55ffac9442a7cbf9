"""Answers that are not written as they should be: each means the same whole, by character and in random cuts."""

import json
from typing import Any

import msgspec
import pytest

from troupellm.models.chat_parsers.catalog import chat_syntax_named
from troupellm.tests.support.chat.cut_texts import Meaning, read_in_all_cuts
from troupellm.tests.support.chat.recorded_dialects import TOOLS

LIGHT: dict[str, Any] = {
    "name": "light",
    "parameters": {
        "properties": {"level": {"type": "number"}, "arguments": {"type": "object"}},
        "required": ["level"],
    },
}
EXEC: dict[str, Any] = {
    "name": "exec",
    "parameters": {"properties": {"command": {"type": "string"}}, "required": ["command"]},
}
SHELL: dict[str, Any] = {"name": "shell", "parameters": {"properties": {"command": {"type": "string"}}}}
BARE: dict[str, Any] = {"name": "bare"}
OFFERED = [*TOOLS, LIGHT, EXEC, SHELL, BARE]

HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CODER = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
PARIS = ("get_weather", {"city": "Paris"})


def kimi(call_id: str, arguments: str) -> str:
    call = f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    return call.join(KIMI_SECTION)


class Text(msgspec.Struct, frozen=True):
    """A text, and its meaning. Arguments that are text stay as they are, anything else is compared as JSON."""

    parsers: tuple[str, str]
    text: str
    content: str | None = None
    reasoning: str | None = None
    calls: tuple[tuple[str, Any], ...] = ()
    start: str = "answer"
    cut: bool = False
    special: tuple[str, ...] = ()
    whole: bool = True


def texts(parsers: tuple[str, str], rows: list[tuple[Any, ...]], **options: Any) -> list[Text]:
    return [Text(parsers, *row, **options) for row in rows]


PLAIN = ("hermes", "none")
THOUGHTS = [
    *texts(
        ("hermes", "qwen3"),
        [
            (f"Let me look. {HERMES}", None, "Let me look.", (PARIS,)),
            (f"Let me look.\n{HERMES}\nDone.", "Done.", "Let me look.", (PARIS,)),
            (f"One. {HERMES}\n</think>\n\nDone.", "Done.", "One.", (PARIS,)),
            ("Use <tool_call> tags.</think>Hi.", "Hi.", "Use <tool_call> tags."),
            ('Use <tool_call>{"name": "x"}</tool_call>.</think>Hi.', "Hi.",
             'Use <tool_call>{"name": "x"}</tool_call>.'),
            ('Is it <tool_call>{"name": "unknown", "arguments": {}}</tool_call>?</think>No.', "No.",
             'Is it <tool_call>{"name": "unknown", "arguments": {}}</tool_call>?'),
            ('I write <tool_call>{"name": "get_weather", "arguments": {"city": "P</think>Hi.', "Hi.",
             'I write <tool_call>{"name": "get_weather", "arguments": {"city": "P'),
            (f"Use <tool_call> tags. {HERMES}", None, "Use <tool_call> tags.", (PARIS,)),
            ('So <tool_call>{"name": "get_weather", "arguments": {"city": "P"</tool_call>?</think>Hi.', "Hi.",
             'So <tool_call>{"name": "get_weather", "arguments": {"city": "P"</tool_call>?'),
        ],
        start="thinking",
    ),
    *texts(("qwen3_coder", "qwen3"), [(f"Hm. {CODER}", None, "Hm.", (PARIS,))], start="thinking"),
    *texts(("glm45", "glm45"), [(f"Hm. {GLM}", None, "Hm.", (PARIS,))], start="thinking"),
    *texts(("kimi_k2", "kimi_k2"), [(f"Hm. {kimi('functions.now:0', '{}')}", None, "Hm.", (("now", {}),))],
           start="thinking"),
]  # fmt: skip
CONTROLS = texts(
    PLAIN,
    [
        (
            '<tool_call>{"name": "send", "arguments": {"text": "a\nb\tc\x01"}}</tool_call>',
            None,
            None,
            (("send", {"text": "a\nb\tc\x01"}),),
        ),
        (
            '<tool_call>{"name": "send", "arguments": {"text": "a\\\nb"}}</tool_call>',
            None,
            None,
            (("send", {"text": "a\nb"}),),
        ),
        (
            '<tool_call>{"name": "send",\n"arguments": {\n"text": "\\n\r\n"}}</tool_call>',
            None,
            None,
            (("send", {"text": "\n\r\n"}),),
        ),
        (
            '<tool_call>{"arguments": {"text": "a\nb"}, "name": "send"}</tool_call>',
            None,
            None,
            (("send", {"text": "a\nb"}),),
        ),
        (
            '<tool_call>{"name": "send", "arguments": {"to": ["a\nb", "\t"]}}</tool_call>',
            None,
            None,
            (("send", {"to": ["a\nb", "\t"]}),),
        ),
        (
            '<tool_call>{"name": "send", "arguments": {"te\nxt": "\\\\\n"}}</tool_call>',
            None,
            None,
            (("send", {"te\nxt": "\\\n"}),),
        ),
    ],
)
UNBALANCED = [
    *texts(
        PLAIN,
        [
            ('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"</tool_call>!', "!", None, (PARIS,)),
            ('<tool_call>{"name": "send", "arguments": {"to": ["a", {"b": 1, \n</tool_call>', None, None,
             (("send", {"to": ["a", {"b": 1}]}),)),
            ('<tool_call>{"name": "send", "arguments": {"to": [], "text":</tool_call>', None, None,
             (("send", {"to": [], "text": None}),)),
            ('<tool_call>{"name": "send", "arguments": {"to": [], "text"</tool_call>', None, None,
             (("send", {"to": [], "text": None}),)),
            ('<tool_call>{"name": "send", "arguments": {"text": "a</tool_call>b"</tool_call>', None, None,
             (("send", {"text": "a</tool_call>b"}),)),
            (('<tool_call>{"name": "send", "arguments": {"to": ["a"<tool_call>{"name": "now", "arguments": {}}'
             "</tool_call>"), None, None, (("send", {"to": ["a"]}), ("now", {}))),
        ],
    ),
    *texts(
        PLAIN,
        [
            ('<tool_call>{"name": "send", "arguments": {"text": "Pa</tool_call>!', "!", None,
             (("send", {"text": "Pa"}),)),
            ('<tool_call>{"name": "send", "arguments": {"te</tool_call>', None, None, (("send", {"te": None}),)),
            ('<tool_call>{"name": "send", "arguments": {"text": "a\\</tool_call>', None, None,
             (("send", {"text": "a\\"}),)),
        ],
        special=("<tool_call>", "</tool_call>"),
    ),
    *texts(
        PLAIN,
        [
            ('<tool_call>{"name": "send", "arguments": {"text": "Pa', None, None, (("send", '{"text": "Pa'),)),
            ('<tool_call>{"name": "send", "arguments": {"to": ["Pa"', None, None, (("send", '{"to": ["Pa"'),)),
            ('<tool_call>{"name": "send", "arguments": {"to": [1, ', None, None, (("send", '{"to": [1, '),)),
        ],
        cut=True, whole=False,
    ),
]  # fmt: skip
CUT = [
    *texts(
        PLAIN,
        [
            ("Hello.\n<tool_call>", "Hello."),
            ("Hello. <tool_c", "Hello."),
            ('Hello.\n<tool_call>\n{"name": "get_wea', "Hello."),
            ('<tool_call>\n{"name": "get_weather"', None, None, (("get_weather", ""),)),
            ('Hello.\n<tool_call>\n{"name": "get_weather", "argum', "Hello.", None, (("get_weather", ""),)),
            ("a < b and a <", "a < b and a <"),
        ],
        cut=True, whole=False,
    ),
    *texts(
        ("qwen3_coder", "none"),
        [
            ("<tool_call>\n<function=get_weather>\n", None, None, (("get_weather", ""),)),
            ("<tool_call>\n<function=get_wea", "",),
            ("<tool_call>\n<func", "",),
        ],
        cut=True, whole=False,
    ),
    *texts(("mistral_v11", "none"), [("[TOOL_CALLS]now[ARGS]", None, None, (("now", ""),))], cut=True, whole=False),
    *texts(("kimi_k2", "none"), [(kimi("functions.now:0", "")[:-55], None, None, (("now", ""),))],
           cut=True, whole=False),
]  # fmt: skip
KIMI = [
    *texts(
        ("kimi_k2", "none"),
        [
            (kimi("functions.get_weather:0", '{"city": "Paris"}'), None, None, (PARIS,)),
            (kimi("get_weather:7", '{"city": "Paris"}'), None, None, (PARIS,)),
            (kimi("functionsexec5", '{"command": "ls"}'), None, None, (("exec", {"command": "ls"}),)),
            (kimi("functions.exec00001", '{"command": "ls"}'), None, None, (("exec", {"command": "ls"}),)),
            (kimi("call00003", '{"level": 2}'), None, None, (("light", {"level": 2}),)),
            (kimi("0", '{"city": "Paris", "days": 2}'), None, None, (("get_weather", {"city": "Paris", "days": 2}),)),
            (kimi("0", '{"command": "ls"}'), ('<|tool_call_begin|>0<|tool_call_argument_begin|>{"command": "ls"}'
             "<|tool_call_end|>")),
        ],
    )
]  # fmt: skip
GLM_KEYS = texts(
    ("glm45", "none"),
    [
        ("<tool_call>get_weather\ncity</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>", None, None, (PARIS,)),
        (
            (
                "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\ndays</arg_key>"
                "<arg_value>2</arg_value></tool_call>"
            ),
            None,
            None,
            (("get_weather", {"city": "Paris", "days": 2}),),
        ),
        ("<tool_call>now\n</tool_call>", None, None, (("now", {}),)),
        ("<tool_call>now</tool_call>Done", "Done", None, (("now", {}),)),
        ("<tool_call>get_weather city</tool_call>", "<tool_call>get_weather city</tool_call>"),
        ("<tool_call>get_weather\ncity</arg_key><arg_value>Paris", None, None, (("get_weather", '{"city": "Paris'),)),
    ],
)
LLAMA = texts(
    ("llama3_json", "none"),
    [
        ('I will look.\n{"name": "get_weather", "parameters": {"city": "Paris"}}', "I will look.", None, (PARIS,)),
        ('So:\n\n{"name": "now", "parameters": {}}\nDone.', "So:\nDone.", None, (("now", {}),)),
        ('{"name": "now", "parameters": {}}', None, None, (("now", {}),)),
        ('Write {"name": "now", "parameters": {}} here.', 'Write {"name": "now", "parameters": {}} here.'),
        ('So:\n{"name": "Bob", "parameters": {}}', 'So:\n{"name": "Bob", "parameters": {}}'),
        ('A list:\n{"a": 1}\n{"name": "now", "parameters": {}}', 'A list:\n{"a": 1}', None, (("now", {}),)),
    ],
)
WRAPPED = [
    *texts(
        PLAIN,
        [
            *[
                (
                    f'<tool_call>{{"name": "get_weather", "arguments": {{"{key}": {{"city": "Paris"}}}}}}</tool_call>',
                    None,
                    None,
                    (PARIS,),
                )
                for key in ("arguments", "input", "properties")
            ],
            (
                (
                    '<tool_call>{"name": "get_weather", "arguments": {"arguments": "{\\"city\\": \\"Paris\\"}"}}'
                    "</tool_call>"
                ),
                None,
                None,
                (PARIS,),
            ),
            (
                '<tool_call>{"name": "get_weather", "arguments": {"arguments": {"town": "Paris"}}}</tool_call>',
                None,
                None,
                (("get_weather", {"arguments": {"town": "Paris"}}),),
            ),
            (
                '<tool_call>{"name": "light", "arguments": {"arguments": {"level": 1}}}</tool_call>',
                None,
                None,
                (("light", {"arguments": {"level": 1}}),),
            ),
            (
                '<tool_call>{"name": "unknown", "arguments": {"input": {"a": 1}}}</tool_call>',
                None,
                None,
                (("unknown", {"input": {"a": 1}}),),
            ),
            (
                '<tool_call>{"name": "get_weather", "arguments": {"input": {"city": "a"}, "days": 1}}</tool_call>',
                None,
                None,
                (("get_weather", {"input": {"city": "a"}, "days": 1}),),
            ),
        ],
    ),
    *texts(
        ("openai", "openai_gptoss"),
        [
            (
                '<|channel|>commentary to=functions.get_weather<|message|>{"arguments": {"city": "Paris"}}<|call|>',
                None,
                None,
                (PARIS,),
            )
        ],
    ),
]
AROUND = texts(
    PLAIN,
    [
        (f"Before.\n\n{HERMES}\n\nAfter.", "Before.\nAfter.", None, (PARIS,)),
        (f"{HERMES} After.", "After.", None, (PARIS,)),
        (f"A{HERMES}B{HERMES}C", "A\nB\nC", None, (PARIS, PARIS)),
        (f"A{HERMES}{HERMES}", "A", None, (PARIS, PARIS)),
        (f"A\n{HERMES}\n \n", "A", None, (PARIS,)),
        (f"A{HERMES}{HERMES}\nB <tool_call> C", "A\nB <tool_call> C", None, (PARIS, PARIS)),
    ],
)
GPT_OSS = texts(
    ("openai", "openai_gptoss"),
    [
        (
            '<|channel|>commentary to=shell<|message|>{"command": "ls"}<|call|>',
            None,
            None,
            (("shell", {"command": "ls"}),),
        ),
        (
            '<|channel|>commentary to=functions.shelljson<|message|>{"command": "ls"}<|call|>',
            None,
            None,
            (("shell", {"command": "ls"}),),
        ),
        (
            '<|channel|>commentary to=functions.shell <|constrain|>json<|message|>{"command": "ls"}<|call|>',
            None,
            None,
            (("shell", {"command": "ls"}),),
        ),
        ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", None, None, (("other", {}),)),
        ("<|channel|>commentary to=browser.open<|message|>{}<|call|>", "{}"),
        (
            '<|channel|>analysis to=shelljson<|message|>{"command": "l\ns"}<|call|>',
            None,
            None,
            (("shell", {"command": "l\ns"}),),
        ),
    ],
)

LEFT_OUT = [
    *texts(
        ("solar_open2", "none"),
        [
            ("<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_call:end|>", None,
             None, (PARIS,)),
            (("<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_arg:start|>days"
              "<|tool_arg:value|>2<|tool_call:end|>!"), "!", None, (("get_weather", {"city": "Paris", "days": 2}),)),
        ],
    ),
    *texts(
        ("minimax_m2", "none"),
        [
            (('<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris\n</invoke>\n'
              "</minimax:tool_call>"), None, None, (PARIS,)),
            ('<minimax:tool_call><invoke name=get_weather><parameter name=city>Paris</parameter></invoke>', None, None,
             (PARIS,)),
            ('<minimax:tool_call><invoke name="bare"></invoke></minimax:tool_call>', None, None, (("bare", {}),)),
        ],
    ),
    *texts(
        ("deepseek_v32", "none"),
        [(('<｜DSML｜function_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city">Paris'
          "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>"), None, None, (PARIS,))],
    ),
]  # fmt: skip

ALL = {
    "thoughts": THOUGHTS, "control characters": CONTROLS, "unbalanced": UNBALANCED, "cut": CUT, "Kimi": KIMI,
    "GLM": GLM_KEYS, "llama": LLAMA, "wrapped": WRAPPED, "around": AROUND, "gpt-oss": GPT_OSS,
    "left out": LEFT_OUT,
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [text for rows in ALL.values() for text in rows],
    ids=[f"{k}-{i}" for k, r in ALL.items() for i in range(len(r))],
)
def test_a_text_means_the_same_in_every_cut(text: Text):
    chat_syntax = chat_syntax_named(*text.parsers)
    found = read_in_all_cuts(
        chat_syntax, text.text, OFFERED, start=text.start, cut=text.cut, hidden=frozenset(text.special)
    )
    calls = [
        (name, arguments if isinstance(wanted, str) else json.loads(arguments))
        for (name, arguments), (_, wanted) in zip(found.calls, text.calls, strict=True)
    ]
    assert Meaning(found.content, found.reasoning, tuple(calls)) == Meaning(text.content, text.reasoning, text.calls)
    whole = all(not isinstance(arguments, str) for _, arguments in text.calls)
    assert found.whole is (bool(text.calls) and whole)


def test_every_case_has_six_texts():
    assert not [name for name, rows in ALL.items() if len(rows) < 6]
