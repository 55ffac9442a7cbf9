"""Chat templates that want too much: refused by a count of steps or characters, never by running out of something."""

import resource

import pytest

from troupellm.models import template_sandbox
from troupellm.models.chat_template import ChatTemplate
from troupellm.models.source import BUILTIN_FOLDER
from troupellm.protocol.errors import InvalidRequest, ModelLoadError

USER = [{"role": "user", "content": "hi"}]
LATER = "{% if messages | length > 1 %}"
"""Not when it is tried at load, with one message."""

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


@pytest.fixture
def _few_steps(monkeypatch):
    """Counting to the real limit takes half a second."""
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 20_000)


def template(text: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, {})


@pytest.mark.usefixtures("_few_steps")
@pytest.mark.parametrize("text", GREEDY.values(), ids=GREEDY.keys())
def test_a_template_that_wants_too_much_is_refused_when_it_is_loaded(text):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelLoadError, match="template"):
        template(text)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024  # KiB


@pytest.mark.usefixtures("_few_steps")
@pytest.mark.parametrize("text", GREEDY.values(), ids=GREEDY.keys())
def test_what_shows_only_later_is_the_requests_fault(text):
    loaded = template(LATER + text + "{% endif %}fine")
    assert loaded.render(USER) == "fine"
    with pytest.raises(InvalidRequest, match="refuses these messages") as caught:
        loaded.render(USER * 2)
    assert caught.value.param == "messages"
    assert loaded.render(USER) == "fine", "the next rendering has its own limits"


def test_the_clock_ends_what_takes_few_steps(monkeypatch):
    """Steps are cheap to count, but one can be made to take long."""
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.0)
    loaded = template(LATER + "{% for i in range(9) %}{{ range(100000) | sum }}{% endfor %}{% endif %}")
    with pytest.raises(InvalidRequest, match="seconds"):
        loaded.render(USER * 2)


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


def test_long_chats_are_within_the_limits():
    text = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' }}{{ m.content }}{% endfor %}"
    many = [{"role": "user", "content": "x" * 800}] * 10_000
    assert len(template(text).render(many)) > 8_000_000


def test_the_built_in_template_is_within_the_limits():
    assert ChatTemplate.load(BUILTIN_FOLDER, None).render(USER)
