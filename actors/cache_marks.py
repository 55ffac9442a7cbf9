"""From the cache marks of a chat to tokens of its prompt, once the chat template has rendered it."""

from collections.abc import Callable, Sequence

from troupellm.protocol.kv_hints import CacheMark, PrefixLease

_COUNTED_LETTERS = 4096
"""Text behind a mark that is tokenized to find the mark's token. With more of it the place is an estimate."""


def leases_of(
    marks: Sequence[CacheMark], text: str, num_tokens: int, count: Callable[..., int]
) -> tuple[PrefixLease, ...]:
    """A mark whose text the template did not render leases the whole prompt: a lease too long costs an answer nothing.

    Args:
        marks: in the order of the prompt.
        text: the rendered prompt.
        num_tokens: of the whole prompt.
        count: tells how many tokens a text has.
    """
    leases: list[PrefixLease] = []
    before = len(text)
    for mark in reversed(marks):
        place = text.rfind(mark.text, 0, before) if mark.text else -1
        if place < 0:
            leases.append(PrefixLease(num_tokens, mark.seconds))
            continue
        before, end = place, place + len(mark.text)
        behind = len(text) - end
        if behind <= _COUNTED_LETTERS:
            tokens = num_tokens - count(text[end:], add_special_tokens=False) if behind else num_tokens
        else:
            tokens = num_tokens * end // len(text)
        leases.append(PrefixLease(max(0, tokens), mark.seconds))
    return tuple(reversed(leases))
