"""Where chat templates run: jinja2's immutable sandbox, under limits of cost, time and size.

A template comes with a downloaded model, or even with a request. The sandbox keeps it from reaching anything; the
limits keep it from holding a thread or filling the memory. Everything that a template can name is charged by the size
of what it works on before it runs (see template_costs), and nothing runs when a template is compiled: constants are not
folded. The clock is looked at whenever so much has been charged, for where the charges are too low.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import BuiltinFunctionType, MethodType, ModuleType
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.utils import Cycler, Joiner

from troupellm.models import template_costs
from troupellm.models.template_costs import Rule, free, passes
from troupellm.models.template_meter import TemplateLimit, used
from troupellm.models.template_sizes import MAX_CHARACTERS, contained, copied, made, settled, too_long, weigh
from troupellm.models.template_tree import Meter

MAX_COST = 300_000_000
"""Of one rendering, in units of about a nanosecond."""
STEP_COST = 1_000
"""Of one round of a loop, or one call."""
MAX_SECONDS = 1.0
"""Of the thread's own CPU time, for one rendering."""
_ARGUMENT_COST = 200


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, extensions: Iterable[Any]) -> None:
        @jinja2.pass_context  # else what is constant would be finalized when the template is compiled
        def finalize(context: Any, value: Any) -> Any:
            size = len(value) if type(value) is str else weigh(value)
            self._show(size)
            return value

        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=list(extensions), finalize=finalize, optimized=False
        )
        filters, tests = dict[str, Any](self.filters), dict[str, Any](self.tests)
        self.filters = {one: self._charged(one, filters[one], rule) for one, rule in template_costs.FILTERS.items()}
        self.tests = {one: self._charged(one, tests[one], rule) for one, rule in template_costs.TESTS.items()}
        self.filters |= {
            Meter.TICK: self._tick,
            Meter.JOIN: self._join_texts,
            Meter.WEIGH: self._weighed,
            Meter.COPY: self._copied,
            Meter.SEARCH: self._searched,
        }
        del self.globals["lipsum"]
        self._callables: dict[int, Rule] = {}
        for name, rule in (("range", free), ("namespace", passes), ("cycler", free), ("joiner", free)):
            self._callables[id(self.globals[name])] = rule
        self._callables[id(dict)] = template_costs.linear(1)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = self._charged(name, function, template_costs.FILTERS[name])

    def add_function(self, name: str, function: Callable[..., Any]) -> None:
        self.globals[name] = function
        self._callables[id(function)] = template_costs.linear(1)

    def bounded(
        self, template: jinja2.Template, variables: Mapping[str, Any], most: int = 0, seconds: float = 0.0
    ) -> str:
        """Render.

        Args:
            most: what it may cost, MAX_COST unless given.
            seconds: what it may take, MAX_SECONDS unless given.

        Raises:
            TemplateLimit: more cost, time or text than allowed.
            Exception: whatever the template does wrong.
        """
        used.begin(most or MAX_COST, seconds or MAX_SECONDS)
        try:
            pieces, length = [], 0
            for piece in template.generate(variables):
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise too_long()
                pieces.append(piece)
            return "".join(pieces)
        finally:
            used.end()

    def _show(self, characters: int) -> None:
        used.characters += characters
        if used.characters > MAX_CHARACTERS:
            raise too_long()
        used.charge(characters)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # what templates mostly do
            made(len(left) + len(right))
            used.charge(weigh(left) + weigh(right))
            return left + right
        used.charge(template_costs.binary(operator, left, right))
        return self.binop_table[operator](left, right)

    def call(self, context: Any, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        kind = type(target)
        if kind is Macro:
            used.charge(STEP_COST + _ARGUMENT_COST * len(args))
            return context.call(target, *args, **kwargs)
        used.charge(STEP_COST + _ARGUMENT_COST * len(args))
        given = [settled(one) for one in args]
        used.charge(self._cost_of_call(target, kind, given, kwargs))
        return super().call(context, target, *given, **kwargs)

    def _cost_of_call(self, target: Any, kind: type, args: list[Any], kwargs: Mapping[str, Any]) -> int:
        """
        Raises:
            TemplateLimit: it is nothing that templates may call.
        """
        rule = self._callables.get(id(target))
        if rule is not None:
            return rule(None, template_costs.arranged("", args, kwargs))
        if isinstance(target, BlockReference | LoopContext | Joiner | jinja2.Undefined):
            return 0
        method = getattr(target, "__wrapped__", target)  # str.format is wrapped by the sandbox
        if isinstance(method, BuiltinFunctionType | MethodType):
            owner, name = method.__self__, method.__name__
            given = template_costs.arranged(name, args, kwargs)
            if isinstance(owner, LoopContext | Cycler) and name in ("cycle", "changed", "next", "reset"):
                return sum(map(weigh, given))
            if not isinstance(owner, ModuleType | type | None):
                return template_costs.method(owner, name)(owner, given)
        raise TemplateLimit(f"templates cannot call {getattr(method, '__qualname__', kind.__name__)}")

    def _charged(self, name: str, function: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
        if rule is free:
            return function
        # Filters that get the environment or the context have it before the value.
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        reads = name in template_costs.READERS
        numeric = name in ("int", "round", "sum")

        @wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            value = args[first]
            if reads:
                value = settled(value)
            rest = [settled(one) for one in args[first + 1 :]]
            used.charge(rule(value, template_costs.arranged(name, rest, kwargs)))
            result = function(*args[:first], value, *rest, **kwargs)
            if numeric:
                weigh(result)
            return result

        return charged

    def _tick(self, constant: int) -> str:
        """One more round of a loop or call of a macro, whose body has so much constant text."""
        if constant:
            self._show(constant)
        used.charge(STEP_COST)
        return ""

    def _join_texts(self, parts: Any) -> str:
        """What `~` does."""
        made(sum(len(one) if isinstance(one, str) else weigh(one) for one in parts))
        used.charge(sum(map(weigh, parts)))
        return "".join(map(str, parts))

    def _weighed(self, value: Any) -> Any:
        """A value that is compared or hashed."""
        used.charge(len(value) if type(value) is str else weigh(value))
        return value

    def _copied(self, value: Any) -> Any:
        """A value of which a slice is taken."""
        used.charge(copied(value))
        return value

    def _searched(self, value: Any) -> Any:
        """A value in which something is looked for."""
        value = settled(value)
        used.charge(contained(value))
        return value

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(Meter().visit(source), *args, **kwargs)
