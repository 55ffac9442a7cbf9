"""A guide that waits for a mark: thinking comes before the mark, and the guided output after it."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from troupellm.models.structured_outputs.backends import BITS, mask_words
from troupellm.models.structured_outputs.open_calls import BEGINNING, OpenCalls
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.params.guide import EarlyEnd

Mask = NDArray[np.int32]
"""[words]."""


class Mark:
    """Tables of one mark and a vocabulary, shared by rows.

    Before the mark all tokens are allowed, except end tokens and tokens that would contain the mark and further text:
    that text belongs to the guide. The mark may be a name between two single tokens, as in a channel's header. Then
    only the second token may follow the name: gpt-oss writes more into the header, and the guide would never start.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, vocab_width: int, *, early_end: EarlyEnd | None = None) -> None:
        """early_end: marks that may end a call before this mark comes."""
        self.text = text.encode()
        self.calls = None if early_end is None else OpenCalls(early_end)
        """Recognises an open call."""
        self._tokens = tokenizer
        open_mask = np.full(mask_words(tokenizer, vocab_width), -1, dtype=np.int32)
        early = None if early_end is None else tokenizer.added_tokens.get(early_end.token)
        _forbid(open_mask, [token_id for token_id in sorted(tokenizer.eos_token_ids) if token_id != early])
        last = self.text[-1:]
        pieces = ((token_id, tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.size))
        beyond = [(token_id, piece) for token_id, piece in pieces if last in piece[:-1]]
        self._called = [self._masked(open_mask, known, beyond) for known in range(len(self.text))]
        """Within a call, by how many of the mark's bytes have been generated."""
        self._masks = self._called
        if early is not None and early in tokenizer.eos_token_ids:
            closed_mask = open_mask.copy()
            _forbid(closed_mask, [early])
            self._masks = [self._masked(closed_mask, known, beyond) for known in range(len(self.text))]
        named, ending = _header(text, tokenizer.added_tokens)
        if ending is not None and ending // BITS < open_mask.size:
            only = np.zeros_like(open_mask)
            only.view(np.uint32)[ending // BITS] = np.uint32(1 << ending % BITS)
            self._called[named] = self._masks[named] = only

    def mask(self, known: int, *, called: bool = False) -> Mask:
        """The allowed tokens if the text so far ends in the mark's first `known` bytes, int32 [words].

        Args:
            called: a call is open.
        """
        return self._called[known] if called else self._masks[known]

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

    __slots__ = ("_mark", "_places", "_tails", "awake")

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._tails = [b""]
        """The text's end after each token so far, no longer than the mark."""
        self._places = [BEGINNING]
        """The place in the text after each token, if calls may end it."""
        self.awake = False

    def accept(self, token_ids: Sequence[int]) -> int:
        """Take in tokens up to the one that completes the mark; how many were taken."""
        for index, token_id in enumerate(token_ids):
            if self.awake:
                return index
            piece = self._mark.bytes_of(token_id)
            tail = self._tails[-1] + piece
            self.awake = self._mark.text in tail
            self._tails.append(tail[-len(self._mark.text) :])
            if self._mark.calls is not None:
                self._places.append(self._mark.calls.after(self._places[-1], piece))
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        if num_tokens:
            del self._tails[-num_tokens:]
            if self._mark.calls is not None:
                del self._places[-num_tokens:]
            self.awake = False

    @property
    def mask(self) -> Mask:
        known = min(self._mark.progress(self._tails[-1]), len(self._mark.text) - 1)
        return self._mark.mask(known, called=self._places[-1].part == "call")


def _header(text: str, added: Mapping[str, int]) -> tuple[int, int | None]:
    """The number of bytes of a mark before its last token, and that token, if the mark is a header."""
    first = max(filter(text.startswith, added), key=len, default="")
    last = max(filter(text.endswith, added), key=len, default="")
    if not first or not last or len(first) + len(last) >= len(text):
        return 0, None
    return len(text.removesuffix(last).encode()), added[last]


def allows(mask: Mask, token_id: int) -> bool:
    """True if a mask allows a token."""
    word, bit = divmod(token_id, BITS)
    return word < mask.size and bool(mask.view(np.uint32)[word] >> bit & 1)


def _forbid(mask: Mask, token_ids: Sequence[int]) -> None:
    bits = mask.view(np.uint32)
    for token_id in token_ids:
        word = token_id // BITS
        if word < bits.size:
            bits[word] &= np.uint32(~(1 << (token_id % BITS)) & 0xFFFFFFFF)
