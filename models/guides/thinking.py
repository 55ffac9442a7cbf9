"""A guide that sleeps until a mark was generated: thinking comes before, the guided output behind it."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from troupellm.models.guides.backends import BITS, mask_words
from troupellm.models.tokenizer import Tokenizer

Mask = NDArray[np.int32]
"""[words]."""


class Mark:
    """What must be known of a mark and a vocabulary; shared by rows.

    Before the mark anything goes but the end, and but tokens that would hold the mark and more: what comes behind it
    belongs to the guide. Where the mark is a name between two tokens of their own, as a channel's header is, nothing
    but the second one may follow the name: gpt-oss writes more into the header, and the guide would never wake.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, vocab_width: int, *, early_end: str = "") -> None:
        """early_end: the one end token that may come before the mark, too."""
        self.text = text.encode()
        self._tokens = tokenizer
        open_mask = np.full(mask_words(tokenizer, vocab_width), -1, dtype=np.int32)
        early = tokenizer.added_tokens.get(early_end)
        _forbid(open_mask, [token_id for token_id in sorted(tokenizer.eos_token_ids) if token_id != early])
        last = self.text[-1:]
        pieces = ((token_id, tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.size))
        beyond = [(token_id, piece) for token_id, piece in pieces if last in piece[:-1]]
        self._masks = [self._masked(open_mask, known, beyond) for known in range(len(self.text))]
        """By how many of the mark's bytes have been generated."""
        named, ending = _header(text, tokenizer.added_tokens)
        if ending is not None and ending // BITS < open_mask.size:
            self._masks[named] = np.zeros_like(open_mask)
            self._masks[named].view(np.uint32)[ending // BITS] = np.uint32(1 << ending % BITS)

    def mask(self, known: int) -> Mask:
        """What may come when the text so far ends in the mark's first `known` bytes, int32 [words]."""
        return self._masks[known]

    def bytes_of(self, token_id: int) -> bytes:
        return self._tokens.token_bytes(token_id)

    def progress(self, tail: bytes) -> int:
        """Length of the longest beginning of the mark that the text ends in; all of it when it is complete."""
        for length in range(min(len(self.text), len(tail)), 0, -1):
            if tail.endswith(self.text[:length]):
                return length
        return 0

    def _masked(self, open_mask: Mask, known: int, beyond: Sequence[tuple[int, bytes]]) -> Mask:
        """beyond: the tokens that may hold the mark's end and more."""
        before, mark = self.text[:known], self.text
        too_long = [
            token_id for token_id, piece in beyond if 0 <= (before + piece).find(mark) < known + len(piece) - len(mark)
        ]
        if not too_long:
            return open_mask
        mask = open_mask.copy()
        _forbid(mask, too_long)
        return mask


class Sleep:
    """One row's way to its mark."""

    __slots__ = ("_mark", "_tails", "awake")

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._tails = [b""]
        """The text's end after each token so far, no longer than the mark."""
        self.awake = False

    def accept(self, token_ids: Sequence[int]) -> int:
        """Take in tokens up to the one that completes the mark; how many were taken."""
        for index, token_id in enumerate(token_ids):
            if self.awake:
                return index
            tail = self._tails[-1] + self._mark.bytes_of(token_id)
            self.awake = self._mark.text in tail
            self._tails.append(tail[-len(self._mark.text) :])
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        if num_tokens:
            del self._tails[-num_tokens:]
            self.awake = False

    @property
    def mask(self) -> Mask:
        return self._mark.mask(min(self._mark.progress(self._tails[-1]), len(self._mark.text) - 1))


def _header(text: str, added: Mapping[str, int]) -> tuple[int, int | None]:
    """How many bytes of a mark come before the token that it ends with, and that token, if it is a header."""
    first = max(filter(text.startswith, added), key=len, default="")
    last = max(filter(text.endswith, added), key=len, default="")
    if not first or not last or len(first) + len(last) >= len(text):
        return 0, None
    return len(text.removesuffix(last).encode()), added[last]


def allows(mask: Mask, token_id: int) -> bool:
    """Whether a mask lets a token pass."""
    word, bit = divmod(token_id, BITS)
    return word < mask.size and bool(mask.view(np.uint32)[word] >> bit & 1)


def _forbid(mask: Mask, token_ids: Sequence[int]) -> None:
    bits = mask.view(np.uint32)
    for token_id in token_ids:
        word = token_id // BITS
        if word < bits.size:
            bits[word] &= np.uint32(~(1 << (token_id % BITS)) & 0xFFFFFFFF)
