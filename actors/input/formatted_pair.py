"""Two texts as the prompt of a reranker that is a decoder."""

from typing import Literal

from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import InvalidRequest


def formatted_pair(
    tokenizer: Tokenizer,
    form: tuple[str, str, str],
    texts: tuple[str, str],
    most: int | None,
    side: Literal["left", "right"],
) -> tuple[list[int], bool]:
    """Tokens of the two texts within their form, and whether the second text was cut.

    A first text that begins with the form already is taken as the caller has made it, and so is the second.

    Args:
        form: the texts before, between and behind.
        most: tokens to keep, of which the second text loses as many as are too many; None keeps all.
        side: the end of the second text that is cut.

    Raises:
        InvalidRequest: not even the rest fits.
    """
    first, second = texts
    before, between, behind = form
    if first.startswith(before.partition("\n")[0]):
        before = between = behind = ""
    if most is None:
        return tokenizer.encode(f"{before}{first}{between}{second}{behind}", add_special_tokens=False), False
    head, body, tail = (
        tokenizer.encode(text, add_special_tokens=False) for text in (f"{before}{first}{between}", second, behind)
    )
    room = most - len(head) - len(tail)
    if room < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at least {len(head) + len(tail) + 1}, for what is around the second text",
            param="truncate_prompt_tokens",
        )
    kept = body if len(body) <= room else body[:room] if side == "right" else body[-room:]
    return [*head, *kept, *tail], len(kept) < len(body)
