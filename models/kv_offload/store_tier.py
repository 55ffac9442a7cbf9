"""An outer tier: a store of blocks behind a bounded queue and a few threads, which is disabled when it fails.

A store may fail, hang or return wrong data. An operation that fails, or takes longer than its deadline, disables the
tier: waiting operations are answered at once, and no more are begun until a probe succeeds. Probes come after 1, 2, 4
.. 60 seconds. An operation that hangs keeps its thread; when it ends after all, its outcome is dropped and counted. A
store never sees the host buffer's memory. So a late operation can neither harm a place that was given to another block
nor write a block's content under the key of another.

A reset runs alone: waiting and running operations are given up, and later ones wait for it. A reset that was not
carried out is owed. It is tried with every probe and once more at the end, even if all else in the store fails. A later
engine must not find blocks that were to be forgotten.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from troupellm.models.kv_offload.block_format import checksum
from troupellm.models.kv_offload.host_memory import HostBuffer
from troupellm.models.kv_offload.operations import Operation, Operations, Stage
from troupellm.models.kv_offload.store import BlockStore, StoreCorrupt, StoreError, StoreMiss
from troupellm.protocol.messages.kv_transfers import BlockTransfer, TierInfo, TierLookup, TierReport

logger = logging.getLogger("troupellm.worker")

THREADS = 2
MOST_WAITING = 4096
"""Operations that may wait for a thread; the scheduler's credits are far below."""
FIRST_PROBE_SECONDS, LAST_PROBE_SECONDS = 1.0, 60.0
CLOSE_SECONDS = 5.0
"""Longest wait at the end for a thread that hangs in a store."""
STARTING = "starting"


class OuterTier:
    """One store. Methods are called on the step's thread."""

    def __init__(
        self, number: int, store: BlockStore, host_buffer: HostBuffer, operations: Operations, timeout: float
    ) -> None:
        """
        Args:
            timeout: seconds that one operation may take; so long a read waits at most for its turn while nothing ends.
        """
        self.number, self._store, self._host_buffer, self._operations, self._timeout = (
            number,
            store,
            host_buffer,
            operations,
            timeout,
        )
        self._reads: deque[Operation] = deque()
        self._writes: deque[Operation] = deque()
        self._resets: deque[Operation] = deque()
        self._probe: Operation | None = None
        self._running: list[Operation] = []
        self._work = Condition(operations.lock)
        self._closing = False
        self._owes_reset = False
        self._disabled = STARTING
        self._backoff = FIRST_PROBE_SECONDS
        self._next_probe = 0.0
        self._enabled_at = 0.0
        self._progressed_at = 0.0
        """Time at which an operation last ended without a failure."""
        self._corrupt = self._failed = self._disablings = self._refused = self._late = 0
        self._changed = True
        self._threads = [
            Thread(target=self._run, name=f"troupellm-kv-{store.name}-{index}", daemon=True) for index in range(THREADS)
        ]

    def start(self) -> None:
        """Begin with a probe, and wait for it as long as an operation may take; the tier is disabled until it ends."""
        for thread in self._threads:
            thread.start()
        with self._operations.lock:
            self._begin_probe()
            self._work.wait_for(lambda: self._probe is None, self._timeout)

    def info(self) -> TierInfo:
        """The tier's properties, which the scheduler gets once."""
        store = self._store
        return TierInfo(
            name=store.name,
            capacity_bytes=store.use().capacity_bytes,
            loads=store.loads,
            stores=store.stores,
            failure_policy=store.failure_policy,
        )

    def submit(self, asked: BlockTransfer | TierLookup) -> None:
        """Take an operation in hand, or answer it at once."""
        operation = Operation(asked)
        self._operations.add(operation)
        with self._operations.lock:
            if self._disabled:
                self._operations.answer(operation, error="disabled")
                if _is_reset(operation):
                    self._owes_reset, self._next_probe = True, 0.0
            elif _is_reset(operation):
                self._give_up("cancelled", (self._reads, self._writes))
                self._resets.append(operation)
                self._work.notify()
            elif len(self._reads) + len(self._writes) >= MOST_WAITING:
                self._refused += 1
                self._operations.answer(operation, error="busy")
            else:
                is_write = isinstance(asked, BlockTransfer) and asked.kind == "spill"
                (self._writes if is_write else self._reads).append(operation)
                self._work.notify()

    def watch(self) -> None:
        """Give up late operations; probe a disabled store when it is due. Costs nothing while all is well."""
        if not self._disabled and not self._running and not self._reads and not self._resets:
            return
        now = monotonic()
        with self._operations.lock:
            if self._disabled:
                if self._probe is None and now >= self._next_probe and self._disabled != STARTING:
                    self._begin_probe()
                return
            while self._reads and self._reads[0].stage is Stage.ANSWERED:  # cancelled
                self._reads.popleft()
            open_ones = [each for each in self._running if each.stage is Stage.RUNNING and each.asked is not None]
            if any(self._is_late(each, now) for each in (*open_ones, *list(self._resets)[:1], *list(self._reads)[:1])):
                self._disable(f"slower than {self._timeout:g} s")

    def has_changed(self) -> bool:
        """True if its report has changed since the last call."""
        changed, self._changed = self._changed, False
        return changed

    def report(self) -> TierReport:
        """The tier's state and figures."""
        use = self._store.use()
        return TierReport(
            tier=self.number,
            disabled=self._disabled,
            blocks=use.blocks,
            used_bytes=use.used_bytes,
            capacity_bytes=use.capacity_bytes,
            evicted=use.evicted,
            corrupt=self._corrupt,
            failed=self._failed,
            disablings=self._disablings,
            refused=self._refused,
            late=self._late,
        )

    def rest(self) -> None:
        """Give up everything; wait for operations that are copying bytes of the host buffer right now."""
        with self._operations.lock:
            self._give_up("cancelled", (self._resets, self._reads, self._writes))
            self._work.wait_for(lambda: all(each.stage is not Stage.LANDING for each in self._running))

    def close(self) -> None:
        """Join the threads and close the store. A thread that hangs in it is left behind after a while."""
        self.rest()
        with self._operations.lock:
            self._closing = True
            self._work.notify_all()
        deadline = monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("KV tier %s hangs; a thread of it was left behind", self._store.name)
        self._store.close()

    def _is_late(self, operation: Operation, now: float) -> bool:
        """True if an operation is late. A waiting one is late only if those before it in the queue are slow, too."""
        waits = operation.stage is Stage.WAITING
        return now > (max(operation.begun, self._progressed_at) if waits else operation.started) + self._timeout

    def _begin_probe(self) -> None:
        self._probe = Operation(None)
        self._work.notify()

    def _disable(self, why: str) -> None:
        """Disable the tier, with the lock held."""
        self._failed += 1
        self._changed = True
        if self._disabled:
            return
        now = monotonic()
        if now - self._enabled_at > LAST_PROBE_SECONDS:
            self._backoff = FIRST_PROBE_SECONDS
        self._disabled, self._next_probe = why, now + self._backoff
        self._disablings += 1
        self._give_up("disabled", (self._resets, self._reads, self._writes))
        logger.warning("KV tier %s is left alone: %s; next try in %g s", self._store.name, why, self._next_probe - now)
        self._backoff = min(LAST_PROBE_SECONDS, 2 * self._backoff)

    def _give_up(self, error: str, queues: Sequence[deque[Operation]]) -> None:
        """With the lock held: answer the operations in these queues, and running ones unless they end at once."""
        for waiting in queues:
            for operation in waiting:
                self._owes_reset |= self._operations.answer(operation, error=error) and _is_reset(operation)
            waiting.clear()
        for operation in self._running:
            if _is_reset(operation) and self._resets is not queues[0]:
                continue
            if operation.stage is Stage.RUNNING and operation.asked is not None:
                self._owes_reset |= self._operations.answer(operation, error=error) and _is_reset(operation)

    # The methods below run on the tier's threads.

    def _run(self) -> None:
        buffer: NDArray[np.uint8] = np.empty(self._host_buffer.block_bytes, np.uint8)
        while (operation := self._next()) is not None:
            if operation.asked is None:
                self._do_probe(operation)
            else:
                self._do(operation, operation.asked, buffer)
            with self._operations.lock:
                self._running.remove(operation)
                self._work.notify_all()
        self._attempt(self._pay)

    def _next(self) -> Operation | None:
        """The probe, then a reset alone, then reads, then writes, which never take the last thread but one that hangs
        has taken the other: else they would wait for ever, and with them the engine that asked."""
        with self._operations.lock:
            while not self._closing:
                found = self._takeable()
                if found is not None:
                    found.stage = Stage.RUNNING
                    found.take()
                    self._running.append(found)
                    return found
                self._work.wait()
        return None

    def _takeable(self) -> Operation | None:
        if self._probe is not None and self._probe.stage is Stage.WAITING:
            return self._probe
        if self._resets or any(map(_is_reset, self._running)):
            return self._resets.popleft() if self._resets and not self._running else None
        busy = sum(each.stage is not Stage.ANSWERED for each in self._running)  # hanging ones were given up
        for waiting in (self._reads, self._writes):
            if waiting is self._writes and busy >= THREADS - 1:
                return None
            while waiting:
                operation = waiting.popleft()
                if operation.stage is Stage.WAITING:  # else it was cancelled
                    return operation
        return None

    def _do_probe(self, operation: Operation) -> None:
        self._attempt(self._pay)  # a full disk has room for this, perhaps, and for no block
        problem = self._attempt(self._store.probe) or self._attempt(self._pay)
        now = monotonic()
        with self._operations.lock:
            first = self._disabled == STARTING
            if not problem and not first and now - operation.started > self._timeout:
                problem = f"slower than {self._timeout:g} s"
            if problem:
                if first:
                    self._disabled = ""
                    self._disable(problem)
                else:
                    self._failed += 1
                    self._next_probe = now + self._backoff
                    self._backoff = min(LAST_PROBE_SECONDS, 2 * self._backoff)
            else:
                if not first:
                    logger.info("KV tier %s works again", self._store.name)
                self._disabled, self._enabled_at = "", now
            self._probe = None
            self._changed = True

    def _attempt(self, call: Callable[[], None]) -> str:
        """Run a call; returns the error's text, empty if there was none."""
        try:
            call()
        except Exception as error:  # a plug-in's store may raise anything
            return _text(error)
        return ""

    def _pay(self) -> None:
        """Carry out a reset that is owed, if any. If it is given up, or another one comes meanwhile, it stays owed."""
        with self._operations.lock:
            owed, self._owes_reset = self._owes_reset, False
        if not owed:
            return
        try:
            self._store.reset()
        except BaseException:
            with self._operations.lock:
                self._owes_reset = True
            raise

    def _do(self, operation: Operation, asked: BlockTransfer | TierLookup, buffer: NDArray[np.uint8]) -> None:
        count, corrupt, miss, failure = 0, False, "", ""
        try:
            if isinstance(asked, TierLookup):
                count = min(len(asked.keys), max(0, self._store.contains(asked.keys)))
            elif asked.kind == "reset":
                self._owes_reset = True
                self._pay()
            elif asked.kind == "spill":
                if self._copied_out(operation, asked.place, buffer):
                    self._store.put(asked.key, buffer.data.toreadonly())
            else:
                self._store.get(asked.key, buffer.data)
                self._copy_in(operation, asked.place, buffer)
        except StoreCorrupt:
            miss, corrupt = "corrupt", True
        except StoreMiss:
            miss = "miss"
            failure = "miss" if _is_reset(operation) else ""
        except Exception as error:  # see `_attempt`
            failure = _text(error)
        with self._operations.lock:
            self._corrupt += corrupt
            if not self._operations.answer(operation, ok=not (miss or failure), error=miss or failure, count=count):
                self._late += 1
                self._changed = True
            if failure:
                self._disable(failure)
            else:
                self._progressed_at = monotonic()

    def _copied_out(self, operation: Operation, place: int, buffer: NDArray[np.uint8]) -> bool:
        """Copy a place; False where that was given up before.

        Raises:
            StoreCorrupt: its content is not the stored one.
        """
        if not self._land(operation):
            return False
        np.copyto(buffer, self._host_buffer[place])
        sound = checksum(buffer.data) == self._host_buffer.checksums[place]
        with self._operations.lock:
            operation.stage = Stage.RUNNING
            self._work.notify_all()
        if not sound:
            raise StoreCorrupt("in host memory")
        return True

    def _copy_in(self, operation: Operation, place: int, buffer: NDArray[np.uint8]) -> None:
        if self._land(operation):
            np.copyto(self._host_buffer[place], buffer)
            self._host_buffer.checksums[place] = checksum(buffer.data)

    def _land(self, operation: Operation) -> bool:
        """Begin the part that cannot be given up; False: it was given up before."""
        with self._operations.lock:
            if operation.stage is not Stage.RUNNING:
                return False
            operation.stage = Stage.LANDING
            return True


def _is_reset(operation: Operation) -> bool:
    return isinstance(operation.asked, BlockTransfer) and operation.asked.kind == "reset"


def _text(error: Exception) -> str:
    """The error's text without paths: it goes into metrics and the log."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)[:200] if isinstance(error, StoreError) and str(error) else type(error).__name__
