"""The mailbox: how actors talk. One consumer, many producers, one event loop.

Two lanes: bounded data, and a small control lane that overtakes it. `put` waits (backpressure), `offer` refuses
(admission control), `control` never waits. A message belongs to the mailbox until the consumer asks for the next one,
so a crash or a cancellation loses nothing: `abandon` hands the supervisor everything that is owed an answer,
`abandon_in_hand` what a consumer that comes back will not take again.

Neither lane checkpoints while it need not wait: a consumer drains with `take` and checkpoints once per batch.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.messages.snapshot import MailboxSnapshot

DataT = TypeVar("DataT")
ControlT = TypeVar("ControlT")
ItemT = TypeVar("ItemT")


class KeyTurns(Generic[ItemT]):
    """A queue with one item of each key in turn, so that an item waits for at most one of every other key."""

    def __init__(self, key: Callable[[ItemT], str]) -> None:
        self._key = key
        self._lines: OrderedDict[str, deque[ItemT]] = OrderedDict()
        """The next turn's first. No line is empty."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[ItemT]:
        """Key after key."""
        return chain.from_iterable(self._lines.values())

    def append(self, item: ItemT) -> None:
        self._lines.setdefault(self._key(item), deque()).append(item)
        self._size += 1

    def popleft(self) -> ItemT:
        """Raises IndexError: it is empty."""
        if not self._lines:
            raise IndexError("no item is left")
        key, line = next(iter(self._lines.items()))
        item = line.popleft()
        self._size -= 1
        if line:
            self._lines.move_to_end(key)
        else:
            del self._lines[key]
        return item

    def remove(self, item: ItemT) -> None:
        """Raises ValueError: it is not here."""
        key = self._key(item)
        line = self._lines.get(key, deque())
        line.remove(item)
        self._size -= 1
        if not line:
            del self._lines[key]

    def clear(self) -> None:
        self._lines.clear()
        self._size = 0


class MailboxClosed(Exception):
    """The consumer takes no more data messages."""


class _Producer(Generic[DataT]):
    """A message whose sender waits for room."""

    __slots__ = ("accepted", "message", "waiter")

    def __init__(self, message: DataT) -> None:
        self.message = message
        self.waiter: Waiter = new_waiter()
        self.accepted = False


class Mailbox(Generic[DataT, ControlT]):
    """See the module. `in_hand` is the message that the consumer works on."""

    def __init__(
        self,
        name: str,
        capacity: int,
        *,
        control_capacity: int = 4096,
        turns_by: Callable[[DataT], str] | None = None,
    ) -> None:
        """turns_by: the key of a data message, where keys take turns; None takes messages in the order they came."""
        if capacity < 1:
            raise ValueError("a mailbox needs a capacity of at least 1")
        self.name = name
        self.capacity = capacity
        self.control_capacity = control_capacity
        self.closed = False
        self.in_hand: DataT | ControlT | None = None
        self._data: deque[DataT] | KeyTurns[DataT] = deque() if turns_by is None else KeyTurns(turns_by)
        self._control: deque[ControlT] = deque()
        self._producers: deque[_Producer[DataT]] | KeyTurns[_Producer[DataT]] = (
            deque() if turns_by is None else KeyTurns(lambda producer: turns_by(producer.message))
        )
        self._consumer: Waiter | None = None
        self._accepted = 0
        self._dropped = 0

    @property
    def depth(self) -> int:
        """Messages that wait to be taken."""
        return len(self._data) + len(self._control)

    async def put(self, message: DataT) -> None:
        """Queue a message, waiting in line while the lane is full; with `turns_by` in the line of its key.

        A cancelled `put` was accepted as a whole or not at all; it never leaves half a message or blocks the line.

        Raises:
            MailboxClosed: before or while it waited.
        """
        if self.closed:
            raise MailboxClosed(self.name)
        if len(self._data) < self.capacity:  # producers wait only while the lane is full, so messages keep their order
            self._accept(message)
            return
        producer = _Producer(message)
        self._producers.append(producer)
        try:
            await producer.waiter.wait()
        finally:
            if not producer.accepted and producer in self._producers:
                self._producers.remove(producer)
        if not producer.accepted:
            raise MailboxClosed(self.name)

    def offer(self, message: DataT) -> bool:
        """Queue a message if there is room; a refusal is counted.

        Raises:
            MailboxClosed: the consumer takes no more.
        """
        if self.closed:
            raise MailboxClosed(self.name)
        if len(self._data) >= self.capacity:
            self._dropped += 1
            return False
        self._accept(message)
        return True

    def control(self, message: ControlT) -> None:
        """Queue a message ahead of all data. Accepted after `close` too: the consumer may still be draining.

        Messages beyond `control_capacity` are dropped and counted, since sending one must not raise.
        """
        if len(self._control) >= self.control_capacity:
            self._dropped += 1
            return
        self._control.append(message)
        self._accepted += 1
        self._wake_consumer()

    async def wait(self, timeout: float | None = None) -> bool:
        """Until there is something to take (True), or `timeout` seconds passed, or closed and empty (False).

        Says that the message in hand was handled. Only one task may wait.
        """
        self.in_hand = None
        if self._control or self._data:
            return True
        if self.closed or (timeout is not None and timeout <= 0.0):
            return False
        if self._consumer is not None:
            raise RuntimeError(f"mailbox {self.name} has a consumer already")
        waiter = self._consumer = new_waiter()
        try:
            await waiter.wait(timeout)
        finally:
            if self._consumer is waiter:
                self._consumer = None
        return bool(self._control or self._data)

    def take(self) -> DataT | ControlT | None:
        """The next message, control lane first; None when there is none. It stays in hand until the next call."""
        if self._control:
            self.in_hand = self._control.popleft()
        elif self._data:
            self.in_hand = self._data.popleft()
            if self._producers:
                self._admit()
        else:
            self.in_hand = None
        return self.in_hand

    def close(self) -> None:
        """No more data: waiting producers get `MailboxClosed`, what is queued can still be taken. Idempotent."""
        self.closed = True
        while self._producers:
            self._producers.popleft().waiter.wake()
        self._wake_consumer()

    def nudge(self) -> None:
        """Wake a consumer that waits although there is something to take: it must have missed its wake-up."""
        if self.depth:
            self._wake_consumer()

    def abandon_in_hand(self) -> list[DataT | ControlT]:
        """Give up the message in hand only; a restarted consumer goes on with the queued ones."""
        owed: list[DataT | ControlT] = [] if self.in_hand is None else [self.in_hand]
        self.in_hand = None
        return owed

    def abandon(self) -> list[DataT | ControlT]:
        """Give up the message in hand and all queued ones, so that the supervisor can answer them after a crash.

        The mailbox stays usable: a restarted consumer goes on with what comes next, waiting producers first.
        """
        owed = self.abandon_in_hand()
        owed.extend(self._control)
        owed.extend(self._data)
        self._control.clear()
        self._data.clear()
        self._admit()
        return owed

    def snapshot(self) -> MailboxSnapshot:
        return MailboxSnapshot(self.name, self.depth, self.capacity, self._accepted, self._dropped)

    def _accept(self, message: DataT) -> None:
        self._data.append(message)
        self._accepted += 1
        if self._consumer is not None:
            self._wake_consumer()

    def _admit(self) -> None:
        """Move messages of waiting producers into the freed room, in the order of the lane."""
        while self._producers and len(self._data) < self.capacity:
            producer = self._producers.popleft()
            producer.accepted = True
            self._accept(producer.message)
            producer.waiter.wake()

    def _wake_consumer(self) -> None:
        if self._consumer is not None:
            self._consumer.wake()
            self._consumer = None
