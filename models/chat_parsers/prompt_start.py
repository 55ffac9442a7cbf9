"""Decides where a rendered prompt ends: inside reasoning, behind it, or before both reasoning and answer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from troupellm.models.chat_template.message_forms import text_of
from troupellm.models.tokenizer.tokenizer import Tokenizer

Start = Literal["free", "thinking", "answer"]
_TOKENS: Final = 256
"""At the end of a prompt, in which a template opens reasoning."""
_MARKED_TOKENS: Final = 4096
"""The same number where texts of messages have marks, too."""
_SEEN: Final = 64
"""Characters at the end of a text, by which it is found where its beginning was cut off."""

_REASONING: Final = ("reasoning_content", "reasoning", "thinking")


def start_of(ending: str, opens: tuple[str, ...], closes: tuple[str, ...]) -> Start:
    """The last opening mark behind the last closing one begins reasoning.

    Args:
        ending: the end of the prompt, without the texts of messages.
        opens, closes: marks of reasoning.
    """
    opened = max(ending.rfind(mark) for mark in opens)
    closed = max(ending.rfind(mark) for mark in closes)
    if opened > closed:
        return "thinking"
    return "answer" if ending.rstrip().endswith(closes) else "free"


def rendered_ending(
    tokenizer: Tokenizer, token_ids: Sequence[int], messages: Sequence[Mapping[str, Any]], marks: Sequence[str]
) -> str:
    """The end of a prompt behind its last special token that is no part of a mark, without those texts of its messages
    that have a mark: they say nothing of the answer."""
    said = [text for message in messages for text in _texts(message) if any(mark in text for mark in marks)]
    ids = list(token_ids[-(_MARKED_TOKENS if said else _TOKENS) :])
    ending = tokenizer.decode(ids[_behind_messages(tokenizer, ids, marks) :], skip_special_tokens=False)
    for text in map(str.strip, said):
        if text in ending:
            ending = ending.replace(text, "", 1)
        elif (place := ending.rfind(text[-_SEEN:])) >= 0:
            ending = ending[place + _SEEN :]
    return ending


def _behind_messages(tokenizer: Tokenizer, ids: Sequence[int], marks: Sequence[str]) -> int:
    """The index of the first token behind the last special one that is no part of a mark."""
    for place in range(len(ids) - 1, -1, -1):
        if ids[place] in tokenizer.special_token_ids:
            text = tokenizer.token_bytes(ids[place]).decode("utf-8", "replace")
            if not any(text in mark for mark in marks):
                return place + 1
    return 0


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Texts that a template may show of a message, those in the arguments of its calls also as JSON has them."""
    yield text_of(message.get("content"))
    for field in _REASONING:
        yield text_of(message.get(field))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list | tuple) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            yield arguments
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                continue
        for text in _strings(arguments):
            yield from {text: None, json.dumps(text, ensure_ascii=False)[1:-1]: None, json.dumps(text)[1:-1]: None}


def _strings(value: Any) -> Iterator[str]:
    """All texts of a value of JSON."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, Mapping):
            left += [*found, *found.values()]
        elif isinstance(found, list | tuple):
            left += found
