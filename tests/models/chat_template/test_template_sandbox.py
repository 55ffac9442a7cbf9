"""Chat templates that want too much are ended in time and in memory, with any operation, and reach nothing."""

import json
import time
from collections.abc import Iterator

import jinja2
import pytest

from troupellm.models.chat_template import template_child
from troupellm.models.chat_template.template import ChatTemplate, SlowTemplate
from troupellm.models.chat_template.template_process import (
    TemplateExhausted,
    TemplateProcesses,
    TemplateRefused,
)
from troupellm.models.hub.source import BUILTIN_FOLDER
from troupellm.protocol.errors import InvalidRequest, ModelLoadError

USER = [{"role": "user", "content": "hi"}]
LIMIT = 0.05
"""Seconds of processor time, so that the tests are quick."""
DOUBLED = "{% set n = namespace(x=[0]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
DOUBLED_TUPLES = "{% set n = namespace(x=(0,)) %}{% for i in range(40) %}{% set n.x = (n.x, n.x) %}{% endfor %}"

GREEDY = {
    "a loop in a loop": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "a loop with a condition": "{% for i in range(99999) %}{% for j in range(999) if j < 0 %}{% endfor %}{% endfor %}",
    "a macro that calls itself": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"
    ),
    "a recursive loop": (
        "{% for x in [[[[[[[]]]]]]] recursive %}{% for i in range(99999) %}{{ loop.index }}{% endfor %}"
        "{{ loop(x) }}{% endfor %}{% for i in range(99999) %}{% for j in range(99) %}x{% endfor %}{% endfor %}"
    ),
    "a text times a number": "{{ 'x' * 10000000000 }}",
    "a number times a text": "{{ 10000000000 * 'x' }}",
    "a list times a number": "{{ ([0] * 10000000000) | length }}",
    "a doubled text": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "an added text": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a power": "{{ 10 ** 10000000000 }}",
    "a product": "{% set n = namespace(x=10) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "a wide format": "{{ '%10000000000d' | format(1) }}",
    "a wide percent": "{{ '%10000000000d' % 1 }}",
    "a wide star": "{{ '%*d' % (1000000000, 1) }}",
    "wide braces": "{{ '{:>10000000000}'.format(1) }}",
    "braces in braces": "{{ '{:>{w}}'.format(1, w=1000000000) }}",
    "a wide center": "{{ 'x' | center(10000000000) }}",
    "a wide ljust": "{{ 'x'.ljust(10000000000) }}",
    "a wide zfill": "{{ 'x'.zfill(10000000000) }}",
    "a filter by its name": "{{ ['x'] | map('center', 10000000000) | list }}",
    "a wide indent": "{{ ('\n' * 1000000) | indent(100000) }}",
    "a replace": "{{ ('x' * 1000000) | replace('x', 'y' * 1000000) }}",
    "a replace of nothing": "{{ ('x' * 1000000).replace('', 'y' * 1000000) }}",
    "a join": "{{ (['x' * 1000000] * 100000) | join }}",
    "a join method": "{{ ('y' * 1000000).join(['x'] * 100000) }}",
    "shared lists shown": (
        "{% set n = namespace(x=[0]) %}{% for i in range(12) %}{% set n.x = [n.x] * 100 %}{% endfor %}{{ n.x }}"
    ),
    "shared lists as JSON": (
        "{% set n = namespace(x=[0]) %}{% for i in range(12) %}{% set n.x = [n.x] * 100 %}{% endfor %}"
        "{{ n.x | tojson | length }}"
    ),
    "a namespace shown": "{% set n = namespace() %}{% set n.n = [n] %}{{ n }}",
    "much constant text": "{% for i in range(100000) %}" + "x" * 1_000 + "{% endfor %}",
    "much text in a block": (
        "{% set big = 'x' * 1000000 %}{% set all %}{% for i in range(100000) %}{{ big }}{% endfor %}{% endset %}"
    ),
    "bytes of a number": "{{ (1).to_bytes(10000000000, 'big') }}",
    "a table of letters": "{{ 'x'.translate({120: 'y' * 1000000}) }}",
    "parts without end": "{{ ('a ' * 4000000).split() | length }}",
    "letters as a list": "{{ ('a' * 8000000) | list | length }}",
}
OPERATIONS = {
    "sorts": "{% set a = range(100000)|list * 5 %}" + "{% set b = a|sort(reverse=true) %}" * 12,
    "a loop of sorts": "{% set a = range(9999)|list %}{% for i in range(9) %}{% set b = a|sort|sort %}{% endfor %}",
    "unique items": "{% set a = range(9999)|list %}{% for i in range(31) %}{% set b = a|unique|list %}{% endfor %}",
    "a precise round": "{{ 1|round(3000000, 'ceil') }}",
    "a round without end": "{{ 1|round(1000000000, 'ceil') }}",
    "a round to tens": "{% set x = 1 %}{{ x|round(-3000000) }}",
    "rfind": "{{ ('a' * 120000).rfind('ab' + 'a' * 60000) }}",
    "rindex": "{{ ('a' * 120000).rindex('ab' + 'a' * 60000) }}",
    "rsplit": "{{ ('a' * 120000).rsplit('ab' + 'a' * 60000) }}",
    "rpartition": "{{ ('a' * 120000).rpartition('ab' + 'a' * 60000) }}",
    "strip": "{{ ('a' * 120000).strip('é' * 60000 + 'a') }}",
    "trim": "{{ ('a' * 120000) | trim('é' * 60000 + 'a') }}",
    "big copies": "{% set a = 'a' * 9000000 %}" + "{% set b = a.upper() %}" * 40,
    "slices of a text": "{% set a = 'a' * 9000000 %}{% for i in range(40) %}{% set b = a[1:] %}{% endfor %}",
    "slices of a list": "{% set a = range(99999)|list %}{% for i in range(40) %}{% set b = a[1:] %}{% endfor %}",
    "equal texts": "{% set a = 'a' * 9000000 %}{% set b = 'a' * 9000000 %}" + "{% set c = a == b %}" * 40,
    "equal texts by a test": "{% set a = 'a' * 9000000 %}" + "{% set c = a is eq(a) %}" * 40,
    "texts searched": "{% set a = 'a' * 9000000 %}" + "{% set c = 'b' in a %}" * 40,
    "lists searched": "{% set a = range(9999)|list %}" + "{% set c = -1 in a %}" * 40,
    "prefixes": "{% set a = 'a' * 9000000 %}" + "{% set c = a.startswith(a) %}" * 40,
    "words": "{{ ('a ' * 8000000) | title | length }}",
    "a long number": "{{ ('9' * 16000000) | float }}",
    "lists in lists compared": DOUBLED + "{% set a = n.x %}" + DOUBLED + "{{ a == n.x }}",
    "lists in lists as an error": DOUBLED + "{{ raise_exception(n.x) }}",
    "tuples in tuples as a key": DOUBLED_TUPLES + "{{ {n.x: 1} | length }}",
    "tuples in tuples looked up": DOUBLED_TUPLES + "{{ {}[n.x] }}",
    "tuples in tuples as a member": DOUBLED_TUPLES + "{{ n.x in {} }}",
    "tuples in tuples made unique": DOUBLED_TUPLES + "{{ [n.x] | unique | list | length }}",
    "a tuple deeper than the stack": (
        "{% set n = namespace(x=()) %}{% for i in range(9999) %}{% set n.x = (n.x,) %}{% endfor %}{{ {n.x: 1} }}"
    ),
    "lists added up": "{{ range(99999) | batch(1) | list | sum(start=[]) | length }}",
    "a replace by name": "{{ ('x' * 1000000) | replace(new='y' * 1000000, old='x') }}",
    "an indent by name": "{{ ('a\n' * 1000000) | indent(first=true, width=1000) }}",
    "an indent by another line end": "{{ ('a\r' * 1000000) | indent(900) | length }}",
    "a field many times": "{{ ('%(x)999d' * 100000) % {'x': 1} }}",
    "a format that is never closed": "{% set a = ('%(' * 999999) % 1 %}{{ 'x' * 999999999 }}",
    "braces with many digits": "{{ ('{' ~ '1' * 999999 ~ '}').format(1) }}",
    "lists in lists as a format": DOUBLED + "{{ n.x | format(1) }}",
    "many braces": "{{ ('{}' * 999999).format(1) }}",
    "a name in a name": "{{ '%(a(b))999999d' % {'a(b)': 1} }}",
    "deep JSON laid out": (
        "{% set n = namespace(x=0) %}{% for i in range(150) %}{% set n.x = [n.x, 1, 2] %}{% endfor %}"
        "{{ n.x | list | tojson(indent=1000) }}"
    ),
    "JSON with separators": "{{ range(9999) | list | tojson(separators=('x' * 100000, 'y')) | length }}",
    "arguments": "{% set a = range(99999) | list %}" + "{% set c = cycler(*a) %}" * 40,
    "a large integer": "{{ ('f' * 1000000) | int(0, 16) }}",
}
QUICK_BOMBS = frozenset(
    {"a loop in a loop", "a text times a number", "a wide format", "a doubled text", "rfind", "shared lists shown"}
)
"""Run by `make test`; `make test-all` runs the others too."""


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    made = TemplateProcesses()
    yield made
    made.close()


def template(text: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, {})


def cpu_seconds(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | 2)


def bombs() -> list[object]:
    every = GREEDY | OPERATIONS
    return [
        pytest.param(text, id=name, marks=() if name in QUICK_BOMBS else pytest.mark.slow)
        for name, text in every.items()
    ]


@pytest.mark.parametrize("text", bombs())
def test_a_bomb_ends_in_time_and_memory_and_the_next_rendering_is_fine(processes, text):
    before = time.process_time()
    try:
        shown = processes.render(text, {"messages": USER}, LIMIT)
        assert len(shown) <= template_child.MAX_CHARACTERS
    except (TemplateExhausted, TemplateRefused):
        pass
    assert time.process_time() - before < 0.2, "it costs this process next to nothing"
    assert all(cpu_seconds(pid) < 60.0 for pid in processes.pids)
    assert processes.render("{{ messages[0].content }}", {"messages": USER}, 0.3) == "hi"


ENDLESS = {
    "Python code": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "one call": DOUBLED + "{% set a = n.x %}" + DOUBLED + "{{ a == n.x }}",
}


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_rendering_is_ended_by_its_processor_time(processes, text):
    with pytest.raises(TemplateExhausted, match="^time$"):
        processes.render(text, {"messages": USER}, LIMIT)


@pytest.mark.parametrize("text", ["{{ 'x' * 10000000000 }}", "{{ ([0] * 10000000000) | length }}"])
def test_a_rendering_that_fills_the_memory_is_ended(processes, text):
    with pytest.raises(TemplateExhausted, match="^memory$"):
        processes.render(text, {"messages": USER}, 5.0)


def test_a_text_that_is_too_long_is_refused(processes):
    text = "{% for i in range(100000) %}" + "x" * 1_000 + "{% endfor %}"
    with pytest.raises(TemplateRefused, match=f"more than {template_child.MAX_CHARACTERS} characters"):
        processes.render(text, {"messages": USER}, 5.0)


def test_a_model_with_an_endless_template_is_not_loaded(processes):
    for text in ENDLESS.values():
        with pytest.raises(ModelLoadError, match="chat template default: it needs more time for one message"):
            ChatTemplate({"default": text}, {}, processes)


def test_a_slow_rendering_gets_the_time_of_the_context_when_it_is_patient(processes):
    slow = "{% if messages | length > 1 %}" + ENDLESS["Python code"] + "{% endif %}fine"
    loaded = ChatTemplate({"default": slow}, {}, processes)
    loaded.fit(5_000)
    assert loaded.render(USER) == "fine"
    with pytest.raises(SlowTemplate):
        loaded.render(USER * 2)
    with pytest.raises(InvalidRequest, match=r"^the chat template needs more than 0.5 s for 2 messages$") as caught:
        loaded.patient.render(USER * 2)
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest, match=r"needs more than 0.3 s for 2 messages$"):
        loaded.patient.render(USER * 2, source=slow)
    assert loaded.render(USER) == "fine"


def test_more_messages_than_the_context_has_tokens_are_refused_unrendered():
    class Never:
        def render(self, source, variables, seconds):
            assert USER[0] not in variables["messages"], "not a trial at load"
            return ""

    loaded = ChatTemplate({"default": "x"}, {}, Never())
    loaded.fit(3)
    with pytest.raises(InvalidRequest, match="context length is 3 tokens.* 4 entries"):
        loaded.render(USER * 4)


@pytest.mark.parametrize("text", ["{{ " + "a + " * 15_000 + "a }}", "{{ a" + ".b" * 30_000 + " }}"])
def test_a_deep_expression_of_a_request_is_refused(processes, text):
    loaded = ChatTemplate({"default": "x"}, {}, processes)
    with pytest.raises(InvalidRequest, match="the chat template (refuses|needs more than)"):
        loaded.render(USER, source=text)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("{{ 10 ** 10000000 }}", "10000000"),
        ("{{ 'x' * 10**10 }}", "'x'"),
        ("{{ 'x' | center(10**10) }}", "center"),
        ("{{ [1] * 10**9 }}", "[1]"),
    ],
)
def test_compiling_a_template_computes_no_constants(text, kept):
    environment = template_child.environment()
    environment.from_string(text)
    source = environment.compile(text, raw=True)
    assert kept in source
    assert len(source) < 2_000


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ self.__init__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ messages[0] | attr('__class__') }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ messages.append(1) }}",
    "{% include 'x' %}",
    "{% import 'x' as x %}",
    "{% set messages = messages.clear() %}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_a_template_reaches_nothing_outside(text):
    messages = [{"role": "user", "content": "hi"}]
    try:
        shown = template(text).render(messages)
    except InvalidRequest:
        shown = ""
    assert not any(word in shown for word in ("object", "class", "module", "builtins", "import"))
    assert messages == [{"role": "user", "content": "hi"}]


def test_what_templates_do_is_allowed():
    text = (
        "{%- set ns = namespace(last=0, text='') -%}"
        "{%- macro show(m, depth=0) -%}<{{ m.role ~ '|' ~ loop_name }}>{{ m.content | trim }}{%- endmacro -%}"
        "{%- for m in messages -%}{%- set loop_name = 'a' -%}{{ show(m) }}"
        "{%- if '</think>' in m.content -%}{{ m.content.split('</think>')[-1].lstrip('\n') }}{%- endif -%}"
        "{%- set ns.last = loop.index0 + 1 -%}{%- endfor -%}"
        "{{ ns.last * 2 }} {{ 'ab' * 3 }} {{ ['a', 'b'] | join(', ') }} {{ '%s=%d' | format('x', 2024) }} "
        "{{ 'year 2024: %s' % 'x' }} {{ '{}-{:>4}'.format('a', 'b') }} {{ messages | map(attribute='role') | list }} "
        "{{ {'a': [1, {'b': none}]} | tojson(indent=2) | indent(4) }} {{ 'x' | replace('x', 'y') }} "
        "{{ range(3) | list }} {{ messages[::-1] | length }} {{ 7 % 4 }} {{ 2 ** 10 }} {{ 'a' | center(5) }}"
    )
    shown = template(text).render([*USER, {"role": "assistant", "content": "<think>x</think>\ny"}])
    assert "4 ababab a, b x=2024 year 2024: x a-   b ['user', 'assistant'] " in shown
    assert shown.endswith("y [0, 1, 2] 2 3 1024   a  ")


def test_what_templates_of_families_do_besides_is_allowed():
    """Seen in those of Llama, Qwen, Mistral, DeepSeek, GPT-OSS, GLM, Kimi, Gemma and GigaChat."""
    text = (
        "{%- set ns = namespace(flag=true, calls=[]) -%}"
        "{%- for m in messages -%}{%- set ns.calls = ns.calls + [m.content.split('\n')] -%}"
        "{%- for line in m.content.split('\n') if line.startswith(('a', 'h')) -%}{{ line.strip('\n') }};{%- endfor -%}"
        "{{ loop.previtem.role if loop.previtem is defined }}{{ loop.first }}{{ namespace(a=ns).a.flag }}{%- endfor -%}"
        "{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}{{ users | length }}"
        "{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='content') | join('|') }}"
        "{%- if messages | selectattr('role', 'equalto', 'tool') -%}yes{%- endif -%}"
        "{%- for k, v in {'b': 1, 'a': [1, none]} | dictsort -%}{{ k ~ '=' ~ (v | tojson) }}{%- endfor -%}"
        "{%- for k, v in {'x': {'y': 1}}.items() -%}{{ k if v is mapping and v is not string }}{%- endfor -%}"
        "{{ 'a<b>c'.rsplit('<b>', 1)[-1] }}{{ 'abc'.find('c') }}{{ 'role' in messages[0] }}{{ 'x' not in ['y'] }}"
        "{{ ('<t>' in messages[0].content and true) }}{{ messages[-1]['content'][:1] }}{{ ' a '.rstrip() }}"
        "{%- macro tag(n, a=none) -%}<{{ n }}{{ caller() if caller }}>{%- endmacro -%}"
        "{%- call tag('x') -%}in{%- endcall -%}{%- set t -%}{{ tag('y') | upper }}{%- endset -%}{{ t }}"
        "{{ (messages | length - 1) % 2 == 0 }}{{ 7 // 2 }}{{ [1, 2, 3][1:] | first }}{{ 3 | string | length }}"
        "{{ {'a': 1} | items | list }}{{ messages[0].get('name', 'none') }}{{ dict(a=1, **{'b': 2}) }}{{ -1 }}"
    )
    messages = [*USER, {"role": "assistant", "content": "a\nb"}]
    expected = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    expected.filters["tojson"] = json.dumps
    assert template(text).render(messages) == expected.from_string(text).render(messages=messages)


def test_long_chats_are_within_the_limits(processes):
    text = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' }}{{ m.content }}{% endfor %}"
    many = [{"role": "user", "content": "x" * 800}] * 10_000
    assert len(processes.render(text, {"messages": many}, 0.3)) > 8_000_000


def test_the_built_in_template_is_within_the_limits(processes):
    assert ChatTemplate.load(BUILTIN_FOLDER, None, processes).render(USER)
