"""{parameters}: arguments in tags, which become members of a JSON object. Texts are shown while they come."""

import json
from typing import Final

from troupellm.models.dialects.marks import Marks, raw_until, text_until
from troupellm.models.dialects.offer import Offer, value_text
from troupellm.models.dialects.source import NotACall, Reading, Source, comes, literal, spaces
from troupellm.models.dialects.syntax import Hole, Word, elements

_LONGEST_VALUE: Final = 64 * 1024
"""Characters. A longer value is a text, whatever the schema says."""
_LONGEST_KEY: Final = 256


class TaggedParameter:
    """The parts of a `parameter` template, which has {key} between two marks and {value} before the last."""

    def __init__(self, template: str) -> None:
        """
        Raises:
            ValueError: the template has another form.
        """
        parts = elements(template)
        kinds = [part.name if isinstance(part, Hole) else "" for part in parts]
        if kinds not in (["", "key", "", "value", ""], ["", "key", "", "", "value", ""]):
            raise ValueError(f"a parameter's template needs <{{key}}> and {{value}}, got {template!r}")
        words = [part.text for part in parts if isinstance(part, Word)]
        self.opens = words[0]
        self.key_ends = Marks([words[1]])
        self.value_opens = words[2] if len(words) == 4 else ""
        self.close = words[-1]
        self._closes: dict[str, Marks] = {}
        self.on_lines = "\n{value}\n" in template
        """Line breaks around a value are not part of it."""

    def closes(self, ending: str) -> Marks:
        """What ends a value: its mark, or where a model has left that out a line that goes on with something else.

        Args:
            ending: what follows the last parameter.
        """
        found = self._closes.get(ending)
        if found is None:
            others = [f"\n{mark}" for mark in (self.opens, ending) if mark]
            found = self._closes[ending] = Marks([self.close, *others])
        return found


def tagged_parameters(
    source: Source, parameter: TaggedParameter, offer: Offer, name: str, call_id: str, ending: str
) -> Reading[bool]:
    """Read the parameters of a call whose name was read; False where they end in the middle of one.

    Args:
        ending: what follows the last one.

    Raises:
        NotACall: neither a parameter nor the ending comes next.
    """
    keys: set[str] = set()
    while True:
        yield from spaces(source)
        if not (yield from literal(source, parameter.opens)):
            break
        if not keys:
            source.call(name, call_id)
        if not (yield from _parameter(source, parameter, offer, name, keys, ending)):
            return False
    if not keys:
        if not (yield from comes(source, ending)):
            raise NotACall
        source.call(name, call_id)
        source.arguments("{")
    source.arguments("}")
    source.end_call()
    return True


def _parameter(
    source: Source, parameter: TaggedParameter, offer: Offer, name: str, keys: set[str], ending: str
) -> Reading[bool]:
    """
    Args:
        keys: those before it; a key that comes again is passed over.
    """
    parts: list[str] = []
    found = yield from text_until(source, parameter.key_ends, parts.append)
    key = "".join(parts).strip().strip("\"'")[:_LONGEST_KEY]
    again = key in keys
    if not again:
        source.arguments((", " if keys else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        keys.add(key)
    if found is None:
        return False
    if parameter.value_opens:
        yield from spaces(source)
        if not (yield from literal(source, parameter.value_opens)):
            return False
    closes = parameter.closes(ending)
    if again:
        mark = yield from raw_until(source, closes, lambda text: None)
    else:
        value = _Value(source, offer.types(name, key), on_lines=parameter.on_lines)
        mark = yield from raw_until(source, closes, value.add)
        value.end(whole=bool(mark))
    if mark and mark != parameter.close:
        source.back(len(mark))
    return bool(mark)


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
