"""The interface through which the block tables and their sequences use the tiers behind the device."""

from typing import Protocol

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
