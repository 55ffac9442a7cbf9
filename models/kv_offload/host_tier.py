"""The host tier: one thread that copies blocks between the device and the host buffer, in the order of submission."""

from collections import deque
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

from troupellm.models.kv_offload.block_copy import BlockMover, Move
from troupellm.models.kv_offload.block_format import checksum
from troupellm.models.kv_offload.host_memory import HostBuffer
from troupellm.models.kv_offload.operations import Operation, Operations, Stage
from troupellm.protocol.config.kv_offload import HOST_TIER
from troupellm.protocol.messages.kv_transfers import BlockTransfer, TierReport

MOST_WAITING = 4096
"""Copies that may wait for their turn; the scheduler's credits are far below."""
BATCH = 16
"""Number of copies before the thread looks at new requests."""


@dataclass(slots=True)
class _Job:
    operation: Operation
    asked: BlockTransfer
    begun: Any
    """Result of `begin_stores`; the same object for stores that were begun together."""
    index: int


class HostTier:
    """Stores and loads. A place's checksum is made when it is written and compared when it is read: memory that lasts
    for days is read back by requests of others, and checking costs little beside copying."""

    def __init__(self, mover: BlockMover, host_buffer: HostBuffer, operations: Operations) -> None:
        self._mover: BlockMover | None = mover
        self._host_buffer, self._operations = host_buffer, operations
        self._jobs: deque[_Job] = deque()
        self._work = Condition(operations.lock)
        self._busy = False
        self._closing = False
        self._corrupt = self._refused = self._failed = 0
        self._thread = Thread(target=self._run, name="troupellm-kv-host", daemon=True)
        self._thread.start()

    def submit_stores(self, stores: list[BlockTransfer]) -> None:
        """Before anything of the plan is written."""
        assert self._mover is not None
        begun = self._mover.begin_stores([asked.block for asked in stores])
        self._submit(stores, begun)

    def submit_loads(self, loads: list[BlockTransfer]) -> None:
        self._submit(loads, None)

    @property
    def is_storing(self) -> bool:
        """Some store is still to read its block."""
        return self._mover is not None and self._mover.is_storing

    def settle(self, blocks: set[int] | None) -> None:
        """See `BlockMover.settle`."""
        if self._mover is not None:
            self._mover.settle(blocks)

    def room(self) -> int:
        """The number of transfers that can still be submitted."""
        return MOST_WAITING - len(self._jobs)

    def refuse(self, asked: BlockTransfer) -> None:
        operation = Operation(asked)
        self._operations.add(operation)
        with self._operations.lock:
            self._refused += 1
            self._operations.answer(operation, error="busy")

    def report(self) -> TierReport:
        return TierReport(
            tier=HOST_TIER,
            corrupt=self._corrupt,
            refused=self._refused,
            failed=self._failed,
            capacity_bytes=self._host_buffer.places * self._host_buffer.block_bytes,
        )

    def rest(self) -> None:
        """Give up waiting operations, wait for the running ones, and let go of the cache."""
        with self._operations.lock:
            for job in self._jobs:
                self._operations.answer(job.operation, error="cancelled")
            self._work.notify_all()
            self._work.wait_for(lambda: not self._busy and not self._jobs)
        self._mover = None

    def attach(self, mover: BlockMover) -> None:
        """Go on with a new cache, after `rest`."""
        self._mover = mover

    def close(self) -> None:
        """Join the thread. Waiting operations are given up."""
        self.rest()
        with self._operations.lock:
            self._closing = True
            self._work.notify_all()
        self._thread.join()

    def _submit(self, transfers: list[BlockTransfer], begun: Any) -> None:
        jobs = [_Job(Operation(asked), asked, begun, index) for index, asked in enumerate(transfers)]
        for job in jobs:
            self._operations.add(job.operation)
        with self._operations.lock:
            self._jobs += jobs
            self._work.notify_all()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            kept = self._checked(batch)
            error = ""
            try:
                self._move(kept)
            except Exception as problem:  # on any error the step goes on without these blocks
                error = str(problem) or type(problem).__name__
            with self._operations.lock:
                self._busy = False
                self._failed += len(kept) if error else 0
                for job in kept:
                    self._operations.answer(job.operation, ok=not error, error=error, together=len(batch))
                for job in batch:
                    job.begun = None  # an idle thread keeps no copies alive
                self._work.notify_all()

    def _next(self) -> list[_Job] | None:
        """Copies of one kind, from the same plan; those that were given up meanwhile are let go of."""
        with self._operations.lock:
            while True:
                self._work.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return None
                batch: list[_Job] = []
                while self._jobs and len(batch) < BATCH and (not batch or _together(batch[0], self._jobs[0])):
                    job = self._jobs.popleft()
                    if job.operation.stage is Stage.WAITING:
                        job.operation.stage = Stage.LANDING
                        job.operation.take()
                        batch.append(job)
                        continue
                    job.begun = None
                    if job.asked.kind == "store" and self._mover is not None:
                        self._mover.forget(job.asked.block)
                if batch:
                    self._busy = True
                    return batch
                self._work.notify_all()

    def _checked(self, batch: list[_Job]) -> list[_Job]:
        """Without loads of blocks whose content is not the stored one."""
        if batch[0].asked.kind == "store":
            return batch
        sound = [
            self._host_buffer.checksums[job.asked.place] == checksum(self._host_buffer[job.asked.place].data)
            for job in batch
        ]
        with self._operations.lock:
            for job, is_sound in zip(batch, sound, strict=True):
                if not is_sound:
                    self._corrupt += 1
                    self._operations.answer(job.operation, error="corrupt")
        return [job for job, is_sound in zip(batch, sound, strict=True) if is_sound]

    def _move(self, batch: list[_Job]) -> None:
        if not batch:
            return
        assert self._mover is not None
        moves = [Move(job.index, job.asked.block, job.asked.place) for job in batch]
        if batch[0].asked.kind == "load":
            self._mover.load(moves)
            return
        self._mover.store(batch[0].begun, moves)
        for job in batch:
            self._host_buffer.checksums[job.asked.place] = checksum(self._host_buffer[job.asked.place].data)


def _together(first: _Job, other: _Job) -> bool:
    return first.asked.kind == other.asked.kind and first.begun is other.begun
