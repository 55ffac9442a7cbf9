"""A process that renders chat templates: `python -P template_child.py`.

A line of JSON is a job. A line of JSON answers it; its `num_bytes` are those of the rendered text, which follows as
UTF-8. (To read a long text out of JSON would hold the parent's interpreter lock for as long.)

A template is part of a downloaded model, or even of a request. Here it may run for as long and take as much memory as
the limits of the process allow: a signal ends Python code in time, and the parent kills what no signal ends. So no
operation of a template needs a rule of its own. The sandbox of jinja2 keeps a template from reaching anything.

This file needs only jinja2 and the standard library, so that the process starts in a fraction of a second.
"""

import datetime
import json
import math
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

MEMORY_BYTES = 2**30
"""Address space. The interpreter takes some 60 MB of it; a conversation of 8 MiB takes several times its size."""
MAX_CHARACTERS = 16 * 2**20
"""Longest rendered text."""
LONGEST_REASON = 300
ENCODE_SECONDS = 1
"""Processor time beyond that of a rendering, for encoding its text."""
_AGAIN_SECONDS = 0.02
"""The signal comes again, in case that Python code swallowed the first one."""
_KEPT_TEMPLATES = 32
_METHODS = frozenset(dir(dict))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the tokens of an assistant for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CallArguments(dict[str, Any]):
    """An object that prints as JSON: some templates print it as it is, others turn it into JSON themselves."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


@jinja2.pass_context
def _as_it_is(context: jinja2.runtime.Context, value: Any) -> Any:
    """Asks for the context, without which jinja2 would compute constant outputs when it compiles them."""
    return value


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox does it, without an exception for every field of a message: three times as fast."""
        if type(obj) is not dict or attribute in _METHODS:
            return super().getattr(obj, attribute)
        return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """As `transformers` makes it. Nothing of a template runs when it is compiled: constants are not folded."""
    made = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _Generation],
        finalize=_as_it_is,
        optimized=False,
    )
    made.filters["tojson"] = _tojson
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    del made.globals["lipsum"]
    return made


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text of a conversation, with the arguments of past calls as the template reads them.

    An object of arguments is given as an object; a template that adds it to a text gets it as text. Arguments that are
    no object are given as text; a template that asks for their items gets `{"arguments": text}`.

    Raises:
        Exception: the template refuses the conversation, or does something wrong.
    """
    template, messages = compiled(source), variables["messages"]
    try:
        return _shown(template, {**variables, "messages": _with_arguments(messages, _as_object)})
    except (TypeError, jinja2.UndefinedError) as error:
        forms: list[Callable[[Any], Any]] = [_as_text, _as_items] if isinstance(error, TypeError) else [_as_items]
        for form in forms:
            try:
                return _shown(template, {**variables, "messages": _with_arguments(messages, form)})
            except (TypeError, jinja2.UndefinedError):
                continue
        raise


@lru_cache(_KEPT_TEMPLATES)
def compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def _shown(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    pieces, length = [], 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise jinja2.TemplateError(f"it makes more than {MAX_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _with_arguments(messages: Any, form: Callable[[Any], Any]) -> list[Any]:
    """The messages with the arguments of their tool calls in another form."""
    return [
        {**message, "tool_calls": [_with_form(call, form) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _with_form(call: Any, form: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": form(function["arguments"])}}


def _as_object(arguments: Any) -> Any:
    return CallArguments(arguments) if isinstance(arguments, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _as_items(arguments: Any) -> Any:
    return _as_object(arguments if isinstance(arguments, dict) else {"arguments": arguments})


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of jinja2 escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class _Exhausted(BaseException):
    """The time of a rendering is over. No `except Exception` swallows it."""


def _answer(job: dict[str, Any]) -> dict[str, str]:
    """`text`, or `refused` with the reason, or `exhausted`: see `template_process`."""
    try:
        signal.setitimer(signal.ITIMER_PROF, job["seconds"], _AGAIN_SECONDS)
        try:
            return {"text": render(job["source"], {**job["variables"], "messages": job["messages"]})}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except _Exhausted:
        return {"exhausted": "time"}
    except MemoryError:
        return {"exhausted": "memory"}
    except Exception as error:  # template code raises anything
        return {"refused": str(error)[:LONGEST_REASON] or type(error).__name__}


def _end_rendering(*_: object) -> NoReturn:
    raise _Exhausted


def _limit(kind: int, most: int) -> None:
    """Limit this process's own resources; a lower limit that it was started with stays in force."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Serve the parent until it closes the pipe. Memory that a rendering ran out of is given back by ending.

    The limit of processor time ends a rendering that heeds no signal and whose parent has died.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    signal.signal(signal.SIGPROF, _end_rendering)
    for line in sys.stdin.buffer:
        try:
            job = json.loads(line)
            _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + job["seconds"]) + ENCODE_SECONDS)
            answer = _answer(job)
        except _Exhausted:  # it came between the end of the rendering and that of the timer
            answer = {"exhausted": "time"}
        text = answer.pop("text", "").encode("utf-8", "surrogatepass")
        sys.stdout.buffer.write(json.dumps({**answer, "num_bytes": len(text)}).encode() + b"\n" + text)
        sys.stdout.buffer.flush()
        if answer.get("exhausted") == "memory":
            return


if __name__ == "__main__":
    main()
