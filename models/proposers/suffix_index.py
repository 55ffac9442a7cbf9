"""Finds earlier places of a text's last tokens: n-grams of a few lengths, hashed into chains of positions.

The structure is that of the match finders of LZ77 compressors: for each n a table of heads (bucket -> most recent
position whose n-gram falls into it). Each position has a link to the one before it in the same bucket. A token costs a
few stores, a look-up a walk of bounded length, and memory is fixed: the tokens lie in a ring whose oldest ones are
overwritten. A bucket may hold other n-grams, so a walk compares tokens.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

HASH_BITS: Final = 60
"""Bits of an n-gram's hash: each token is shifted by HASH_BITS // n bits more than the one after it."""
_WORD_MASK: Final = (1 << 64) - 1
_MIXER: Final = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: Fibonacci hashing takes the upper bits of a product with it."""
BULK_TOKENS: Final = 48
"""From this number of tokens on, vector operations are cheaper than a loop."""
LAST_POSITION: Final = 1 << 30
"""Positions are counted up to here, then all is forgotten: they fit in 32 bits."""


class Match(NamedTuple):
    """Earlier occurrences of the end of a text."""

    length: int
    """Tokens that agree."""
    positions: list[int]
    """Positions of their last tokens, most recent first."""


NO_MATCH: Final = Match(0, [])


class MatchIndex:
    """Texts in a ring of tokens, with the chains of their n-grams.

    Positions count from the first token ever appended. Those before `floor` are forgotten.

    Attributes:
        tokens: int32 [capacity], the token of position p at p & mask.
        hashes: of the last n tokens of the text that is being written, for each n.
        begin: first position of that text.
        end: position behind its last token.
    """

    def __init__(self, sizes: Sequence[int], capacity: int) -> None:
        """
        Args:
            sizes: lengths of n-grams, rising, up to HASH_BITS.
            capacity: tokens held, a power of two.
        """
        self.sizes: Final = tuple(sizes)
        self.mask: Final = capacity - 1
        bits = capacity.bit_length()  # twice as many buckets as tokens
        self._drop = 64 - bits
        self._heads: list[NDArray[np.int32]] = [np.zeros(1 << bits, np.int32) for _ in sizes]
        self._links: list[NDArray[np.int32]] = [np.zeros(capacity, np.int32) for _ in sizes]
        self._ring: NDArray[np.int32] = np.zeros(capacity, np.int32)
        # Single numbers go through views: numpy takes three times as long for one. 0 is none, p + 1 is position p.
        self.tokens = self._ring.data
        self._levels = [
            (size, HASH_BITS // size, _mask(size), heads.data, links.data)
            for size, heads, links in zip(sizes, self._heads, self._links, strict=True)
        ]
        self.hashes = [0] * len(self.sizes)
        self.begin = self.end = self.floor = 0
        self._salt = 0

    @property
    def nbytes(self) -> int:
        """Reserved, however little is in it."""
        return self._ring.nbytes + sum(array.nbytes for array in (*self._heads, *self._links))

    def restart(self, salt: int = 0) -> None:
        """Begin another text; no n-gram reaches across. Earlier texts stay until `forget_before`.

        Args:
            salt: below 2^60. Texts with another salt are not found, though buckets may collide.
        """
        if self.end >= LAST_POSITION:
            for heads in self._heads:
                heads[:] = 0
            self.end = self.floor = 0
        self.begin = self.end
        self._salt = salt
        self.hashes = [0] * len(self.sizes)

    def forget_before(self, position: int) -> None:
        """Forget all places before a position."""
        self.floor = max(self.floor, position)

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Append tokens [n] to the text. An n-gram can be found as soon as a token follows it."""
        if tokens.size < BULK_TOKENS:
            for token in tokens.tolist():
                self._append(token)
        else:
            for first in range(0, tokens.size, self.mask):  # a piece overwrites nothing of itself
                self._append_all(tokens[first : first + self.mask])
        self.forget_before(self.end - self.mask - 1)

    def _append(self, token: int) -> None:
        end, hashes, salt, drop = self.end, self.hashes, self._salt, self._drop
        known, place = end - self.begin, (end - 1) & self.mask
        for level, (size, shift, kept, heads, links) in enumerate(self._levels):
            value = hashes[level]
            if known >= size:
                bucket = ((value ^ salt) * _MIXER & _WORD_MASK) >> drop
                links[place] = heads[bucket]
                heads[bucket] = end
            hashes[level] = (value << shift ^ token) & kept
        self.tokens[end & self.mask] = token
        self.end = end + 1

    def _append_all(self, tokens: NDArray[np.int32]) -> None:
        """As `_append`, for all at once: the chains become the same."""
        end = self.end + tokens.size
        reach = min(self.end - self.begin, self.sizes[-1])
        before = self._ring[np.arange(self.end - reach, self.end) & self.mask]
        self._ring[np.arange(self.end, end) & self.mask] = tokens
        text = np.concatenate((before, tokens)).astype(np.uint64)
        first = self.end - reach
        for level, (size, shift, kept, _, _) in enumerate(self._levels):
            values = _hashes_of(text, size, shift) & np.uint64(kept)
            self.hashes[level] = int(values[-1])
            # Those that end right before the new tokens have found their follower only now; the last one has none yet.
            lowest = max(self.begin + size - 1, self.end - 1)
            positions = np.arange(lowest, end - 1)
            if positions.size:
                self._link(level, positions, values[positions - first])
        self.end = end

    def _link(self, level: int, positions: NDArray[np.int64], values: NDArray[np.uint64]) -> None:
        """Put rising positions at the front of their chains, one after the other."""
        heads, links = self._heads[level], self._links[level]
        buckets = ((values ^ np.uint64(self._salt)) * np.uint64(_MIXER)) >> np.uint64(self._drop)
        order = np.argsort(buckets, kind="stable")
        buckets, positions = buckets[order], positions[order]
        again = np.zeros(positions.size, bool)
        again[1:] = buckets[1:] == buckets[:-1]
        earlier = heads[buckets]
        earlier[1:] = np.where(again[1:], positions[:-1] + 1, earlier[1:])
        links[positions & self.mask] = earlier
        last = np.append(~again[1:], True)
        heads[buckets[last]] = positions[last] + 1

    def find(
        self,
        level: int,
        value: int,
        context: list[int],
        *,
        salt: int = 0,
        tries: int,
        most: int,
        owners: memoryview | None = None,
        owner: int = 0,
    ) -> Match:
        """The longest agreements with a context among the most recent places where its last n tokens may have stood.

        Args:
            level: n is sizes[level]; the context has as many tokens at least.
            value: hash of the context's last n tokens.
            context: no more of it is compared.
            tries: places to look at.
            most: positions wanted. The search ends when this many whole matches are found.
            owners: int32 [capacity] by place as `tokens`, and whose positions are wanted.
        """
        tokens, mask, floor, links = self.tokens, self.mask, self.floor, self._levels[level][4]
        depth, best, found = len(context), self.sizes[level], list[int]()
        position = self._levels[level][3][((value ^ salt) * _MIXER & _WORD_MASK) >> self._drop] - 1
        while position >= floor and tries:
            tries -= 1
            length, furthest = 0, min(depth, position - floor + 1)
            while length < furthest and tokens[(position - length) & mask] == context[-1 - length]:
                length += 1
            if length >= best and (owners is None or owners[position & mask] == owner):
                if length > best:
                    best, found = length, []
                if len(found) < most:
                    found.append(position)
                if best == depth and len(found) == most:
                    break
            position = links[position & mask] - 1
        return Match(best, found) if found else NO_MATCH

    def advance(self, match: Match, said: Sequence[int], most: int) -> Match:
        """The places of a match whose texts continue with the given tokens.

        Args:
            match: in these texts, each place with a token behind it.
            said: tokens that follow the match. If a text is matched with itself, it contains them already.
            most: longer matches count as equal.
        """
        tokens, mask, floor = self.tokens, self.mask, self.floor
        positions = [position for position in match.positions if position >= floor]
        for token in said if positions else ():
            positions = [position + 1 for position in positions if tokens[(position + 1) & mask] == token]
        return Match(min(match.length + len(said), most), positions) if positions else NO_MATCH


def _mask(size: int) -> int:
    """Mask of the bits that the last `size` tokens are hashed into: an older one is shifted out."""
    return (1 << HASH_BITS // size * size) - 1


def _hashes_of(text: NDArray[np.uint64], size: int, shift: int) -> NDArray[np.uint64]:
    """uint64 [text], of the `size` tokens that end at each place, or of fewer at the beginning."""
    values = np.zeros(text.size, np.uint64)
    for back in range(min(size, text.size)):
        values[back:] ^= text[: text.size - back] << np.uint64(back * shift)
    return values
