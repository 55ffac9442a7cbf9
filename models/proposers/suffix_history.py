"""Outputs of finished requests, kept for later ones of the same tenant; bounded, the oldest is dropped first."""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from troupellm.models.proposers.suffix_index import HASH_BITS, LAST_POSITION, NO_MATCH, Match, MatchIndex

MOST_PAST_TOKENS: Final = 1 << 20
"""Limit for all tenants together. A token takes 4 bytes, 4 more for its owner and 12 per length of n-gram."""
END_OF_TEXT: Final = -1
_SPREAD: Final = 0x5851F42D4C957F2D % (1 << HASH_BITS) | 1


class _Kept(NamedTuple):
    begin: int
    owner: int


class PastOutputs:
    """Texts with their owners. A tenant's texts are found, and followed, for that tenant alone.

    Tenants share the memory, not what is in it: each position knows its owner by a number that is never given twice,
    and the numbers are compared, not their hashes.
    """

    def __init__(self, sizes: tuple[int, ...], *, most_texts: int, most_tokens: int = MOST_PAST_TOKENS) -> None:
        """
        Args:
            sizes: as `MatchIndex`.
            most_tokens: a power of two.
        """
        self._sizes, self._most_texts, self._most_tokens = sizes, most_texts, most_tokens
        self._next_owner = 1
        self.num_evicted = 0
        """Texts that gave way to later ones."""
        self._clear()

    def __len__(self) -> int:
        """Texts kept."""
        return len(self._kept)

    @property
    def num_tokens(self) -> int:
        """Tokens of the kept texts, including a separator behind each."""
        return self._index.end - self._kept[0].begin if self._kept else 0

    @property
    def capacity(self) -> int:
        """Tokens that are kept at most; 0: no text is kept at all."""
        return self._most_tokens if self._most_texts else 0

    @property
    def nbytes(self) -> int:
        """Reserved, however little is kept."""
        return self._index.nbytes + self._ring.nbytes

    @property
    def num_tenants(self) -> int:
        return len(self._owners)

    def add(self, tenant: str, text: NDArray[np.int32]) -> None:
        """Keep a text, or its end if it is longer than all that fits."""
        if not self._most_texts or not text.size:
            return
        text = text[-(self._most_tokens // 2) :]
        if self._index.end >= LAST_POSITION:
            self.num_evicted += len(self._kept)
            self._clear()
        owner = self._owners.get(tenant)
        if owner is None:
            owner, self._next_owner = self._next_owner, self._next_owner + 1
            self._owners[tenant], self._tenants[owner] = owner, tenant
        self._texts_of[owner] = self._texts_of.get(owner, 0) + 1
        index = self._index
        index.restart(_salt(owner))
        self._kept.append(_Kept(index.end, owner))
        self._ring[np.arange(index.end, index.end + text.size + 1) & index.mask] = owner
        index.extend(np.append(text, np.int32(END_OF_TEXT)))
        while len(self._kept) > self._most_texts or self._kept[0].begin < index.floor:
            self._evict()
        index.forget_before(self._kept[0].begin)

    def owner(self, tenant: str) -> int | None:
        """Number of the tenant; None: it has no outputs here."""
        return self._owners.get(tenant)

    def find(self, owner: int, level: int, value: int, context: list[int], *, tries: int, most: int) -> Match:
        """As `MatchIndex.find`, among an owner's texts."""
        if not self._kept:
            return NO_MATCH
        return self._index.find(
            level, value, context, salt=_salt(owner), tries=tries, most=most, owners=self._owner_of, owner=owner
        )

    def advance(self, match: Match, said: Sequence[int], most: int) -> Match:
        """As `MatchIndex.advance`. No place goes beyond its text, whose owner must be the one it was found for."""
        return self._index.advance(match, said, most)

    def follow(self, position: int, count: int) -> list[int]:
        """Up to `count` tokens behind a position, no further than its text."""
        begin = (position + 1) & self._index.mask
        found = self._index.tokens[begin : begin + count].tolist()
        if len(found) < count:
            found += self._index.tokens[: count - len(found)].tolist()
        return found[: found.index(END_OF_TEXT)] if END_OF_TEXT in found else found

    def _evict(self) -> None:
        owner = self._kept.popleft().owner
        self.num_evicted += 1
        self._texts_of[owner] -= 1
        if not self._texts_of[owner]:
            del self._texts_of[owner]
            del self._owners[self._tenants.pop(owner)]

    def _clear(self) -> None:
        self._index = MatchIndex(self._sizes, self._most_tokens)
        self._ring: NDArray[np.int32] = np.zeros(self._most_tokens, np.int32)
        self._owner_of = self._ring.data
        self._kept: deque[_Kept] = deque()
        self._texts_of: dict[int, int] = {}
        self._owners: dict[str, int] = {}
        self._tenants: dict[int, str] = {}


def _salt(owner: int) -> int:
    return owner * _SPREAD & ((1 << HASH_BITS) - 1)
