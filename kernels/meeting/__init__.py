"""Ranks of one model that meet in shared memory: sums, what the leader tells, and parts of the logits (meeting.h).

The memory has no name in a file system: the leader makes it (`memfd_create`), and the other processes open it by the
leader's number and descriptor. It goes with the last of them, also after SIGKILL, and no limit of /dev/shm applies.
"""

import functools
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels import cpp
from troupellm.kernels.cpp.checks import check, require

MOST_RANKS = 64
CAPACITY = 2**18
"""Numbers of one buffer. Longer data go through it in pieces."""
JOIN_SECONDS = 30.0
_MAGIC = 0x74726F7570650001
_HEAD, _SEAT = 4096, 128
_LOOK_SECONDS = 0.005
_RANK, _TIMEOUT, _OPERATIONS, _LOST, _LATE = 2, 6, 7, 8, 9
"""Places in the numbers of a `Meeting` of meeting.h."""


class RankLost(RuntimeError):
    """Another rank has ended, or did not come in time."""


class SumOfRanks(Protocol):
    """Adds up what every rank has of a product's outputs."""

    @property
    def pointer(self) -> int:
        """The address of the `Meeting` that compiled code sums by; 0: it cannot."""

    def sum_(self, x: Tensor) -> None:
        """x [rows, width], contiguous: the sum of that of all ranks, the same bits on each of them.

        Raises:
            RankLost: a rank has ended.
        """

    def check(self) -> None:
        """Behind compiled code that may have summed.

        Raises:
            RankLost: a rank has ended meanwhile.
        """


@dataclass(frozen=True, slots=True)
class Functions:
    add: cpp.Function
    tell: cpp.Function
    listen: cpp.Function
    hear: cpp.Function
    gather: cpp.Function


class Meeting:
    """One rank's place in the shared memory. Calls come from one thread. All ranks make the same calls in the same
    order, `tell` of the leader and `hear` of the others being one call."""

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int, timeout: float, descriptor: int) -> None:
        """
        Args:
            memory: of `_size(ranks)` bytes; the meeting owns it.
            timeout: seconds of one wait; 0 is none.
            descriptor: of the memory; the meeting owns it.
        """
        functions = load()
        assert functions is not None
        require(2 <= ranks <= MOST_RANKS and 0 <= rank < ranks, f"rank {rank} of {ranks}")
        require(len(memory) >= _size(ranks), f"{len(memory)} bytes for {ranks} ranks, not {_size(ranks)}")
        self.rank, self.ranks, self.descriptor = rank, ranks, descriptor
        self._functions, self._memory = functions, memory
        self._bytes = np.frombuffer(memory, dtype=np.uint8)
        begin = self._bytes.ctypes.data
        self._pids = np.frombuffer(memory, dtype=np.int64, count=ranks, offset=_PIDS)
        self._processes = np.full(ranks, -1, dtype=np.int64)
        self._numbers = np.array(
            [
                begin + _HEAD,
                begin + _HEAD + _SEAT * MOST_RANKS,
                rank,
                ranks,
                CAPACITY,
                self._processes.ctypes.data,
                round(1000 * timeout),
                0,
                -1,
                0,
            ],
            dtype=np.int64,
        )
        self.pointer: int = self._numbers.ctypes.data
        self._closed = False

    def join(self, seconds: float = JOIN_SECONDS) -> None:
        """Say that this rank is there, and wait for the others.

        Raises:
            RankLost: some have not come in time.
        """
        self._pids[self.rank] = os.getpid()
        until = time.monotonic() + seconds
        while not self._pids.all():
            if time.monotonic() > until:
                missing = ", ".join(map(str, np.flatnonzero(self._pids == 0).tolist()))
                raise RankLost(f"rank {missing} of {self.ranks} has not come to the shared memory within {seconds:g} s")
            time.sleep(_LOOK_SECONDS)
        for rank, pid in enumerate(self._pids.tolist()):
            if rank != self.rank:
                try:
                    self._processes[rank] = os.pidfd_open(pid)
                except ProcessLookupError:
                    raise RankLost(f"rank {rank} has ended") from None

    def meet(self) -> None:
        """Wait until all ranks call this, however long that takes.

        Raises:
            RankLost: a rank has ended.
        """
        timeout, self._numbers[_TIMEOUT] = int(self._numbers[_TIMEOUT]), 0
        self.sum_(torch.zeros(1, dtype=torch.float32))
        self._numbers[_TIMEOUT] = timeout

    def sum_(self, x: Tensor) -> None:
        """As `SumOfRanks`; numbers of other types than float32 are added up in float32."""
        require(x.is_contiguous() and x.is_cpu, "a sum of ranks needs contiguous numbers on the CPU")
        wide = x if x.dtype == torch.float32 else x.float()
        self._functions.add(self.pointer, wide.data_ptr(), wide.numel())
        self.check()
        if wide is not x:
            x.copy_(wide)

    def check(self) -> None:
        """As `SumOfRanks`."""
        rank = int(self._numbers[_LOST])
        if rank < 0:
            return
        if self._numbers[_LATE]:
            raise RankLost(f"rank {rank} has not come to a sum within {self._numbers[_TIMEOUT] / 1000:g} s")
        raise RankLost(f"rank {rank} has ended")

    def tell(self, data: bytes) -> None:
        """Of the leader, to all others.

        Raises:
            RankLost: a rank has ended.
        """
        held = np.frombuffer(data, dtype=np.uint8)
        self._functions.tell(self.pointer, held.ctypes.data, held.size)
        self.check()

    def hear(self, seconds: float) -> bytes | None:
        """The leader's next bytes; None if there are none within so many seconds.

        Raises:
            RankLost: a rank has ended.
        """
        size = np.zeros(1, dtype=np.int64)
        self._functions.listen(self.pointer, round(1000 * seconds), size.ctypes.data)
        self.check()
        if size[0] < 0:
            return None
        data = np.empty(int(size[0]), dtype=np.uint8)
        self._functions.hear(self.pointer, data.ctypes.data, data.size)
        self.check()
        return data.tobytes()

    def gather(self, part: Tensor, widths: Sequence[int], out: Tensor | None) -> None:
        """Parts of rows, beside each other at the leader.

        Args:
            part: float32 [rows, width of this rank], contiguous.
            widths: of all ranks.
            out: the leader's, float32 [rows, sum of widths], contiguous.

        Raises:
            RankLost: a rank has ended.
        """
        rows = part.shape[0]
        require(len(widths) == self.ranks, f"{len(widths)} widths of {self.ranks} ranks")
        check("part", part, torch.float32, rows, widths[self.rank])
        if out is not None:
            check("out", out, torch.float32, rows, sum(widths))
        given = np.array(widths, dtype=np.int64)
        self._functions.gather(
            self.pointer, part.data_ptr(), rows, given.ctypes.data, None if out is None else out.data_ptr()
        )
        self.check()

    def close(self) -> None:
        """Give the descriptors back; the memory goes with the last reference. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for descriptor in (*self._processes[self._processes >= 0].tolist(), self.descriptor):
            with suppress(OSError):
                os.close(descriptor)


_PIDS = 64


def _size(ranks: int) -> int:
    return _HEAD + _SEAT * MOST_RANKS + 2 * 4 * CAPACITY * ranks


def available() -> bool:
    """True if ranks can meet in shared memory here: compiled code, on Linux."""
    return _system_supports() and load() is not None


@functools.cache
def _system_supports() -> bool:
    """Some containers refuse these calls to the system."""
    try:
        for descriptor in (os.memfd_create("troupellm-ranks", os.MFD_CLOEXEC), os.pidfd_open(os.getpid())):
            os.close(descriptor)
    except (AttributeError, OSError):
        return False
    return True


def make(ranks: int, timeout: float) -> Meeting:
    """The leader's place in new memory; `join` waits for the others."""
    descriptor = os.memfd_create("troupellm-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _size(ranks))
    memory = mmap.mmap(descriptor, _size(ranks))
    memory[:16] = np.array([_MAGIC, ranks], dtype=np.int64).tobytes()
    return Meeting(memory, 0, ranks, timeout, descriptor)


def address(meeting: Meeting) -> str:
    """By which the other ranks open the memory, as long as the leader lives."""
    return f"/proc/{os.getpid()}/fd/{meeting.descriptor}"


def enter(address: str, rank: int, ranks: int, timeout: float) -> Meeting:
    """Another rank's place.

    Raises:
        RankLost: the leader's memory is not there, or not of as many ranks.
    """
    try:
        descriptor = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        memory = mmap.mmap(descriptor, _size(ranks))
    except (OSError, ValueError) as error:
        raise RankLost(f"rank {rank} cannot open the leader's memory at {address}: {error}") from error
    found = np.frombuffer(memory[:16], dtype=np.int64).tolist()
    if found != [_MAGIC, ranks]:
        raise RankLost(f"the memory at {address} is not that of {ranks} ranks of this version")
    return Meeting(memory, rank, ranks, timeout, descriptor)


@functools.cache
def load() -> Functions | None:
    """The compiled functions, or None where they are not there."""
    library = cpp.load()
    if library is None:
        return None
    return Functions(
        library.function("meeting_add", "ppi"),
        library.function("meeting_tell", "ppi"),
        library.function("meeting_listen", "pip"),
        library.function("meeting_hear", "ppi"),
        library.function("meeting_gather", "ppipp"),
    )
