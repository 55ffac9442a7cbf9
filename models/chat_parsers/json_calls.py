"""{json}: objects with a name and arguments; {named}: objects with the name as their key. One, several, or a list."""

from troupellm.models.chat_parsers.json_arguments import ArgumentEnds, json_arguments
from troupellm.models.chat_parsers.json_dump import json_dump, without_surrogates
from troupellm.models.chat_parsers.json_text import json_value, json_whole
from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.syntax import CallSyntax
from troupellm.models.chat_parsers.text_stream import NotACall, Reading, Source, peek, spaces
from troupellm.protocol.params.tools import NAME

_SEPARATORS = ",;"


def json_calls(
    source: Source,
    syntax: CallSyntax,
    offered_tools: OfferedTools,
    ends: ArgumentEnds,
    *,
    only_offered: bool,
    named: bool = False,
) -> Reading[bool]:
    """Read calls; False when the arguments of one ended in something that is no JSON.

    Args:
        ends: marks that end arguments.
        named: the name of the function is the key of its arguments.

    Raises:
        NotACall: no call follows. Calls that were read before stay.
    """
    listed = (yield from peek(source)) == "["
    if listed:
        source.take(1)
        yield from spaces(source)
    while True:
        if named:
            whole = yield from _named(source, ends)
        else:
            whole = yield from _Envelope(source, syntax, offered_tools, ends, only_offered=only_offered).read()
        if not whole:
            return False
        if (yield from _ends(source, listed=listed)):
            return True


def _ends(source: Source, *, listed: bool) -> Reading[bool]:
    """True if there is no further call. White space, separators and surplus brackets between calls are not shown.

    Raises:
        NotACall: a separator, but no call behind it.
    """
    source.attempt()
    yield from spaces(source)
    following = yield from peek(source)
    while following == "}":
        source.take(1)
        yield from spaces(source)
        following = yield from peek(source)
    separated = following != "" and following in _SEPARATORS
    if separated:
        source.take(1)
        yield from spaces(source)
        following = yield from peek(source)
    if following == "{":
        return False
    if listed and following == "]":
        source.take(1)
    elif separated and following:
        raise NotACall
    source.commit()
    return True


def _named(source: Source, ends: ArgumentEnds) -> Reading[bool]:
    """One object whose only key is the name.

    Raises:
        NotACall: something else comes.
    """
    if not source.attempting:
        source.attempt()
    yield from spaces(source)
    if (yield from peek(source)) != "{":
        raise NotACall
    source.take(1)
    yield from spaces(source)
    if (yield from peek(source)) != '"':
        raise NotACall
    name = yield from json_whole(source)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise NotACall
    source.named = (name, "")
    yield from spaces(source)
    if (yield from peek(source)) != ":":
        raise NotACall
    source.take(1)
    yield from spaces(source)
    if (yield from peek(source)) != "{":
        raise NotACall
    source.call(name)
    if not (yield from json_arguments(source, source.arguments, ends)):
        return False
    source.end_call()
    return True


class _Envelope:
    """One object."""

    def __init__(
        self, source: Source, syntax: CallSyntax, offered_tools: OfferedTools, ends: ArgumentEnds, *, only_offered: bool
    ) -> None:
        self._source = source
        self._syntax = syntax
        self._offered_tools = offered_tools
        self._ends = ends
        self._only_offered = only_offered
        self._name: str | None = None
        self._early: str | None = None
        """Arguments that came before the name."""
        self._called = False

    def read(self) -> Reading[bool]:
        """
        Raises:
            NotACall: before anything was called.
        """
        source = self._source
        if not source.attempting:
            source.attempt()
        if (yield from peek(source)) != "{":
            raise NotACall
        source.take(1)
        if not (yield from self._members()):
            return False
        if not self._called:
            self._call()
        return True

    def _members(self) -> Reading[bool]:
        """The members of the object that was opened, and its closing bracket."""
        source = self._source
        while True:
            yield from spaces(source)
            following = yield from peek(source)
            if following == "}":
                source.take(1)
                return True
            if following != '"':
                return self._stop()
            try:
                key = yield from json_whole(source)
            except NotACall:
                return self._stop()
            yield from spaces(source)
            if (yield from peek(source)) != ":":
                return self._stop()
            source.take(1)
            yield from spaces(source)
            if not (yield from self._member(str(key))):
                return False
            yield from spaces(source)
            following = yield from peek(source)
            if following == ",":
                source.take(1)
            elif following != "}":
                return self._stop()

    def _stop(self) -> bool:
        """This is no object. Once a call has begun it is that call's end."""
        if not self._called:
            raise NotACall
        return False

    def _member(self, key: str) -> Reading[bool]:
        source, syntax = self._source, self._syntax
        following = yield from peek(source)
        if key in syntax.argument_keys and not self._called and self._early is None:
            return (yield from self._arguments(following))
        if key in syntax.name_keys and self._name is None and following == '"':
            self._set_name((yield from json_whole(source)))
            return True
        if key == "function" and self._name is None and following in ('"', "{"):
            if following == "{":
                source.take(1)
                return (yield from self._members())
            self._set_name((yield from json_whole(source)))
            return True
        if self._only_offered and key not in ("type", "id") and not self._called:
            raise NotACall
        if not (yield from json_value(source, lambda text: None)):
            return self._stop()
        return True

    def _set_name(self, name: object) -> None:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise NotACall
        if self._only_offered and not self._offered_tools.has(name):
            raise NotACall
        self._name = name
        self._source.named = (name, "")
        if self._early is not None:
            self._call()

    def _arguments(self, following: str) -> Reading[bool]:
        source = self._source
        if not following:
            raise NotACall
        if self._name is None:
            value = yield from json_whole(source)
            self._early = _arguments_text(value)
            return True
        if following == "{":
            source.call(self._name)
            self._called = True
            whole = yield from json_arguments(source, source.arguments, self._ends)
            if whole:
                source.end_call()
            return whole
        self._early = _arguments_text((yield from json_whole(source)))
        self._call()
        return True

    def _call(self) -> None:
        """All is known at once."""
        if self._name is None or (self._only_offered and self._early is None):
            raise NotACall
        self._source.call(self._name)
        self._called = True
        self._source.arguments("{}" if self._early is None else self._early)
        self._source.end_call()


def _arguments_text(value: object) -> str:
    """Arguments that came whole: an object, the text of one, or nothing.

    Raises:
        NotACall: anything else.
    """
    if value is None:
        return "{}"
    if isinstance(value, str):
        return without_surrogates(value) or "{}"
    if not isinstance(value, dict):
        raise NotACall
    return json_dump(value)
