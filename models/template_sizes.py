"""How large the values are that a chat template works on, and how large they may become."""

from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from itertools import islice
from typing import Any

from jinja2.utils import Namespace

from troupellm.models.template_meter import TemplateLimit, used

MAX_CHARACTERS = 16 * 2**20
"""Of the rendered text, and of any text on the way to it."""
MAX_ITEMS = 2**20
"""Of any list."""
MAX_BITS = 4_096
"""Of any integer."""
MAX_WIDTH = 1_000
"""Of what is padded or indented."""
MAX_DEPTH = 200
"""Of lists in lists: the interpreter walks them by recursion, and hashes them without any limit of its own."""
NODE_COST = 64
"""Of one thing inside a list or mapping, for whoever walks through all of them."""
WIDE = 4
"""Bytes of a character beyond ASCII, at most; copies of texts are what fills the memory."""


def weigh(value: Any) -> int:
    """What it costs to walk through all of a value: to show, compare, copy or hash it.

    Raises:
        TemplateLimit: more than any text may have or than is left, an integer that is too large, or too deeply nested.
    """
    kind = type(value)
    if kind is str:
        return len(value) if value.isascii() else WIDE * len(value)
    if value is None or kind is bool or kind is float:
        return 1
    total, nodes, level = 0, 0, [value]
    most_nodes = min(MAX_ITEMS, used.left // NODE_COST)
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        nodes += len(level)
        for one in level:
            kind = type(one)
            if kind is str:
                total += len(one)
                continue
            if one is None or kind is bool or kind is float:
                continue
            if isinstance(one, int):
                if one.bit_length() > MAX_BITS:
                    raise TemplateLimit("the template computes with numbers that are too large")
                continue
            total += _open(one, below)
            if nodes + len(below) > most_nodes:
                used.charge(NODE_COST * (nodes + len(below)))  # here it ends, if it is only that no more is left
                raise too_long()
        if total > MAX_CHARACTERS:
            raise too_long()
        if not below:
            return total + NODE_COST * nodes
        level = below
    raise TemplateLimit(f"the template nests more than {MAX_DEPTH} lists")


def _open(value: Any, below: list[Any]) -> int:
    """The length of what is a text or counts like one; of others, what is inside goes below."""
    if isinstance(value, dict):
        below.extend(value.keys())
        below.extend(value.values())
    elif isinstance(value, list | tuple | KeysView | ValuesView | ItemsView):
        below.extend(value)
    elif isinstance(value, str | range):
        return len(value)
    elif isinstance(value, bytes | bytearray | memoryview):
        raise TemplateLimit("templates have no bytes")
    elif isinstance(value, Namespace):
        raise TemplateLimit("templates do not show or compare namespaces")
    elif isinstance(value, Mapping):
        below.extend(value.keys())
        below.extend(value.values())
    return 0


def settled(value: Any) -> Any:
    """The value, or the list of what an iterator yields."""
    if not hasattr(value, "__next__"):
        return value
    items = list(islice(value, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise too_long()
    return items


def made(characters: int) -> int:
    """The cost of making a text.

    Raises:
        TemplateLimit: it would be too long.
    """
    if characters > MAX_CHARACTERS:
        raise too_long()
    return characters


def counted(value: Any, each: int = 8) -> int:
    """The cost of copying a list, or a text letter by letter.

    Raises:
        TemplateLimit: it has too many items.
    """
    length = len(value) if hasattr(value, "__len__") else 1
    if length > MAX_ITEMS:
        raise too_long()
    return each * length


def copied(value: Any) -> int:
    return made(len(value)) if isinstance(value, str) else counted(value)


def contained(value: Any) -> int:
    """The cost of looking for something in a value. Looking backwards has its own rule."""
    if isinstance(value, str):
        return len(value)
    return 0 if isinstance(value, dict | range) else weigh(value)


def too_long() -> TemplateLimit:
    return TemplateLimit(f"the template makes more than {MAX_CHARACTERS} characters or {MAX_ITEMS} items")
