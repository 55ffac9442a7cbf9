"""One block of a tier."""


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
