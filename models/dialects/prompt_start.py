"""Whether a rendered prompt ends inside of thoughts, behind them, or before everything."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from troupellm.models.message_forms import text_of
from troupellm.models.tokenizer import Tokenizer

Start = Literal["free", "thinking", "answer"]
_TOKENS: Final = 256
"""At the end of a prompt, in which a template opens thoughts."""


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
    ids = token_ids if said else token_ids[-_TOKENS:]
    ending = tokenizer.decode(list(ids), skip_special_tokens=False)
    for text in said:
        ending = ending.replace(text.strip(), "", 1)
    return ending[-8 * _TOKENS :]
