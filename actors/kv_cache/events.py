"""The stream of KV events: a ring that the scheduler writes and any number of readers read, each at its own pace.

One ring serves all readers, so a slow one costs no memory: it finds what it has missed gone, and is told how much. It
may then, or at its beginning, ask for a snapshot of what can be found at that moment.
"""

from array import array
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice
from typing import NamedTuple, Protocol

from troupellm.actors.kv_cache.stored_events import Standing, StoredBlock
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.messages.kv_events import (
    MOST_READ,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventsLost,
    KVEvent,
    KVEventsRead,
    Medium,
    SnapshotBegins,
)
from troupellm.protocol.messages.snapshot import KVEventsSnapshot

MOST_READERS = 64
"""Readers that may wait at once."""


class BlockEvents(Protocol):
    """Hears what becomes of the blocks of one medium. Keys are those of the prefix chain."""

    def stored(self, key: bytes, group: int, parent: bytes = b"", tokens: bytes = b"", adapter: str = "") -> None: ...
    def removed(self, key: bytes, group: int) -> None: ...
    def cleared(self) -> None: ...


class _Record(NamedTuple):
    kind: type[BlocksStored | BlocksRemoved | BlocksCleared]
    medium: Medium
    group: int = 0
    key: bytes = b""
    parent: bytes = b""
    tokens: bytes = b""
    adapter: str = ""


class KVEventLog:
    """Written on the event loop's own thread, like everything here."""

    def __init__(self, capacity: int, block_size: int, *, with_tokens: bool = False) -> None:
        """
        Args:
            capacity: events that are kept for readers.
            with_tokens: events tell token ids.
        """
        self._ring: deque[_Record] = deque(maxlen=capacity)
        self._standing = Standing()
        self._block_size, self._with_tokens = block_size, with_tokens
        self._waiting: set[Waiter] = set()
        self._reported = 0
        self.last = 0
        """Number of the last event; 0 before the first one."""
        self.closed = False
        self._lost = 0

    def snapshot(self) -> KVEventsSnapshot:
        """In plain numbers."""
        return KVEventsSnapshot(
            reported=self.last,
            kept=len(self._ring),
            lost=self._lost,
            waiting_readers=len(self._waiting),
            findable=len(self._standing),
        )

    def of(self, medium: Medium) -> BlockEvents:
        """Where one medium tells of its blocks."""
        return _Told(self, medium)

    def add(self, record: _Record) -> None:
        record = record if self._with_tokens else record._replace(tokens=b"")
        self._ring.append(record)
        self.last += 1
        if record.kind is BlocksStored:
            self._standing.add(self.last, StoredBlock(*record[1:]))
        elif record.kind is BlocksRemoved:
            self._standing.remove(record.medium, record.group, record.key)
        else:
            self._standing.clear(record.medium)

    def flush(self) -> None:
        """Wake who waits, if there is news. Called once for many events."""
        if self.last == self._reported:
            return
        self._reported = self.last
        self._wake()

    def close(self) -> None:
        """There will be no more."""
        self.closed = True
        self._wake()

    def read(self, after: int, most: int = MOST_READ) -> list[KVEvent]:
        """Up to `most` events behind number `after`, oldest first; before them, how many are not there any more.

        A number that was never reached is one of another engine in this one's place: all is told from the beginning.
        """
        if after > self.last:
            after = 0
        events: list[KVEvent] = []
        first = self.last - len(self._ring) + 1
        if after + 1 < first:
            self._lost += first - 1 - after
            events.append(EventsLost(seq=first - 1, dropped=first - 1 - after))
            after = first - 1
        begin = after + 1 - first
        kept = islice(self._ring, begin, begin + most)
        return events + [self._event(after + number, record) for number, record in enumerate(kept, 1)]

    def read_snapshot(self, after: int = 0, begun: int | None = None, most: int = MOST_READ) -> KVEventsRead:
        """One page of all blocks that can be found: the first page, or the one behind number `after` of the snapshot
        `begun`."""
        events: list[KVEvent] = []
        if begun is None or begun > self.last:  # that was another engine's
            after, begun = 0, self.last
            events.append(SnapshotBegins(seq=begun, blocks=len(self._standing)))
        found = self._standing.page(after, begun, most)
        events += [self._event(number, _Record(BlocksStored, *block)) for number, block in found]
        more = len(found) == most
        return KVEventsRead(
            events=tuple(events),
            last=found[-1][0] if more else begun,
            snapshot=begun if more else None,
            ended=self.closed,
        )

    async def wait(self, after: int, timeout: float | None = None) -> bool:
        """Until there is an event behind number `after`, or for `timeout` seconds; tells whether there is one.

        Raises:
            ValueError: too many wait already.
        """
        if after > self.last:
            after = 0
        while self.last <= after and not self.closed:
            if len(self._waiting) >= MOST_READERS:
                raise ValueError(f"{MOST_READERS} readers wait for KV events already")
            waiter = new_waiter()
            self._waiting.add(waiter)
            try:
                if not await waiter.wait(timeout):
                    break
            finally:
                self._waiting.discard(waiter)
        return self.last > after

    async def follow(self, after: int | None = None, *, snapshot: bool = False) -> AsyncIterator[KVEvent]:
        """Events until the engine ends, from now on, behind number `after`, or behind a snapshot; then another snapshot
        follows where some were missed."""
        position, begun, missed = self.last if after is None else after, None, snapshot
        while True:
            while missed or begun is not None:
                read = self.read_snapshot(position, begun)
                missed, position, begun = False, read.last, read.snapshot
                for event in read.events:
                    yield event
            for event in self.read(position):
                yield event
                position = event.seq
                missed = snapshot and isinstance(event, EventsLost)
                if missed:
                    break
            if missed:
                continue
            if self.last <= position and self.closed:
                return
            await self.wait(position)

    def _event(self, number: int, record: _Record) -> KVEvent:
        if record.kind is BlocksCleared:
            return BlocksCleared(seq=number, medium=record.medium)
        key = record.key.hex()
        if record.kind is BlocksRemoved:
            return BlocksRemoved(seq=number, medium=record.medium, group=record.group, key=key)
        return BlocksStored(
            seq=number,
            medium=record.medium,
            group=record.group,
            key=key,
            parent=record.parent.hex(),
            num_tokens=self._block_size,
            token_ids=tuple(array("i", record.tokens)),
            lora_name=record.adapter,
        )

    def _wake(self) -> None:
        for waiter in self._waiting:
            waiter.wake()


class _Told:
    def __init__(self, log: KVEventLog, medium: Medium) -> None:
        self._add, self._medium = log.add, medium

    def stored(self, key: bytes, group: int, parent: bytes = b"", tokens: bytes = b"", adapter: str = "") -> None:
        self._add(_Record(BlocksStored, self._medium, group, key, parent, tokens, adapter))

    def removed(self, key: bytes, group: int) -> None:
        self._add(_Record(BlocksRemoved, self._medium, group, key))

    def cleared(self) -> None:
        self._add(_Record(BlocksCleared, self._medium))
