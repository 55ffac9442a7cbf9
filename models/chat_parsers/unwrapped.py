"""Arguments that a model has put into an object of their own, as in `{"arguments": {"city": "Rome"}}`."""

import json
import re
from collections.abc import Collection
from typing import Any, Final

from troupellm.models.chat_parsers.json_dump import json_dump, without_surrogates

WRAPPERS: Final = ("arguments", "input", "properties")
_LONGEST: Final = 64 * 1024
"""Characters that are held; longer arguments stay as they are."""
_KEY: Final = re.compile(r'\s*\{\s*"(arguments|input|properties)"\s*:')
_BEGUN: Final = re.compile(r'\s*(?:\{\s*(?:"(?:[a-z]{0,10}(?:"\s*)?)?)?)?')
_SPACES: Final = 256


class Unwrapping:
    """Follows the arguments of one call. Nothing is held once the first key is another one."""

    __slots__ = ("_keys", "_length", "_parts", "_wrapped", "done")

    def __init__(self, keys: Collection[str]) -> None:
        """
        Args:
            keys: the parameters that the function has.
        """
        self._keys = keys
        self._parts: list[str] = []
        self._length = 0
        self._wrapped = False
        self.done = False
        """No text is held back any more."""

    def add(self, text: str) -> str:
        """Take more of the arguments; returns the text that can be shown."""
        self._parts.append(text)
        self._length += len(text)
        if self._wrapped:
            return "" if self._length <= _LONGEST else self._given_up()
        begun = "".join(self._parts)
        found = _KEY.match(begun)
        if found is not None and found[1] not in self._keys:
            self._wrapped = True
            return ""
        if found is None and self._length <= _SPACES and _BEGUN.fullmatch(begun):
            return ""
        return self._given_up()

    def rest(self, *, whole: bool) -> str:
        """The held part at the end of the arguments.

        Args:
            whole: they have come completely.
        """
        text = self._given_up()
        return _unwrapped(text, self._keys) if whole and self._wrapped else text

    def _given_up(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        self.done = True
        return text


def _unwrapped(text: str, keys: Collection[str]) -> str:
    """The inner object, if the outer one has nothing else and all keys of the inner one are parameters."""
    try:
        outer = json.loads(text)
        inner = next(iter(outer.values()))
        value = json.loads(inner) if isinstance(inner, str) else inner
        if len(outer) != 1 or not isinstance(value, dict) or not value.keys() <= set(keys):
            return text
        return without_surrogates(inner) if isinstance(inner, str) else _written(text, value)
    except (ValueError, RecursionError):
        return text


def _written(text: str, value: dict[str, Any]) -> str:
    """The inner object as the model wrote it; where the wrapper's key stands twice, the last one's value.

    Raises:
        ValueError: the value has a number that JSON cannot hold.
    """
    written = text[text.index(":") + 1 : text.rindex("}")].strip()
    try:
        json.loads(written)
    except ValueError:
        return json_dump(value)
    return written
