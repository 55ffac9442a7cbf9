"""Tracks the operations under way, and the answers that no step has collected yet."""

from enum import Enum, auto
from threading import Condition, Lock
from time import monotonic, perf_counter

from troupellm.protocol.messages.kv_transfers import BlockTransfer, LookupDone, TierLookup, TransferDone


class Stage(Enum):
    WAITING = auto()
    RUNNING = auto()
    """A thread is at it, outside of anything that others use: it can be given up."""
    LANDING = auto()
    """A thread copies it to or from memory that others use: it ends at once, and is waited for."""
    ANSWERED = auto()


class Operation:
    """One transfer or lookup (or neither: a probe), which is answered exactly once."""

    __slots__ = ("asked", "begun", "stage", "started", "work")

    def __init__(self, asked: BlockTransfer | TierLookup | None) -> None:
        self.asked = asked
        self.stage = Stage.WAITING
        self.begun = monotonic()
        self.started = 0.0
        """Time at which a thread took it; monotonic."""
        self.work = 0.0
        """Time at which the thread began; of the precise clock."""

    def take(self) -> None:
        """A thread begins."""
        self.started, self.work = monotonic(), perf_counter()


class Operations:
    """Shared by the step's thread and those that move blocks. Hold `lock` where stages are looked at and changed."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._changed = Condition(self.lock)
        self._transfers: dict[int, Operation] = {}
        self._lookups: dict[int, Operation] = {}
        self._done: list[TransferDone] = []
        self._found: list[LookupDone] = []

    def add(self, operation: Operation) -> None:
        """
        Raises:
            ValueError: its number is in use.
        """
        asked = operation.asked
        with self.lock:
            if isinstance(asked, BlockTransfer):
                if asked.transfer in self._transfers:
                    raise ValueError(f"transfer {asked.transfer} is under way already")
                self._transfers[asked.transfer] = operation
            elif isinstance(asked, TierLookup):
                if asked.lookup in self._lookups:
                    raise ValueError(f"lookup {asked.lookup} is under way already")
                self._lookups[asked.lookup] = operation

    def find(self, transfer: int) -> Operation | None:
        """A transfer under way. With the lock."""
        return self._transfers.get(transfer)

    def answer(
        self, operation: Operation, *, ok: bool = False, error: str = "", count: int = 0, together: int = 1
    ) -> bool:
        """With the lock. False: it was answered before, and this comes too late.

        Args:
            together: operations that shared the time since this one was taken.
        """
        if operation.stage is Stage.ANSWERED:
            return False
        operation.stage = Stage.ANSWERED
        asked = operation.asked
        if isinstance(asked, BlockTransfer):
            del self._transfers[asked.transfer]
            seconds = (perf_counter() - operation.work) / together if operation.work else 0.0
            self._done.append(TransferDone(asked.transfer, ok, error, seconds))
        elif isinstance(asked, TierLookup):
            del self._lookups[asked.lookup]
            self._found.append(LookupDone(asked.lookup, count))
        if self.idle:
            self._changed.notify_all()
        return True

    @property
    def idle(self) -> bool:
        """True if nothing is under way."""
        return not self._transfers and not self._lookups

    def wait(self, seconds: float) -> None:
        """Wait until nothing is under way, for at most `seconds`."""
        with self.lock:
            self._changed.wait_for(lambda: self.idle, seconds)

    def numbers(self) -> tuple[set[int], set[int]]:
        """Numbers of the transfers and of the lookups under way."""
        with self.lock:
            return set(self._transfers), set(self._lookups)

    def loading(self) -> set[int]:
        """Device blocks that are being written to."""
        with self.lock:
            asked = [each.asked for each in self._transfers.values()]
        return {each.block for each in asked if isinstance(each, BlockTransfer) and each.kind == "load"}

    def take(self) -> tuple[tuple[TransferDone, ...], tuple[LookupDone, ...]]:
        """The answers since the last time."""
        if not self._done and not self._found:
            return (), ()
        with self.lock:
            taken = tuple(self._done), tuple(self._found)
            self._done.clear()
            self._found.clear()
        return taken
