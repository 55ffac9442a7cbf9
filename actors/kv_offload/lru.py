"""Least recently used first."""

from collections import OrderedDict

from troupellm.actors.kv_offload.eviction import EvictionPolicy, Pinned, TierFull


class LruPolicy(EvictionPolicy):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        """Oldest use first."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def admit(self, key: bytes, pinned: Pinned) -> bytes | None:
        evicted = None
        if len(self._keys) >= self.capacity:
            evicted = next((old for old in self._keys if not pinned(old)), None)
            if evicted is None:
                raise TierFull
            del self._keys[evicted]
        self._keys[key] = None
        return evicted

    def touch(self, key: bytes) -> None:
        self._keys.move_to_end(key)

    def refresh(self, key: bytes) -> None:
        self._keys.move_to_end(key)

    def remove(self, key: bytes) -> None:
        del self._keys[key]
