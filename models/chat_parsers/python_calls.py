"""{python}: a list of calls in Python's syntax, `[f(a=1, b="x"), g()]`; {lines}: the same without brackets, one a line.

They are read as data and never run.
"""

import json
import re
from typing import Final

from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.python_literals import to_json
from troupellm.models.chat_parsers.text_stream import NotACall, Reading, Source, literal, peek, spaces, word

_STOP: Final = re.compile(r"""['"\[\](){},]""")
_PLAIN: Final = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
_RUN: Final = re.compile(r"""(?:[^'"\[\](){},]+|'[^'\\]*'|"[^"\\]*")+""")
"""Complete strings without escapes, and the separators between them."""
_KEY: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=(?!=)\s*(.*)", re.DOTALL)
_PARTNER: Final = {")": "(", "]": "[", "}": "{"}
_MOST_NESTED: Final = 32
_MOST_ARGUMENTS: Final = 256
_LONGEST_VALUE: Final = 64 * 1024


def python_calls(source: Source, offered_tools: OfferedTools, *, listed: bool = True) -> Reading[bool]:
    """Read calls of functions on offer; False when the arguments of one have no end.

    Args:
        listed: they stand in brackets, with commas between them; otherwise each is on a line of its own.

    Raises:
        NotACall: no call follows.
    """
    if listed and not (yield from literal(source, "[")):
        raise NotACall
    while True:
        yield from spaces(source)
        name = yield from word(source)
        if not offered_tools.has(name) or not (yield from literal(source, "(")):
            raise NotACall
        source.named = (name, "")
        if not (yield from _arguments(source, offered_tools, name)):
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
        if not listed:
            if following.isalpha() or following == "_":
                continue
        elif following == "]":
            source.take(1)
        elif following:
            raise NotACall
        source.commit()
        return True


def _arguments(source: Source, offered_tools: OfferedTools, name: str) -> Reading[bool]:
    """Read from behind the opening bracket to the closing one; each argument is shown when it is complete."""
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
            key, value = (match[1], match[2]) if match else (offered_tools.key(name, position), text)
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
    """Read from behind an opening quote to the closing one, at most `most` characters."""
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
