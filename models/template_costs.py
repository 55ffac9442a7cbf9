"""What the operations of a chat template cost, told from the sizes of what they work on, before they run.

One unit is about a nanosecond: a character that is looked at. Whatever is not listed here, templates do not have.
A rule gets the value and all further arguments, and returns units; it refuses what it cannot tell a bound for.
"""

import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

from troupellm.models.template_meter import TemplateLimit
from troupellm.models.template_sizes import MAX_BITS, MAX_WIDTH, NODE_COST, WIDE, contained, counted, made, weigh

_KEYED = 500
"""Of one item of which a filter in Python looks something up."""
_WIDE = r"[-+ #0]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))"
_WIDE_PERCENT = re.compile(rf"%(?:\([^()]*(?:\(|\){_WIDE})|{_WIDE})")
"""Takes linear time; names with parentheses in them are refused too."""
_WIDE_NUMBER = re.compile(r"\d{4,}")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SPACES = _LINE_ENDS + " \t\x1f"
_WIDE_SPACES = "\xa0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))

Rule = Callable[[Any, list[Any]], int]

JINJAS_OWN = frozenset({"_loop_vars", "_block_vars"})
"""Arguments that jinja2 adds to every call in a loop or block, and takes away before it."""


def binary(operator: str, left: Any, right: Any) -> int:
    """The cost of `left operator right`."""
    if operator == "%" and isinstance(left, str):
        return _formats(left, [right])
    if operator == "*":
        for sized, times in ((left, right), (right, left)):
            if hasattr(sized, "__len__") and isinstance(times, int):
                length = len(sized) * max(times, 0)
                return made(length) if isinstance(sized, str) else counted(range(length))
    if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        if isinstance(left, str):
            return made(len(left) + len(right))
        return counted(range(len(left) + len(right)))
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
        if bits > MAX_BITS:
            raise TemplateLimit("the template computes with numbers that are too large")
        return bits
    return weigh(left) + weigh(right)


def free(value: Any, rest: list[Any]) -> int:
    """Takes equally long for whatever it gets."""
    return 0


def passes(value: Any, rest: list[Any]) -> int:
    """Keeps its arguments, or copies a mapping."""
    return sum(NODE_COST * len(one) for one in rest if isinstance(one, dict | list | tuple))


def linear(each: int) -> Rule:
    """A rule for what walks once through all its arguments, `each` times as slowly as the fastest."""

    def rule(value: Any, rest: list[Any]) -> int:
        return each * (weigh(value) + sum(map(weigh, rest)))

    return rule


def per_item(each: int) -> Rule:
    """A rule for what handles the items of a list without looking into them."""

    def rule(value: Any, rest: list[Any]) -> int:
        return counted(value, each) + sum(map(weigh, rest))

    return rule


def _sorts(value: Any, rest: list[Any]) -> int:
    counted(value)
    length = len(value) if hasattr(value, "__len__") else 1
    return _KEYED * length + weigh(value) * max(1, length.bit_length()) // 4 + sum(map(weigh, rest))


def _sums(value: Any, rest: list[Any]) -> int:
    if any(not isinstance(one, int | float | str | None) for one in rest):
        raise TemplateLimit("templates sum numbers only")  # lists are added in the square of their number
    return counted(value, _KEYED) + weigh(value)


def _searches(value: Any, rest: list[Any]) -> int:
    """Forwards, which takes linear time."""
    return 2 * len(value) + sum(map(weigh, rest))


def _searches_slowly(value: Any, rest: list[Any]) -> int:
    """Backwards, or for any of some letters: at the worst, all of the one is compared at each place of the other."""
    return len(str(value)) * (1 + sum(map(weigh, rest)))


def _trims(value: Any, rest: list[Any]) -> int:
    weigh(value)
    return _searches_slowly(value, rest)


def _splits(value: Any, rest: list[Any]) -> int:
    separator = rest[0] if rest and isinstance(rest[0], str) and rest[0] else None
    ends = (separator,) if separator else _SPACES if value.isascii() else _SPACES + _WIDE_SPACES
    parts = sum(map(value.count, ends))
    return _searches(value, rest) + counted(range(parts), 100)


def _splits_backwards(value: Any, rest: list[Any]) -> int:
    return _searches_slowly(value, rest) + _splits(value, rest)


def _replaces(value: Any, rest: list[Any]) -> int:
    cost = weigh(value) + sum(map(weigh, rest))
    if len(rest) < 2:
        return cost
    text, old, new = str(value), str(rest[0]), str(rest[1])
    return cost + made(len(text) + text.count(old) * len(new))


def _pads(value: Any, rest: list[Any]) -> int:
    size = weigh(value)
    if any(isinstance(one, int) and one > MAX_WIDTH + len(str(value)) for one in rest):
        raise TemplateLimit(f"the template pads a text by more than {MAX_WIDTH}")
    return size + sum(map(weigh, rest)) + WIDE * MAX_WIDTH


def _indents(value: Any, rest: list[Any]) -> int:
    size, width = weigh(value), rest[0] if rest and rest[0] is not None else 4
    widest = len(width) if isinstance(width, str) else _narrow(int(width))
    text = str(value)
    return 16 * size + made(len(text) + (1 + sum(map(text.count, _LINE_ENDS))) * widest)


def _formats(value: Any, rest: list[Any]) -> int:
    weigh(value)  # before it is shown
    if _WIDE_PERCENT.search(str(value)):
        raise TemplateLimit("the template formats with a width that is too large")
    return _fills(str(value).count("%"), value, rest)


def _formats_braces(value: Any, rest: list[Any]) -> int:
    places = 0
    made(MAX_WIDTH * value.count("{"))  # before they are looked at one by one
    for _, name, width, _ in Formatter().parse(value):
        places += 1
        if width and "{" in width:
            raise TemplateLimit("templates have no formats inside formats")
        if name is not None and _WIDE_NUMBER.search(f"{name}:{width}"):
            raise TemplateLimit("the template formats with a width that is too large")
    return _fills(places, value, rest)


def _fills(places: int, form: Any, rest: list[Any]) -> int:
    return made(weigh(form) + places * (MAX_WIDTH + sum(map(weigh, rest))))


def _joins(value: Any, rest: list[Any]) -> int:
    separator = str(rest[0]) if rest and rest[0] is not None and weigh(rest[0]) else ""
    return weigh(value) + made(len(separator) * (len(value) if hasattr(value, "__len__") else 1))


def _joins_method(value: Any, rest: list[Any]) -> int:
    return _joins(rest[0], [value]) if rest else 0


def _groups(value: Any, rest: list[Any]) -> int:
    """Of batches and slices, whose number decides how much comes out."""
    for one in rest:
        if isinstance(one, int):
            _narrow(one)
    return counted(value, 32) + MAX_WIDTH * 64


def _dumps(value: Any, rest: list[Any]) -> int:
    """What it makes with an indent or separators of its own, the filter counts as it goes."""
    return 8 * weigh(value) + sum(map(weigh, rest))


def _rounds(value: Any, rest: list[Any]) -> int:
    if any(isinstance(one, int) and abs(one) > 400 for one in rest):
        raise TemplateLimit("the template rounds to more than 400 places")
    return weigh(value)


def _narrow(width: int) -> int:
    if width > MAX_WIDTH:
        raise TemplateLimit(f"the template makes more than {MAX_WIDTH} of one")
    return width


_TEXT = linear(2)
_SLOW_TEXT = linear(128)
_LAZY = per_item(_KEYED)

FILTERS: dict[str, Rule] = {
    **dict.fromkeys(("length", "count", "default", "d", "first", "last"), free),
    **dict.fromkeys(("abs", "string", "upper", "lower", "capitalize", "safe", "truncate"), _TEXT),
    **dict.fromkeys(("e", "escape", "forceescape"), linear(8)),
    **dict.fromkeys(("title", "wordcount", "urlencode", "int", "float"), _SLOW_TEXT),
    **dict.fromkeys(("list", "reverse", "items"), per_item(32)),
    **dict.fromkeys(("map", "select", "reject", "selectattr", "rejectattr"), _LAZY),
    **dict.fromkeys(("sort", "dictsort", "groupby", "unique", "min", "max"), _sorts),
    **dict.fromkeys(("batch", "slice"), _groups),
    "attr": lambda value, rest: sum(map(weigh, rest)),
    "sum": _sums,
    "trim": _trims,
    "replace": _replaces,
    "center": _pads,
    "indent": _indents,
    "format": _formats,
    "join": _joins,
    "tojson": _dumps,
    "round": _rounds,
}
READERS = frozenset({"list", "reverse", "map", "select", "reject", "selectattr", "rejectattr", "sort", "groupby"}) | {
    "unique", "min", "max", "batch", "slice", "sum", "join"
}  # fmt: skip
"""Filters whose value may be an iterator, which is read before its size is looked at."""

_COMPARES = linear(1)
TESTS: dict[str, Rule] = {
    **dict.fromkeys(("defined", "undefined", "none", "boolean", "false", "true", "integer", "float", "string"), free),
    **dict.fromkeys(("mapping", "number", "sequence", "iterable", "callable", "sameas", "escaped"), free),
    **dict.fromkeys(("odd", "even", "divisibleby", "lower", "upper", "filter", "test"), _COMPARES),
    **dict.fromkeys(("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">="), _COMPARES),
    **dict.fromkeys(("<", "lt", "lessthan", "<=", "le"), _COMPARES),
    "in": lambda value, rest: weigh(value) + sum(map(contained, rest)),
}

_IS = ("alnum", "alpha", "ascii", "decimal", "digit", "identifier", "lower", "numeric", "printable", "space", "title")
_TEXTS: dict[str, Rule] = {
    **dict.fromkeys([f"is{word}" for word in (*_IS, "upper")], _TEXT),
    **dict.fromkeys(("capitalize", "casefold", "lower", "upper", "swapcase", "title"), linear(4)),
    **dict.fromkeys(("startswith", "endswith"), lambda value, rest: sum(map(weigh, rest))),
    **dict.fromkeys(("removeprefix", "removesuffix"), _TEXT),
    **dict.fromkeys(("find", "index", "count", "partition"), _searches),
    **dict.fromkeys(("rfind", "rindex", "rpartition"), _searches_slowly),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _searches_slowly),
    **dict.fromkeys(("split", "splitlines"), _splits),
    **dict.fromkeys(("ljust", "rjust", "center", "zfill"), _pads),
    **dict.fromkeys(("format", "format_map"), _formats_braces),
    "rsplit": _splits_backwards,
    "replace": _replaces,
    "join": _joins_method,
}
_LISTS: dict[str, Rule] = {
    **dict.fromkeys(("index", "count"), linear(1)),
    "copy": per_item(8),
}
_MAPPINGS: dict[str, Rule] = {
    "get": lambda value, rest: sum(map(weigh, rest[:1])),
    **dict.fromkeys(("items", "keys", "values"), free),
    "copy": per_item(64),
}
_NUMBERS: dict[str, Rule] = dict.fromkeys(("bit_length", "is_integer"), linear(1))


_ORDER = {
    "replace": ("old", "new", "count"),
    "join": ("d", "attribute"),
    "indent": ("width", "first", "blank"),
    "split": ("sep", "maxsplit"),
    "rsplit": ("sep", "maxsplit"),
}
"""Names of arguments where it matters to the rule which is which."""


def arranged(name: str, rest: list[Any], named: Mapping[str, Any]) -> list[Any]:
    """All arguments of a filter or method beside the value, for its rule."""
    if not named:
        return rest
    if name in _ORDER:
        return [*rest, *(named.get(one) for one in _ORDER[name][len(rest) :])]
    return [*rest, *(value for key, value in named.items() if key not in JINJAS_OWN)]


def method(owner: Any, name: str) -> Rule:
    """The rule of a method.

    Raises:
        TemplateLimit: templates do not have it.
    """
    if isinstance(owner, str):
        table = _TEXTS
    elif isinstance(owner, dict | Mapping):
        table = _MAPPINGS
    elif isinstance(owner, list | tuple | range):
        table = _LISTS
    else:
        table = _NUMBERS if isinstance(owner, int | float) else {}
    rule = table.get(name)
    if rule is None:
        raise TemplateLimit(f"templates have no {type(owner).__name__}.{name}")
    return rule
