"""The interface of a tier's manager, independent of where the tier keeps its blocks, and one block of a tier."""

from collections.abc import Iterable, Sequence
from typing import Protocol


class TierBlock:
    """A block of the host tier. Handed out by `prepare_store` and `prepare_load`, given back to the complete calls."""

    __slots__ = ("dropped", "key", "origin", "pins", "place", "ready")

    def __init__(self, key: bytes, place: int) -> None:
        self.key = key
        self.place = place
        self.pins = 0
        """Transfers that read or write the place."""
        self.ready = False
        """The place holds the contents that the key names."""
        self.dropped = False
        """The block cannot be found any more; its place is free when nothing is pinned."""
        self.origin = 0
        """The tier that it was fetched from, until it is first used; 0 if it came from the device."""


class TierManager(Protocol):
    """Which blocks a tier has, and which of them must stay. Keys are those of the prefix chain, group included."""

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many of these keys are here, from the first on."""

    def prepare_store(self, key: bytes) -> TierBlock | None:
        """A place for a block that is not here, pinned; None when it is here or nothing may give way to it."""

    def complete_store(self, block: TierBlock, *, ok: bool) -> None:
        """The place was written, or not: then it is free."""

    def prepare_load(self, key: bytes) -> TierBlock | None:
        """A block that is here, pinned; None if it is not."""

    def complete_load(self, block: TierBlock, *, ok: bool) -> None:
        """The place was read; what was not what it should be is forgotten."""

    def touch(self, keys: Iterable[bytes]) -> None:
        """These were of use. Of a prefix the last one first: a prefix is useful without its tail, never without its
        head."""
