"""Whether a rendered prompt ends inside of thoughts, behind them, or before everything."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from troupellm.models.message_repair import text_of
from troupellm.models.tokenizer import Tokenizer

Start = Literal["free", "thinking", "answer"]
_TOKENS: Final = 256
"""At the end of a prompt, in which a template opens thoughts."""
_MARKED_TOKENS: Final = 4096
"""The same where texts of messages have marks, too."""
_SEEN: Final = 64
"""Characters at the end of a text, by which it is found where its beginning was cut off."""


def start_of(ending: str, opens: tuple[str, ...], closes: tuple[str, ...]) -> Start:
    """The last opening mark behind the last closing one begins thoughts.

    Args:
        ending: the end of the prompt, without the texts of messages.
        opens, closes: marks of thoughts.
    """
    opened = max(ending.rfind(mark) for mark in opens)
    closed = max(ending.rfind(mark) for mark in closes)
    if opened > closed:
        return "thinking"
    return "answer" if ending.rstrip().endswith(closes) else "free"


def rendered_ending(
    tokenizer: Tokenizer, token_ids: Sequence[int], messages: Sequence[Mapping[str, Any]], marks: Sequence[str]
) -> str:
    """The end of a prompt, without those texts of its messages that have a mark: they say nothing of the answer."""
    said = [text for message in messages if any(mark in (text := text_of(message.get("content"))) for mark in marks)]
    ids = token_ids[-(_MARKED_TOKENS if said else _TOKENS) :]
    ending = tokenizer.decode(list(ids), skip_special_tokens=False)
    for text in map(str.strip, said):
        if text in ending:
            ending = ending.replace(text, "", 1)
        elif (place := ending.rfind(text[-_SEEN:])) >= 0:
            ending = ending[place + _SEEN :]
    return ending
