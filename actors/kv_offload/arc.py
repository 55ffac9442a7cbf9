"""Adaptive replacement: recency and frequency, weighed by what either would have kept.

N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4. Keys that were asked
for once are in `recent` (T1), those that were asked for again in `frequent` (T2); each has a list of ghosts behind it
(B1, B2), keys alone of what it gave up last. A key that comes back from the ghosts says which list was too short, and
moves the target size of `recent` (p) its way. So a scan, whose keys come once, passes through `recent` and leaves what
is frequent alone.

Beyond the paper: pinned keys are passed over, and where a whole list is pinned the other one gives way.
"""

from collections import OrderedDict

from troupellm.actors.kv_offload.eviction import EvictionPolicy, Pinned, TierFull

_Keys = OrderedDict[bytes, None]
"""Oldest first."""


class ArcPolicy(EvictionPolicy):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recent: _Keys = OrderedDict()
        self._frequent: _Keys = OrderedDict()
        self._recent_ghosts: _Keys = OrderedDict()
        self._frequent_ghosts: _Keys = OrderedDict()
        self._target = 0.0
        """How many keys `recent` should have."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._recent or key in self._frequent

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    @property
    def num_ghosts(self) -> int:
        """Keys that are remembered without a place."""
        return len(self._recent_ghosts) + len(self._frequent_ghosts)

    def admit(self, key: bytes, pinned: Pinned) -> bytes | None:
        recent_ghosts, frequent_ghosts = self._recent_ghosts, self._frequent_ghosts
        if key in recent_ghosts:  # case II: recency deserved more room
            wanted = self._target + max(len(frequent_ghosts) / len(recent_ghosts), 1.0)
            evicted = self._replace(min(wanted, float(self.capacity)), pinned, from_frequent_ghosts=False)
            del recent_ghosts[key]
            self._frequent[key] = None
            return evicted
        if key in frequent_ghosts:  # case III: frequency did
            wanted = self._target - max(len(recent_ghosts) / len(frequent_ghosts), 1.0)
            evicted = self._replace(max(wanted, 0.0), pinned, from_frequent_ghosts=True)
            del frequent_ghosts[key]
            self._frequent[key] = None
            return evicted
        evicted = self._admit_stranger(pinned)  # case IV
        self._recent[key] = None
        return evicted

    def touch(self, key: bytes) -> None:
        if key in self._recent:
            del self._recent[key]
            self._frequent[key] = None
        else:
            self._frequent.move_to_end(key)

    def refresh(self, key: bytes) -> None:
        (self._recent if key in self._recent else self._frequent).move_to_end(key)

    def remove(self, key: bytes) -> None:
        del (self._recent if key in self._recent else self._frequent)[key]

    def _admit_stranger(self, pinned: Pinned) -> bytes | None:
        """Make room for a key that neither list remembers, and keep each ghost list within what the paper allows."""
        recent, ghosts = self._recent, self._recent_ghosts
        if len(recent) + len(ghosts) >= self.capacity:
            if len(recent) < self.capacity:
                evicted = self._replace(self._target, pinned, from_frequent_ghosts=False)
                if len(recent) + len(ghosts) >= self.capacity and ghosts:
                    ghosts.popitem(last=False)
                return evicted
            evicted = _oldest(recent, pinned)  # it has been no use to anybody: not even a ghost of it stays
            if evicted is None:
                raise TierFull
            del recent[evicted]
            return evicted
        evicted = self._replace(self._target, pinned, from_frequent_ghosts=False)
        if len(self) + self.num_ghosts >= 2 * self.capacity and self._frequent_ghosts:
            self._frequent_ghosts.popitem(last=False)
        return evicted

    def _replace(self, target: float, pinned: Pinned, *, from_frequent_ghosts: bool) -> bytes | None:
        """Let one key give way, if the tier is full, and set the target; `TierFull` changes nothing."""
        if len(self) < self.capacity:
            self._target = target
            return None
        size = len(self._recent)
        first_recent = bool(size) and (size > target or (from_frequent_ghosts and size == int(target)))
        turns = [(self._recent, self._recent_ghosts), (self._frequent, self._frequent_ghosts)]
        for keys, ghosts in turns if first_recent else turns[::-1]:
            evicted = _oldest(keys, pinned)
            if evicted is not None:
                del keys[evicted]
                ghosts[evicted] = None
                self._target = target
                return evicted
        raise TierFull


def _oldest(keys: _Keys, pinned: Pinned) -> bytes | None:
    return next((key for key in keys if not pinned(key)), None)
