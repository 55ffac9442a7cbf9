"""What the block tables and their sequences tell the tiers behind the device, and ask of them."""

from typing import Protocol

from troupellm.actors.scheduler.sequence import Sequence


class Tiers(Protocol):
    """What lies behind the device."""

    def in_host(self, key: bytes) -> object | None:
        """What host memory has of a block by its key, group included; None if nothing that could be loaded now."""

    def reads(self, sequence: Sequence) -> bool:
        """Whether a sequence's blocks may come from there."""

    def offer(self, sequence: Sequence) -> None:
        """More of a sequence's blocks can be found: they may be copied there."""

    def preempted(self, sequence: Sequence) -> None:
        """It is about to give up its blocks, and will want them back."""

    def ended(self, sequence: Sequence) -> None:
        """It is about to give up its blocks for good."""

    def stop_waiting(self, sequence: Sequence) -> set[int]:
        """Nobody waits any more for what is under way to a LOADING sequence; the transfers after which its blocks are
        free, each of which leaves the set when it has ended."""

    def holders(self) -> list[list[list[int]]]:
        """Tables of the blocks that are held for no sequence, because something is being loaded into them."""
