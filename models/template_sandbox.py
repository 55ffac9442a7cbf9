"""Where chat templates run: jinja2's immutable sandbox, under limits of steps, time and size.

A template comes with a downloaded model, or even with a request. The sandbox keeps it from reaching anything; the
limits keep it from holding a thread or filling the memory. Loops and macros count their steps (the syntax tree gets a
call at the start of each body), and whatever can make much out of little is looked at before it does.
"""

import itertools
import re
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 300_000
"""Rounds of loops and calls of macros in one rendering."""
MAX_SECONDS = 1.0
"""Of the thread's own CPU time, for one rendering."""
_STEPS_PER_LOOK = 32
"""Looking at the clock costs more than a step."""
MAX_CHARACTERS = 16 * 2**20
"""Of the rendered text, and of any text on the way to it."""
MAX_ITEMS = 2**20
"""Of any list."""
MAX_BITS = 4_096
"""Of any integer."""
MAX_WIDTH = 1_000
"""Of what is padded or indented."""

_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))")
_WIDE_BRACES = re.compile(r"\{[^{}]*\d{4,}[^{}]*\}")
_NESTED_FORMAT = re.compile(r":[^{}]*\{")
_SPREADS = frozenset({"center", "indent", "wordwrap", "batch", "slice", "tojson"})
"""Filters whose numbers decide how much comes out."""
_ITERATES = frozenset(
    {"list", "map", "select", "reject", "selectattr", "rejectattr", "sort", "unique", "groupby", "batch", "slice"}
    | {"reverse", "sum", "min", "max", "dictsort", "items", "join"}
)
_SHOWS = frozenset({"tojson", "string", "trim", "upper", "lower", "title", "capitalize", "e", "escape", "forceescape"})
_ABSENT = ("random", "urlize", "pprint", "xmlattr", "striptags", "filesizeformat")
_PADS = frozenset({"ljust", "rjust", "center", "zfill"})


class TemplateLimit(jinja2.TemplateRuntimeError):
    """A template wants more than it may have."""


class _Used(threading.local):
    """What the rendering on this thread has used."""

    active = False
    steps = 0
    characters = 0
    until = 0.0


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, extensions: Iterable[Any]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=list(extensions), finalize=self._finalize)
        self._used = _Used()
        for name in _ABSENT:
            self.filters.pop(name, None)
        self.filters = {name: _guarded(name, function) for name, function in self.filters.items()}
        self.globals.pop("lipsum", None)

    @property
    def steps(self) -> int:
        """What the last rendering on this thread took."""
        return self._used.steps

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _guarded(name, function)

    def bounded(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render.

        Raises:
            TemplateLimit: more steps, time or text than allowed.
            Exception: whatever the template does wrong.
        """
        used = self._used
        used.active, used.steps, used.characters = True, 0, 0
        used.until = time.thread_time() + MAX_SECONDS
        try:
            pieces, length = [], 0
            for piece in template.generate(variables):
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise _too_long()
                pieces.append(piece)
            return "".join(pieces)
        finally:
            used.active = False

    def tick(self, constant: int) -> str:
        """One more round of a loop or call of a macro, whose body has so much constant text."""
        used = self._used
        used.steps += 1
        self._charge(constant)
        if used.steps > MAX_STEPS:
            raise TemplateLimit(f"the template takes more than {MAX_STEPS} steps")
        if used.steps % _STEPS_PER_LOOK == 1 and time.thread_time() > used.until:
            raise TemplateLimit(f"the template takes more than {MAX_SECONDS:g} seconds")
        return ""

    def join_texts(self, *parts: Any) -> str:
        """What `~` does."""
        if sum(map(_weigh, parts)) > MAX_CHARACTERS:
            raise _too_long()
        return "".join(map(str, parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_BITS:
                raise TemplateLimit("the template computes with numbers that are too large")
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            most = MAX_CHARACTERS if isinstance(left, str) else MAX_ITEMS
            if len(left) + len(right) > most:
                raise _too_long()
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(target, "__wrapped__", target)
        owner = getattr(method, "__self__", None)
        if owner is not None and owner is not self:
            _check_method(owner, method.__name__, args, kwargs)
        return super().call(context, target, *args, **kwargs)

    def _finalize(self, value: Any) -> Any:
        if self._used.active:  # constants are finalized when the template is compiled
            self._charge(_weigh(value))
        return value

    def _charge(self, characters: int) -> None:
        self._used.characters += characters
        if self._used.characters > MAX_CHARACTERS:
            raise _too_long()

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Meter().visit(source), *args, **kwargs)


class _Meter(NodeTransformer):
    """Has every loop and macro count, and every `~` look at what it joins."""

    def visit_For(self, node: Any) -> Any:
        return self._counted(node)

    def visit_Macro(self, node: Any) -> Any:
        return self._counted(node)

    def visit_CallBlock(self, node: Any) -> Any:
        return self._counted(node)

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        return self._call("join_texts", node.nodes, node.lineno)

    def _counted(self, node: Any) -> Any:
        constant = sum(len(data.data) for data in node.find_all(jinja2.nodes.TemplateData))
        self.generic_visit(node)
        tick = self._call("tick", [jinja2.nodes.Const(constant, lineno=node.lineno)], node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    @staticmethod
    def _call(name: str, arguments: list[Any], line: int) -> jinja2.nodes.Call:
        method = jinja2.nodes.EnvironmentAttribute(name, lineno=line)
        return jinja2.nodes.Call(method, arguments, [], None, None, lineno=line)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if name not in _SPREADS | _ITERATES | _SHOWS | {"replace", "format", "indent"}:
        return function
    # Filters that get the environment or the context have it before the value.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        value, rest = given[first], given[first + 1 :]
        if name in _ITERATES:
            given[first] = value = _few(value)
        if name in _SPREADS and any(isinstance(one, int) and one > MAX_WIDTH for one in (*rest, *kwargs.values())):
            raise TemplateLimit(f"the template's filter {name} makes more than {MAX_WIDTH} of one")
        if name == "indent":
            width = rest[0] if rest else kwargs.get("width", 4)
            _check_size(str(value).count("\n") * (len(width) if isinstance(width, str) else int(width)))
        elif name == "replace" and len(rest) > 1:
            _check_replace(str(value), *map(str, rest[:2]))
        elif name == "format":
            _check_format(str(value), [*rest, *kwargs.values()])
        elif name == "join":
            _check_join(value, rest[0] if rest else kwargs.get("d", ""))
        elif name in _SHOWS:
            _weigh(value)
        return function(*given, **kwargs)

    return guarded


def _few(value: Any) -> Any:
    """The value, if there are not too many items in it; what has no length is read into a list."""
    if hasattr(value, "__len__"):
        if len(value) > MAX_ITEMS:
            raise _too_long()
        return value
    if not hasattr(value, "__iter__") or isinstance(value, jinja2.Undefined):
        return value
    items = list(itertools.islice(value, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise _too_long()
    return items


def _check_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if isinstance(owner, bytes | bytearray | memoryview | int) and name not in ("decode", "bit_length", "is_integer"):
        raise TemplateLimit(f"templates have no {type(owner).__name__}.{name}")
    if not isinstance(owner, str):
        return
    if name == "replace" and len(args) > 1:
        _check_replace(owner, str(args[0]), str(args[1]))
    elif name == "join" and args:
        if not hasattr(args[0], "__len__"):
            raise TemplateLimit("templates join lists and texts only")
        _check_join(args[0], owner)
    elif name in ("format", "format_map"):
        if _NESTED_FORMAT.search(owner):
            raise TemplateLimit("templates have no formats inside formats")
        _check_format(owner, [*args, *kwargs.values()])
    elif name in _PADS and any(isinstance(one, int) and one > MAX_WIDTH + len(owner) for one in args):
        raise TemplateLimit(f"the template pads a text by more than {MAX_WIDTH}")
    elif name in ("split", "rsplit", "splitlines"):
        separator = args[0] if args and isinstance(args[0], str) and args[0] else None
        parts = owner.count(separator) if separator else sum(map(owner.count, (" ", "\n", "\t", "\r")))
        if parts > MAX_ITEMS:
            raise _too_long()
    elif name in ("translate", "maketrans", "expandtabs"):
        raise TemplateLimit(f"templates have no str.{name}")


def _check_product(left: Any, right: Any) -> None:
    for sized, times in ((left, right), (right, left)):
        if hasattr(sized, "__len__") and isinstance(times, int):
            if len(sized) * times > (MAX_CHARACTERS if isinstance(sized, str) else MAX_ITEMS):
                raise _too_long()
            return
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise TemplateLimit("the template computes with numbers that are too large")


def _check_format(form: str, values: Any) -> None:
    if _WIDE_PERCENT.search(form) or _WIDE_BRACES.search(form):
        raise TemplateLimit("the template formats with a width that is too large")
    _check_size(len(form) + max(1, form.count("%") + form.count("{")) * _weigh(values))


def _check_replace(text: str, old: str, new: str) -> None:
    _check_size(len(text) + text.count(old) * len(new))


def _check_join(parts: Any, separator: Any) -> None:
    if hasattr(parts, "__len__"):
        _check_size(_weigh(parts) + len(parts) * len(str(separator)))


def _check_size(characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise _too_long()


def _weigh(value: Any) -> int:
    """Least number of characters that showing a value takes.

    Raises:
        TemplateLimit: more than any text may have.
    """
    if isinstance(value, str):
        return len(value)
    total, nodes, pending = 0, 0, [value]
    while pending:
        one = pending.pop()
        nodes += 1
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, Mapping):
            pending.extend(one.keys())
            pending.extend(one.values())
        elif isinstance(one, list | tuple | KeysView | ValuesView | ItemsView):
            pending.extend(one)
        elif isinstance(one, Namespace):
            raise TemplateLimit("templates do not show namespaces")
        if total > MAX_CHARACTERS or nodes > MAX_ITEMS or len(pending) > MAX_ITEMS:
            raise _too_long()
    return total + nodes


def _too_long() -> TemplateLimit:
    return TemplateLimit(f"the template makes more than {MAX_CHARACTERS} characters or {MAX_ITEMS} items")
