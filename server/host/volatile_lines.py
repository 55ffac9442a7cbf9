"""Lines of the system prompt that change with each request, such as the date: they are moved behind the user's newest
text, so that the prompts of a session begin alike and the prefix cache holds their beginning."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from troupellm.protocol.errors import ConfigError

MAX_PATTERNS = 64
MAX_FILE_BYTES = 65_536
_PARAM = "volatile_lines"
Messages = Sequence[Mapping[str, Any]]


class VolatileLines:
    """Regular expressions; a line of the system prompt that one of them matches as a whole is volatile."""

    def __init__(self, patterns: Sequence[re.Pattern[str]]) -> None:
        self._patterns = tuple(patterns)

    @classmethod
    def read(cls, path: str | None) -> "VolatileLines | None":
        """A file of regular expressions, one a line; empty lines and those that begin with # say nothing. None without
        a file.

        Raises:
            ConfigError: the file cannot be read, or has a line that is no regular expression.
        """
        if path is None:
            return None
        try:
            with Path(path).open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
            lines = data.decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise ConfigError(f"{_PARAM}: cannot be read: {reason}", param=_PARAM) from None
        wanted = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
        if len(data) > MAX_FILE_BYTES or len(wanted) > MAX_PATTERNS:
            message = f"{_PARAM}: at most {MAX_PATTERNS} expressions in {MAX_FILE_BYTES} bytes, got {len(wanted)}"
            raise ConfigError(message, param=_PARAM)
        return cls([_compiled(number, line) for number, line in wanted])

    def moved(self, messages: Messages) -> list[Mapping[str, Any]]:
        """The messages with the volatile lines of the system messages at the start behind the user's last text.

        They stay where they are in a conversation without a message of the user.
        """
        if not self._patterns:
            return list(messages)
        user = max((place for place, one in enumerate(messages) if one["role"] == "user"), default=None)
        if user is None:
            return list(messages)
        made = [*messages]
        found: list[str] = []
        for place, message in enumerate(messages):
            if message["role"] != "system":
                break
            made[place] = self._without(message, found)
        if found:
            made[user] = _with_text(made[user], "\n".join(found))
        return made

    def _without(self, message: Mapping[str, Any], found: list[str]) -> Mapping[str, Any]:
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": self._kept(content, found)}
        parts = [{**part, "text": self._kept(part["text"], found)} if "text" in part else part for part in content]
        return {**message, "content": parts}

    def _kept(self, text: str, found: list[str]) -> str:
        kept: list[str] = []
        for line in text.split("\n"):
            (found if any(one.fullmatch(line) for one in self._patterns) else kept).append(line)
        return "\n".join(kept)


def _compiled(number: int, line: str) -> re.Pattern[str]:
    try:
        return re.compile(line)
    except (re.error, OverflowError, RecursionError) as error:
        message = f"{_PARAM}: line {number} is no regular expression: {error}"
        raise ConfigError(message, param=_PARAM) from None


def _with_text(message: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{content}\n\n{text}" if content else text}
    return {**message, "content": [*content, {"type": "text", "text": text}]}
