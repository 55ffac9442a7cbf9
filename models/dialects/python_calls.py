"""{python}: a list of calls in Python's syntax, `[f(a=1, b="x"), g()]`. It is read as data and never run."""

import json
import re
from typing import Any, Final

from troupellm.models.dialects.offer import Offer
from troupellm.models.dialects.source import NotACall, Reading, Source, literal, peek, spaces, word

_STOP: Final = re.compile(r"""['"\[\](){},]""")
_PLAIN: Final = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
_RUN: Final = re.compile(r"""(?:[^'"\[\](){},]+|'[^'\\]*'|"[^"\\]*")+""")
"""Texts that are complete and hold no escapes, and what stands between them."""
_KEY: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=(?!=)\s*(.*)", re.DOTALL)
_PARTNER: Final = {")": "(", "]": "[", "}": "{"}
_MOST_NESTED: Final = 32
_MOST_ARGUMENTS: Final = 256
_LONGEST_VALUE: Final = 64 * 1024

_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<text>[rRbBuU]{0,2}(?:'''(?:\\.|[^\\])*?'''|\"""(?:\\.|[^\\])*?\"""|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"))
      | (?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<mark>[\[\](){}:,])
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(
    r"\\(\n|[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3})", re.DOTALL
)
_PLAIN_ESCAPES: Final = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v",
}  # fmt: skip
_CONSTANTS: Final = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def python_calls(source: Source, offer: Offer) -> Reading[bool]:
    """Read a list of calls, of functions on offer only; False when the arguments of one have no end.

    Raises:
        NotACall: what comes is none.
    """
    if not (yield from literal(source, "[")):
        raise NotACall
    while True:
        yield from spaces(source)
        name = yield from word(source)
        if not offer.has(name) or not (yield from literal(source, "(")):
            raise NotACall
        if not (yield from _arguments(source, offer, name)):
            return False
        source.attempt()
        yield from spaces(source)
        following = yield from peek(source)
        if following == ",":
            source.take(1)
            yield from spaces(source)
            following = yield from peek(source)
            if following not in ("]", ""):
                continue
        if following == "]":
            source.take(1)
        elif following:
            raise NotACall
        source.commit()
        return True


def _arguments(source: Source, offer: Offer, name: str) -> Reading[bool]:
    """From behind the opening bracket to the closing one; each argument is shown when it is complete."""
    position = 0
    while True:
        text, end = ("", "") if position == _MOST_ARGUMENTS else (yield from _argument(source))
        if position == 0:
            if end == "":
                raise NotACall
            source.call(name)
            source.arguments("{")
        if end == "":
            source.arguments("" if source.ended else text)
            return False
        if text.strip():
            match = _KEY.fullmatch(text)
            key, value = (match[1], match[2]) if match else (offer.key(name, position), text)
            source.arguments((", " if position else "") + json.dumps(key) + ": " + to_json(value.strip()))
        position += 1
        if end == ")":
            source.arguments("}")
            source.end_call()
            return True


def _argument(source: Source) -> Reading[tuple[str, str]]:
    """The text of an argument, and the comma or bracket behind it; that is empty where the text ends before it, or the
    brackets do not match."""
    parts: list[str] = []
    length = 0
    brackets: list[str] = []
    quote = ""
    while True:
        character = yield from peek(source)
        if not character or length > _LONGEST_VALUE:
            return "".join(parts), ""
        if quote:
            parts.append((yield from _rest_of_text(source, quote, _LONGEST_VALUE - length)))
            length += len(parts[-1])
            quote = ""
            continue
        # Never further than may be taken: what was looked at in vain would be looked at again behind the next mark.
        run = _RUN.match(source.text, source.pos, source.pos + _LONGEST_VALUE - length)
        if run is not None:
            parts.append(source.take(len(run[0])))
            length += len(run[0])
            if source.pos == len(source.text):
                continue
        match = _STOP.search(source.text, source.pos)
        end = len(source.text) if match is None else match.start()
        plain = source.take(min(end - source.pos, _LONGEST_VALUE + 1 - length))
        parts.append(plain)
        length += len(plain)
        if match is None or source.pos < match.start():
            continue
        mark = source.take(1)
        if not brackets and mark in ",)":
            return "".join(parts), mark
        parts.append(mark)
        length += 1
        if mark in "'\"":
            quote = mark
        elif mark in "([{":
            brackets.append(mark)
            if len(brackets) > _MOST_NESTED:
                return "".join(parts), ""
        elif mark != "," and (not brackets or brackets.pop() != _PARTNER[mark]):
            return "".join(parts), ""


def _rest_of_text(source: Source, quote: str, most: int) -> Reading[str]:
    """From behind an opening quote to the closing one, at most so many characters."""
    parts: list[str] = []
    escaped = False
    while most > 0 and (yield from peek(source)):
        match = None if escaped else _PLAIN[quote].match(source.text, source.pos)
        count = min(most, 1 if match is None else match.end() - source.pos)
        parts.append(source.take(count))
        most -= count
        if match is None:
            if not escaped and parts[-1] == quote:
                break
            escaped = not escaped and parts[-1] == "\\"
    return "".join(parts)


def to_json(text: str) -> str:
    """A literal of Python as JSON; whatever else it is, as a text."""
    try:
        reader = _Literal(text)
        value = reader.value()
        reader.end()
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, OverflowError):
        return json.dumps(text, ensure_ascii=False)


class _Literal:
    """A value of texts, numbers, constants, lists, tuples and dictionaries."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._depth = 0
        self._token: re.Match[str] | None = None
        self._advance()

    def end(self) -> None:
        if self._token is not None or self._text[self._position :].strip():
            raise ValueError

    def value(self) -> Any:
        token = self._token
        if token is None:
            raise ValueError
        kind, text = token.lastgroup, token[token.lastgroup or 0]
        self._advance()
        if kind == "text":
            return _unquoted(text)
        if kind == "number":
            plain = text.replace("_", "")
            return float(plain) if set(plain) & set(".eE") else int(plain)
        if kind == "name":
            if text not in _CONSTANTS:
                raise ValueError
            return _CONSTANTS[text]
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise ValueError
        try:
            if text == "{":
                return self._dictionary()
            if text in "[(":
                return self._list("]" if text == "[" else ")")
        finally:
            self._depth -= 1
        raise ValueError

    def _advance(self) -> None:
        match = _TOKEN.match(self._text, self._position)
        if match is not None:
            self._position = match.end()
        self._token = match

    def _take(self, mark: str) -> bool:
        if self._token is None or self._token["mark"] != mark:
            return False
        self._advance()
        return True

    def _list(self, closing: str) -> list[Any]:
        found: list[Any] = []
        while not self._take(closing):
            found.append(self.value())
            if not self._take(","):
                if not self._take(closing):
                    raise ValueError
                break
        return found

    def _dictionary(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._take("}"):
            key = self.value()
            if not isinstance(key, str) or not self._take(":"):
                raise ValueError
            found[key] = self.value()
            if not self._take(","):
                if not self._take("}"):
                    raise ValueError
                break
        return found


def _unquoted(text: str) -> str:
    body = text.lstrip("rRbBuU")
    prefix = text[: len(text) - len(body)].lower()
    width = 3 if body[:3] in ("'''", '"""') and len(body) >= 6 else 1
    body = body[width:-width]
    return body if "r" in prefix else _ESCAPE.sub(_unescaped, body)


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if code in _PLAIN_ESCAPES:
        return _PLAIN_ESCAPES[code]
    number = int(code[1:], 16) if code[0] in "xuU" else int(code, 8)
    return chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else "\ufffd"
