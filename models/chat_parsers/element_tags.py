"""{elements}: arguments in tags that have their names, nested, each behind a mark. Shown when they are whole.

A list's entries are tags called "item".
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.text_stream import NotACall, Reading, Source, comes, literal, spaces
from troupellm.models.chat_parsers.until_marker import Marks, raw_until
from troupellm.models.chat_parsers.values import resolved, schema_types, value_text

_TAG_END: Final = Marks([">"])
_NAME: Final = re.compile(r"[^<>/\s][^<>]{0,255}")
_MOST_NESTED: Final = 32
_ITEM: Final = "item"


class ElementsReader:
    """Reads the arguments of one call."""

    def __init__(self, source: Source, offered_tools: OfferedTools, prefix: str) -> None:
        self._source = source
        self._offered_tools = offered_tools
        self._opens = f"{prefix}<"
        self._marks = Marks([self._opens])

    def read(self, name: str, ending: str) -> Reading[bool]:
        """Up to the mark that follows the last argument, which is not taken; False where they are broken.

        Raises:
            NotACall: neither a tag nor the ending comes.
        """
        source, schema = self._source, self._offered_tools.schema(name)
        begun, keys = False, set[str]()
        while True:
            yield from spaces(source)
            ended = yield from comes(source, ending)
            if not ended and not (yield from literal(source, self._opens)):
                if not begun:
                    raise NotACall
                return False
            if not begun:
                begun = True
                source.call(name)
                source.arguments("{")
            if ended:
                source.arguments("}")
                source.end_call()
                return True
            key = yield from self._tag()
            if key is None or key.startswith("/"):
                return False
            text = yield from self._element(key, _inner(schema, schema, key), schema, 0)
            if text is None:
                return False
            if key not in keys:
                source.arguments((", " if keys else "") + json.dumps(key, ensure_ascii=False) + ": " + text)
            keys.add(key)

    def _tag(self) -> Reading[str | None]:
        """The name in a tag whose beginning was read."""
        parts: list[str] = []
        found = yield from raw_until(self._source, _TAG_END, parts.append)
        name = "".join(parts)
        return name if found and _NAME.fullmatch(name.removeprefix("/")) else None

    def _element(self, key: str, schema: Any, root: Mapping[str, Any], depth: int) -> Reading[str | None]:
        """Read from behind an opening tag to behind its closing one, as JSON; None if it is broken."""
        text: list[str] = []
        members: list[tuple[str, str]] = []
        while depth <= _MOST_NESTED:
            if not (yield from raw_until(self._source, self._marks, text.append)):
                return None
            tag = yield from self._tag()
            if tag is None:
                return None
            if tag.startswith("/"):
                return _joined(text, members, schema, root) if tag[1:] == key else None
            inner = yield from self._element(tag, _inner(schema, root, tag), root, depth + 1)
            if inner is None:
                return None
            members.append((tag, inner))
        return None


def _joined(text: list[str], members: list[tuple[str, str]], schema: Any, root: Mapping[str, Any]) -> str:
    types = schema_types(schema, root)
    if not members:
        return value_text("".join(text), types) if any(text) or types != {"array"} else "[]"
    if all(key == _ITEM for key, _ in members) and "object" not in types:
        return "[" + ", ".join([value for _, value in members]) + "]"
    return "{" + ", ".join([f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members]) + "}"


def _inner(schema: Any, root: Mapping[str, Any], key: str) -> Any:
    """The schema of a member, or of a list's entries; None where none is said."""
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        schema = resolved(schema["$ref"], root)
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    items = schema.get("items")
    return items if key == _ITEM else None
