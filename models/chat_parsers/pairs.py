"""{pairs}: arguments as `{key:value, other:[1, 2]}`, where texts stand between two marks. Shown when they are whole."""

import json
import re
from typing import Any, Final

from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.text_stream import MOST_HELD, NotACall, Reading, Source, literal, peek, spaces
from troupellm.models.chat_parsers.until_marker import Marks, raw_until
from troupellm.models.chat_parsers.values import value_text

_PLAIN: Final = re.compile(r"[^,{}\[\]:<\"']+")
_MOST_NESTED: Final = 32
_LONGEST_KEY: Final = 256


class PairsReader:
    """Reads one object; `whole` is False where it ended in the middle."""

    def __init__(self, source: Source, offered_tools: OfferedTools, quote: str) -> None:
        self._source = source
        self._offered_tools = offered_tools
        self._quotes = [quote, '"', "'"]
        self._ends = {mark: Marks([mark]) for mark in self._quotes}

    def read(self, name: str) -> Reading[bool]:
        """The arguments of a function, each shown when it is complete.

        Raises:
            NotACall: no object comes.
        """
        source = self._source
        if not (yield from literal(source, "{")):
            raise NotACall
        source.call(name)
        source.arguments("{")
        count = 0
        while True:
            yield from self._separators()
            if (yield from literal(source, "}")):
                source.arguments("}")
                source.end_call()
                return True
            key = yield from self._key()
            if key is None:
                return False
            text = yield from self._value(self._offered_tools.types(name, key), 0)
            if text is None:
                return False
            source.arguments((", " if count else "") + json.dumps(key, ensure_ascii=False) + ": " + text)
            count += 1

    def _separators(self) -> Reading[None]:
        yield from spaces(self._source)
        while (yield from literal(self._source, ",")):
            yield from spaces(self._source)

    def _key(self) -> Reading[str | None]:
        """The key and the colon behind it; None where something else comes."""
        source = self._source
        quoted = yield from self._quoted()
        key = (yield from self._plain(_LONGEST_KEY)).strip() if quoted is None else quoted
        yield from spaces(source)
        return key if key and (yield from literal(source, ":")) else None

    def _quoted(self) -> Reading[str | None]:
        """A text between marks; None where none begins, or it has no end."""
        for mark in self._quotes:
            if not (yield from literal(self._source, mark)):
                continue
            parts: list[str] = []
            found = yield from raw_until(self._source, self._ends[mark], parts.append)
            return "".join(parts) if found else None
        return None

    def _plain(self, most: int) -> Reading[str]:
        parts: list[str] = []
        length = 0
        while length < most and (yield from peek(self._source)):
            match = _PLAIN.match(self._source.text, self._source.pos, self._source.pos + most - length)
            if match is None:
                break
            parts.append(self._source.take(len(match[0])))
            length += len(parts[-1])
        return "".join(parts)

    def _value(self, types: frozenset[str], depth: int) -> Reading[str | None]:
        """A value as JSON; None where it is broken."""
        source = self._source
        yield from spaces(source)
        first = yield from peek(source)
        if depth > _MOST_NESTED:
            return None
        if first and first in "{[":
            source.take(1)
            return (yield from self._nested(first, depth))
        quoted = yield from self._quoted()
        if quoted is not None:
            return json.dumps(quoted, ensure_ascii=False)
        text = (yield from self._plain(MOST_HELD)).strip()
        return value_text(text, types) if text else None

    def _nested(self, bracket: str, depth: int) -> Reading[str | None]:
        source, parts = self._source, list[str]()
        while True:
            yield from self._separators()
            if (yield from literal(source, "}" if bracket == "{" else "]")):
                return bracket + ", ".join(parts) + ("}" if bracket == "{" else "]")
            key: Any = ""
            if bracket == "{":
                key = yield from self._key()
                if key is None:
                    return None
                key = json.dumps(key, ensure_ascii=False) + ": "
            value = yield from self._value(frozenset(), depth + 1)
            if value is None:
                return None
            parts.append(key + value)
