"""{parameters}: arguments in tags, which become members of a JSON object. String values are shown as they come."""

import html
import json
from collections.abc import Sequence
from typing import Final

from troupellm.models.chat_parsers.json_until_marker import json_until
from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.syntax import Element, Hole, Maybe, Word, elements
from troupellm.models.chat_parsers.text_stream import NotACall, Reading, Source, beyond, comes, literal, peek, spaces
from troupellm.models.chat_parsers.until_marker import Marks, raw_until, text_until
from troupellm.models.chat_parsers.values import value_text

_LONGEST_VALUE: Final = 64 * 1024
"""Characters. A longer value is a string, for any schema."""
_LONGEST_KEY: Final = 256
_TYPES: Final = frozenset({"null", "integer", "number", "boolean", "object", "array", "string"})
_QUOTES: Final = {quote: Marks([quote]) for quote in "\"'"}


class TaggedParameter:
    """The parts of a `parameter` template: a mark, {key} and perhaps {type}, {value} before the last mark."""

    def __init__(self, template: str, hidden: frozenset[str] = frozenset(), *, entities: bool = False) -> None:
        """
        Args:
            hidden: special tokens, which end a value wherever they come.
            entities: keys are written with &quot; and &amp;.

        Raises:
            ValueError: the template has another form.
        """
        parts = elements(template)
        kinds = [part.name if isinstance(part, Hole) else "" for part in parts]
        if kinds.count("value") != 1 or kinds.count("key") != 1 or kinds.index("key") > kinds.index("value"):
            raise ValueError(f"a parameter's template needs {{key}} before {{value}}, got {template!r}")
        place = kinds.index("value")
        first, close = parts[0], parts[-1]
        if not isinstance(first, Word) or not isinstance(close, Word) or place < 2 or len(parts) - place > 3:
            raise ValueError(f"a parameter's template needs marks around {{key}} and {{value}}, got {template!r}")
        self.opens = first.text
        self.head = parts[1:place]
        self.close = close.text
        self.wrapped = ""
        """The mark that may stand before a value and is not part of it."""
        self.wrapper_ends = ""
        last = self.head[-1]
        if len(parts) - place == 3 and isinstance(last, Maybe):
            self.head = self.head[:-1]
            self.wrapped, self.wrapper_ends = _only_word(last), _only_word(parts[place + 1])
        self.entities = entities
        self.on_lines = "\n{value}\n" in template
        """Line breaks around a value are not part of it."""
        self.hidden = hidden
        self._closes: dict[str, Marks] = {}

    def ends_of(self, index: int) -> Marks:
        """Marks of which one ends the hole of the head at `index`."""
        found: list[str] = []
        for part in self.head[index + 1 :]:
            if isinstance(part, Word):
                found.append(part.text)
                break
            if isinstance(part, Maybe):
                found.append(_only_word(part))
        return Marks(found)

    def closes(self, ending: str) -> Marks:
        """The ends of a value: its mark or a special token. If a model has left both out, a mark such as <|...|> of the
        next part ends it, or a line that continues with another mark.

        Args:
            ending: the text after the last parameter.
        """
        found = self._closes.get(ending)
        if found is None:
            following = {mark for mark in (self.opens, ending) if mark}
            sure = {self.close, *self.hidden, *(mark for mark in following if mark.startswith("<|"))}
            marks = sure | {f"\n{mark}" for mark in following if all(known not in mark for known in sure)}
            marks = {mark for mark in marks if not any(mark != other and mark in other for other in marks)}
            found = self._closes[ending] = Marks(marks | {self.close})
        return found


def _only_word(part: Element) -> str:
    inner = part.parts[0] if isinstance(part, Maybe) else part
    if not isinstance(inner, Word):
        raise ValueError("a part that may be missing begins with a mark")
    return inner.text


def tagged_parameters(
    source: Source,
    parameters: Sequence[TaggedParameter],
    offered_tools: OfferedTools,
    name: str,
    call_id: str,
    ending: str,
) -> Reading[bool]:
    """Read the parameters of a call whose name was read; False where they end in the middle of one.

    Args:
        parameters: spellings of one.
        ending: the text after the last one.

    Raises:
        NotACall: neither a parameter nor the ending comes next.
    """
    keys: set[str] = set()
    while True:
        yield from spaces(source)
        parameter, opened = yield from _opened(source, parameters, ending)
        if parameter is None:
            break
        if not keys:
            source.call(name, call_id)
        if not (yield from _parameter(source, parameter, offered_tools, name, keys, ending, opened=opened)):
            return False
    if not keys:
        if not (yield from comes(source, ending)):
            raise NotACall
        source.call(name, call_id)
        source.arguments("{")
    source.arguments("}")
    source.end_call()
    return True


def _opened(
    source: Source, parameters: Sequence[TaggedParameter], ending: str
) -> Reading[tuple[TaggedParameter | None, bool]]:
    """The parameter that comes next, and whether its first mark was there: where a key stands in tags of its own,
    models leave that out."""
    for parameter in parameters:
        if (yield from literal(source, parameter.opens)):
            return parameter, True
    parameter = parameters[0]
    if not isinstance(parameter.head[0], Hole) or not parameter.opens.endswith(">"):
        return None, False
    character = yield from peek(source)
    if not (character.isalpha() or character == "_"):
        return None, False
    key_ends = _only_word(parameter.head[1])
    while True:  # nothing is taken before it is known to be a key
        text = source.text[source.pos : source.pos + _LONGEST_KEY]
        if key_ends in text:
            key = text[: text.index(key_ends)]
            return (None, False) if "<" in key or "\n" in key else (parameter, False)
        if len(text) == _LONGEST_KEY or source.ended or "\n" in text or ("<" in text and not _begins(text, key_ends)):
            return None, False
        yield from beyond(source, len(source.text) - source.pos)


def _begins(text: str, mark: str) -> bool:
    """True if the text ends with the beginning of a mark."""
    return mark.startswith(text[text.index("<") :])


def _parameter(
    source: Source,
    parameter: TaggedParameter,
    offered_tools: OfferedTools,
    name: str,
    keys: set[str],
    ending: str,
    *,
    opened: bool,
) -> Reading[bool]:
    """
    Args:
        keys: those before it; a key that comes again is passed over.
        opened: its first mark was read.
    """
    holes = {"key": "", "type": ""}
    headed = yield from _head(source, parameter, holes)
    key = holes["key"].strip()[:_LONGEST_KEY]
    if parameter.entities:
        key = html.unescape(key)
    if not headed and not key:
        source.arguments("" if keys else "{")
        return False
    again = key in keys
    if not again:
        source.arguments((", " if keys else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        keys.add(key)
    if not headed:
        return False
    closes = parameter.closes(ending)
    wrapped = bool(parameter.wrapped) and (yield from literal(source, parameter.wrapped))
    if wrapped:
        closes = Marks([parameter.wrapper_ends])
    if again:
        mark = yield from raw_until(source, closes, lambda text: None)
    else:
        types = _types(offered_tools.types(name, key), holes["type"])
        value = _Value(source, types, on_lines=parameter.on_lines)
        if types & {"object", "array"} and "string" not in types:
            mark = yield from json_until(source, closes, parameter.hidden, value.add, _LONGEST_VALUE)
        else:
            mark = yield from raw_until(source, closes, value.add)
        value.end(whole=bool(mark))
    if wrapped and mark:
        yield from spaces(source)
        yield from literal(source, parameter.close)
    elif mark and mark != parameter.close:
        source.back(len(mark))
    return bool(mark)


def _types(types: frozenset[str], said: str) -> frozenset[str]:
    """The types of a value, as the tag says them, or the schema."""
    if said == "true":  # string="true"
        return frozenset({"string"})
    if said == "false":
        return types - {"string"}
    return frozenset({said}) if said in _TYPES else types


def _head(source: Source, parameter: TaggedParameter, holes: dict[str, str]) -> Reading[bool]:
    """Read from behind the first mark up to the value; False where something else comes."""
    for index, part in enumerate(parameter.head):
        if isinstance(part, Hole):
            found = yield from _attribute(source, parameter.ends_of(index))
            if found is None:
                return False
            holes[part.name] = found
            continue
        yield from spaces(source)
        words = part.parts if isinstance(part, Maybe) else (part,)
        for place, inner in enumerate(words):
            if isinstance(inner, Word):
                if (yield from literal(source, inner.text)):
                    continue
                if place == 0 and isinstance(part, Maybe):
                    break
                return False
            rest = Maybe(words[place + 1 :]) if place + 1 < len(words) else None
            ends = _ends(rest, parameter.ends_of(index))
            found = yield from _attribute(source, ends)
            if found is None:
                return False
            if isinstance(inner, Hole):
                holes[inner.name] = found
    return True


def _ends(rest: Maybe | None, following: Marks) -> Marks:
    return following if rest is None else Marks([_only_word(rest)])


def _attribute(source: Source, ends: Marks) -> Reading[str | None]:
    """A text in quotes, or up to one of `ends`, which is not taken; None at the end of the text."""
    parts: list[str] = []
    quote = yield from peek(source)
    if quote and quote in _QUOTES:
        source.take(1)
        found = yield from text_until(source, _QUOTES[quote], parts.append)
        return None if found is None else "".join(parts)
    found = yield from text_until(source, ends, parts.append)
    if found is not None:
        source.back(len(found.mark))
    return None if found is None and not parts else "".join(parts)


class _Value:
    """A value that becomes JSON: a text at once, anything else when it is complete. It comes without the line breaks
    around it where they belong to the tags."""

    def __init__(self, source: Source, types: frozenset[str], *, on_lines: bool) -> None:
        self._source = source
        self._on_lines = on_lines
        self._types = types
        self._parts: list[str] = []
        self._length = 0
        self._streams = types == {"string"}
        self._begun = False
        self._last = ""
        """A line break that may be the one before the closing mark."""
        self._first = on_lines

    def add(self, text: str) -> None:
        if not text:
            return
        if self._first:
            self._first = False
            text = text.removeprefix("\n")
        if not self._streams:
            room = _LONGEST_VALUE - self._length
            self._parts.append(text[:room])
            self._length += len(self._parts[-1])
            if len(text) <= room:
                return
            self._streams = True
            text = "".join(self._parts) + text[room:]
        self._show(text)

    def _show(self, text: str) -> None:
        if not self._begun:
            self._begun = True
            self._source.arguments('"')
        text = self._last + text
        self._last = "\n" if self._on_lines and text.endswith("\n") else ""
        text = text[: len(text) - len(self._last)]
        self._source.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def end(self, *, whole: bool = True) -> None:
        if self._streams:
            self._show("")
            self._source.arguments('"' if whole else "")
        elif whole:
            text = "".join(self._parts)
            self._source.arguments(value_text(text.removesuffix("\n") if self._on_lines else text, self._types))
