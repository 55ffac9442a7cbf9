"""The interface through which the block tables and their sequences use the tiers behind the device."""

from typing import Protocol

from troupellm.actors.kv_cache.block_pool import in_group
from troupellm.actors.sequences.parts import HostHit
from troupellm.actors.sequences.sequence import Sequence


class Tiers(Protocol):
    """The tiers behind the device."""

    def in_host(self, key: bytes) -> object | None:
        """Host memory's block for a key, group included; None if there is none that could be loaded now."""

    def reads(self, sequence: Sequence) -> bool:
        """Whether a sequence's blocks may come from there."""

    def offer(self, sequence: Sequence) -> None:
        """More of a sequence's blocks can be found: they may be copied there."""

    def preempted(self, sequence: Sequence) -> None:
        """It is about to give up its blocks, and will want them back."""

    def ended(self, sequence: Sequence) -> None:
        """It is about to give up its blocks for good."""

    def stop_waiting(self, sequence: Sequence) -> set[int]:
        """Stop waiting for the transfers to a LOADING sequence. Returns those after which its blocks are free; each
        leaves the set when it has ended."""

    def holders(self) -> list[list[list[int]]]:
        """Tables of the blocks that are held for no sequence, because something is being loaded into them."""


def named_hits(sequence: Sequence, loads: list[list[int]], block_size: int) -> list[HostHit]:
    """The blocks to load for a sequence, first block first; `loads` are indices in its tables, by group."""
    keys, hits = sequence.keys, []
    wanted = [set(indices) for indices in loads]
    for index in sorted(set().union(*wanted)):
        tokens = sequence.tokens[index * block_size : (index + 1) * block_size].tobytes()
        chained, parent = keys[index + 1], keys[index]
        for group, indices in enumerate(wanted):
            if index in indices:
                block = sequence.tables[group][index]
                key = in_group(chained, group)
                age, whole = sequence.cache_age, index in sequence.request.marks
                hits.append(HostHit(group, index, block, key, chained, parent, tokens, age, whole))
    return hits
