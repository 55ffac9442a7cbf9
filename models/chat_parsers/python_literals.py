"""Literals in Python's syntax, read as data and never run."""

import json
import re
from typing import Any, Final

_MOST_NESTED: Final = 32
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


def to_json(text: str) -> str:
    """A literal of Python as JSON; another text as a JSON string."""
    try:
        return json.dumps(python_value(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, OverflowError):
        return json.dumps(text, ensure_ascii=False)


def python_value(text: str) -> Any:
    """The value of a literal.

    Raises:
        ValueError, TypeError, OverflowError: the text is something else.
    """
    reader = _Literal(text)
    value = reader.value()
    reader.end()
    return value


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
