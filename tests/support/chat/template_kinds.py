"""Chat templates of four kinds: they differ in the conversations that they refuse."""

from typing import Final

_END: Final = "{% if add_generation_prompt %}<assistant>{% endif %}"
_TOOLS: Final = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"

ITEMS: Final = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}"
    "{% for key, value in call.function.arguments | items %} {{ key }}={{ value }}{% endfor %}]{% endfor %}"
    "</>{% endfor %}"
)
"""Writes each argument of a call, which a text has none of."""

STRICT_SYSTEM: Final = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('the system message must be first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "</>{% endfor %}"
)

ALTERNATING: Final = (
    "{% set turns = namespace(number=0) %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('the system message must be first') }}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (turns.number % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set turns.number = turns.number + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}{{ raise_exception('short ids') }}{% endif %}"
    "[{{ call.id }} {{ call.function | tojson }}]{% endfor %}"
    "</>{% endfor %}"
)

FREE: Final = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments }}]{% endfor %}"
    "</>{% endfor %}"
)

PLAIN: Final = (
    "{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</>{% endfor %}"
)
"""Takes nothing but alternating texts: neither a system message nor calls."""

SINGLE_CALLS: Final = STRICT_SYSTEM.replace(
    "{% for call", "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call') }}{% endif %}{% for call"
)

KINDS: Final = {
    name: _TOOLS + source + _END
    for name, source in {
        "items": ITEMS,
        "strict system": STRICT_SYSTEM,
        "alternating": ALTERNATING,
        "free": FREE,
        "plain": PLAIN,
        "single calls": SINGLE_CALLS,
    }.items()
}
