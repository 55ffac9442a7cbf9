"""From the cache marks of a chat to tokens of its prompt, once the chat template has rendered it."""

from collections.abc import Callable, Sequence

from troupellm.protocol.config.kv_hints import CacheMark, PrefixLease

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
    backward = text[::-1] if marks else ""
    searched = 0
    for mark in reversed(marks):
        # CPython's find takes linear time, and its rfind the product of both lengths.
        behind = backward.find(mark.text[::-1], searched) if mark.text else -1
        if behind < 0:
            leases.append(PrefixLease(num_tokens, mark.seconds))
            continue
        end = len(text) - behind
        searched = behind + len(mark.text)
        if behind <= _COUNTED_LETTERS:
            tokens = num_tokens - count(text[end:], add_special_tokens=False) if behind else num_tokens
        else:
            tokens = num_tokens * end // len(text)
        leases.append(PrefixLease(max(0, tokens), mark.seconds))
    return tuple(reversed(leases))
