"""Prepared images: those that requests hold, counted, and those that are kept for the next turn of a conversation."""

import weakref
from collections import OrderedDict

from troupellm.protocol.messages.media import MediaItem


class ItemCache:
    """Knows each prepared image that is alive. An image is one object for all requests that hold it."""

    def __init__(self, capacity: int) -> None:
        """capacity: bytes of images that are kept although no request holds them."""
        self._capacity = capacity
        self._kept: OrderedDict[bytes, MediaItem] = OrderedDict()
        """By the digest of the file within its tenant; last used last."""
        self._alive: dict[bytes, tuple[weakref.ref[MediaItem], int]] = {}
        """By the item's digest."""
        self.kept_bytes = self.alive_bytes = 0
        self.hits = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, file: bytes) -> MediaItem | None:
        """The image of a file that was prepared before."""
        item = self._kept.get(file)
        if item is not None:
            self._kept.move_to_end(file)
            self.hits += 1
        return item

    def add(self, file: bytes, item: MediaItem) -> MediaItem:
        """Keep a prepared image; returns the object that stands for it, which may be an earlier one."""
        known = self._alive.get(item.digest)
        earlier = None if known is None else known[0]()
        if earlier is None:
            size, digest = item.num_bytes, item.digest
            self._alive[digest] = weakref.ref(item, lambda _: self._died(digest)), size
            self.alive_bytes += size
        else:
            item = earlier
        if file not in self._kept and item.num_bytes <= self._capacity:
            self._kept[file] = item
            self.kept_bytes += item.num_bytes
            self.shrink(self._capacity)
        return item

    def shrink(self, most: int) -> None:
        """Keep at most so many bytes."""
        while self.kept_bytes > most and self._kept:
            _, item = self._kept.popitem(last=False)
            self.kept_bytes -= item.num_bytes

    def _died(self, digest: bytes) -> None:
        known = self._alive.pop(digest, None)
        if known is not None:
            self.alive_bytes -= known[1]
