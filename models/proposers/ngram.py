"""Prompt lookup: proposes the tokens that followed an earlier occurrence of a row's last tokens.

No model, no memory of other rows. The longest n-gram from `prompt_lookup_max` down to `prompt_lookup_min` tokens that
stood before decides, and among its places the most recent one. See Saxena, "Prompt Lookup Decoding", 2023.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from troupellm.models.batch.host_device import to_device, to_host
from troupellm.models.batch.row_drafts import Drafts
from troupellm.models.layers.aux_hidden_states import NO_AUX_HIDDEN_STATES
from troupellm.models.proposers.base import Observation, ProposalBatch
from troupellm.models.proposers.registry import ProposerContext
from troupellm.models.proposers.suffix_index import MatchIndex
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.messages.worker import NewRow

USUAL_LOOKUP: Final = 5
"""vLLM's n where neither the least nor the most is given."""

MOST_REMEMBERED: Final = 1 << 16
"""Tokens of a row in which is searched, the last ones."""
TRIES: Final = 32
"""Places where the shortest n-gram stood that are looked at for a longer one."""
LONGEST_INDEXED: Final = 16
"""Longer n-grams are found by their last tokens."""


def make(config: SpeculativeConfig, context: ProposerContext) -> "NgramProposer":
    """If only the least or the most is given, both are that; if neither, both are five tokens: as in vLLM."""
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    return NgramProposer(
        lookup_min=low or high or USUAL_LOOKUP,
        lookup_max=high or low or USUAL_LOOKUP,
        max_model_len=context.max_model_len,
    )


class NgramProposer:
    """Drafts out of each row's own tokens."""

    aux_hidden_states = NO_AUX_HIDDEN_STATES

    def __init__(self, *, lookup_min: int, lookup_max: int, max_model_len: int) -> None:
        """
        Args:
            lookup_min, lookup_max: tokens that must have stood before, and how many are compared.
        """
        self.lookup: Final = (lookup_min, lookup_max)
        self._size = min(lookup_min, LONGEST_INDEXED)
        self._capacity = ring_capacity(max_model_len)
        self._rows: dict[int, MatchIndex] = {}
        """By slot. A slot's next row writes behind the last one's tokens, which it does not find."""

    def add_row(self, slot: int, new: NewRow) -> None:
        index = self._rows.get(slot)
        if index is None:
            index = self._rows[slot] = MatchIndex((self._size,), self._capacity)
        index.restart()
        index.forget_before(index.end)

    def drop_row(self, slot: int, token_ids: NDArray[np.int32]) -> None:
        """Does nothing: the slot's next row clears its index."""

    def reset(self) -> None:
        self._rows.clear()

    def observe(self, seen: Observation) -> None:
        """Never called: there are no aux hidden states."""

    def propose(self, batch: ProposalBatch) -> Drafts:
        indexes = [self._rows[slot] for slot in batch.slots.tolist()]
        catch_up(indexes, batch)
        drafts = np.zeros((len(indexes), int(batch.limits.max())), np.int32)
        counts = np.zeros(len(indexes), np.int64)
        for row, (index, limit) in enumerate(zip(indexes, batch.limits.tolist(), strict=True)):
            found = self._guess(index, limit)
            if found:
                drafts[row, :limit] = found
                counts[row] = limit
        return Drafts(drafts, counts)

    def _guess(self, index: MatchIndex, limit: int) -> list[int]:
        """`limit` tokens, or none."""
        if index.end - index.floor <= self._size:
            return []
        context = last_tokens(index, self.lookup[1])
        match = index.find(0, index.hashes[0], context, tries=TRIES, most=1)
        if match.length < self.lookup[0]:
            return []
        return follow(index, match.positions[0], limit)


def ring_capacity(max_model_len: int) -> int:
    """Size of the ring of a row's tokens, a power of two."""
    return int(min(MOST_REMEMBERED, 1 << (max_model_len - 1).bit_length()))


def last_tokens(index: MatchIndex, most: int) -> list[int]:
    """The last tokens of the text that is being written, up to a limit."""
    begin, mask, tokens = max(index.end - most, index.begin, index.floor), index.mask, index.tokens
    return [tokens[position & mask] for position in range(begin, index.end)]


def follow(index: MatchIndex, position: int, count: int) -> list[int]:
    """The `count` tokens behind a position of the text that is being written. Those that it does not have yet are the
    ones that are being proposed: a text that repeats its last p tokens goes on with that period."""
    tokens, mask, first = index.tokens, index.mask, position + 1
    period = index.end - first
    if period >= count:
        return [tokens[place & mask] for place in range(first, first + count)]
    return [tokens[(first + place % period) & mask] for place in range(count)]


def catch_up(indexes: list[MatchIndex], batch: ProposalBatch) -> None:
    """Add each row's new tokens to its index: nothing else is copied of a table on a device."""
    firsts = [index.end - index.begin for index in indexes]
    spans = of_host if batch.tokens.device.type == "cpu" else of_device
    for index, new in zip(indexes, spans(batch, firsts), strict=True):
        if new.size:
            index.extend(new)


def of_host(batch: ProposalBatch, firsts: list[int]) -> list[NDArray[np.int32]]:
    """The tokens of each row behind its first ones; views."""
    table = batch.tokens.numpy()
    return [
        table[slot, first:length]
        for slot, first, length in zip(batch.slots.tolist(), firsts, batch.lengths.tolist(), strict=True)
    ]


def of_device(batch: ProposalBatch, firsts: list[int]) -> list[NDArray[np.int32]]:
    """As `of_host`, of a table that the host cannot read: one copy, of these tokens."""
    width, tokens = batch.tokens.shape[1], batch.tokens
    places = [
        np.arange(slot * width + first, slot * width + length)
        for slot, first, length in zip(batch.slots.tolist(), firsts, batch.lengths.tolist(), strict=True)
    ]
    found = to_host(tokens.take(to_device(np.concatenate(places), tokens.device)))
    return np.split(found, np.cumsum([part.size for part in places[:-1]]))
