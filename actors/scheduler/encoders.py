"""Images in the scheduler: which are encoded in a plan, and whose embeddings the worker keeps.

The scheduler alone decides what the worker keeps, so both know it at every time. Plans are executed in their order, so
an item that a plan drops may still be read by the plans before it, and only items of the same plan are held.
A span of a prompt is computed only where its item's embeddings are there or made by the same plan.
"""

from collections import OrderedDict

from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.messages.media import MediaAbility, MediaItem
from troupellm.protocol.messages.snapshot import EncodersSnapshot

MOST_PLAN_BYTES = 16 * 2**20
"""Of items in one plan, which is one frame to a worker process; a larger item has a plan of its own."""


class Encoders:
    def __init__(self, ability: MediaAbility) -> None:
        self._most, self._step_vectors = ability.cache_vectors, ability.step_vectors
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        """Vectors of each item in the worker, plans in flight included; last used last."""
        self.kept_vectors = 0
        self._used: set[bytes] = set()
        """Items that the plan which is drawn up reads."""
        self._encode: list[MediaItem] = []
        self._forgotten: list[bytes] = []
        self._vectors_left, self._bytes_left = self._step_vectors, MOST_PLAN_BYTES
        self._fresh = True
        """No item is encoded yet in this drawing of the plan."""
        self.num_encoded = self.num_hits = self.num_evicted = 0

    def begin(self) -> None:
        """A plan is drawn up, perhaps once more since the last try had no rows: what it may encode is counted anew.

        Items of such a try were never sent. They are taken back, or their room could be missing to all others for ever.
        """
        for item in self._encode:
            self.kept_vectors -= self._kept.pop(item.digest)
        self._encode = []
        self._used.clear()
        self._vectors_left, self._bytes_left = self._step_vectors, MOST_PLAN_BYTES
        self._fresh = True

    def reach(self, sequence: Sequence, start: int, count: int) -> int:
        """How many of the positions from `start` on the plan may compute: all before the first image that has no room.
        The images among them are encoded if they are not there."""
        for span in sequence.request.media:
            if span.end <= start:
                continue
            if span.start >= start + count:
                break
            if not self._have(sequence.request.items[span.digest]):
                return max(0, span.start - start)
        return count

    def take(self) -> tuple[tuple[bytes, ...], tuple[MediaItem, ...]]:
        """The items that the plan drops, and those that it encodes; the next plan is another one."""
        if not (self._encode or self._forgotten):
            return (), ()
        forgotten, encode = tuple(self._forgotten), tuple(self._encode)
        self._forgotten, self._encode = [], []
        self.num_encoded += len(encode)
        return forgotten, encode

    def forget(self) -> None:
        """The worker is another one, which has nothing."""
        self._kept.clear()
        self._used.clear()
        self._encode, self._forgotten, self.kept_vectors = [], [], 0

    def _have(self, item: MediaItem) -> bool:
        """True if an item is there, or is encoded by this plan."""
        digest = item.digest
        if digest in self._kept:
            if digest not in self._used:
                self.num_hits += 1
            self._kept.move_to_end(digest)
            self._used.add(digest)
            return True
        if not self._fresh and (item.num_vectors > self._vectors_left or item.num_bytes > self._bytes_left):
            return False
        if not self._make_room(item.num_vectors):
            return False
        self._fresh = False
        self._vectors_left -= item.num_vectors
        self._bytes_left -= item.num_bytes
        self._kept[digest] = item.num_vectors
        self.kept_vectors += item.num_vectors
        self._used.add(digest)
        self._encode.append(item)
        return True

    def _make_room(self, num_vectors: int) -> bool:
        """Drop items that were not used for longest, none of which this plan reads; False where too few are left."""
        if self.kept_vectors + num_vectors <= self._most:
            return True
        droppable = [digest for digest in self._kept if digest not in self._used]
        room = self._most - self.kept_vectors + sum(self._kept[digest] for digest in droppable)
        if room < num_vectors:
            return False
        for digest in droppable:
            if self.kept_vectors + num_vectors <= self._most:
                break
            self.kept_vectors -= self._kept.pop(digest)
            self._forgotten.append(digest)
            self.num_evicted += 1
        return True

    def snapshot(self) -> EncodersSnapshot:
        return EncodersSnapshot(
            encoded=self.num_encoded, hits=self.num_hits, evicted=self.num_evicted, kept_vectors=self.kept_vectors
        )

    def assert_invariants(self) -> None:
        """Counts agree, and nothing is kept beyond the worker's room."""
        assert self.kept_vectors == sum(self._kept.values()) <= self._most
        assert all(item.digest in self._kept for item in self._encode)
