"""Ranks that meet over TCP by gloo, torch's own collectives: where there is no compiled code, or no shared memory.

The group is an object of its own. Torch's global process group is left to the host program.
"""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, ProcessGroupGloo, TCPStore, Work

from troupellm.kernels.meeting import JOIN_SECONDS, RankLost

SCHEME = "tcp://"
LOOPBACK = "127.0.0.1"
LONG = timedelta(days=20)
"""As long as gloo can wait: the leader tells nothing while no request comes."""
_PARTS = 1
"""Tag of messages with parts of rows."""


class GlooRanks:
    """Implements `Ranks`."""

    pointer = 0

    def __init__(self, store: TCPStore, number: int, size: int, timeout: float) -> None:
        """timeout: seconds of one collective; 0 is none."""
        self.number, self.size, self._store = number, size, store
        self._timeout = timedelta(seconds=timeout) if timeout else LONG
        self._group: Any = None

    @classmethod
    def lead(cls, size: int, timeout: float) -> tuple["GlooRanks", str]:
        """The leader's, and the address by which others find it."""
        wait = timedelta(seconds=JOIN_SECONDS)
        listener = socket.create_server((LOOPBACK, 0))  # the store's own would listen on all interfaces
        port, descriptor = listener.getsockname()[1], listener.detach()
        store = TCPStore(
            LOOPBACK,
            port,
            size,
            is_master=True,
            timeout=wait,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        return cls(store, 0, size, timeout), f"{SCHEME}{LOOPBACK}:{store.port}"

    @classmethod
    def follow(cls, address: str, number: int, size: int, timeout: float) -> "GlooRanks":
        """Another rank's.

        Raises:
            RankLost: the leader is not there.
        """
        host, _, port = address.removeprefix(SCHEME).rpartition(":")
        wait = timedelta(seconds=JOIN_SECONDS)
        try:
            store = TCPStore(host, int(port), size, is_master=False, timeout=wait, wait_for_workers=False)
        except RuntimeError as error:
            raise RankLost(f"rank {number} does not reach the leader at {host}:{port}: {error}") from error
        return cls(store, number, size, timeout)

    def join(self) -> None:
        """As `Ranks.join`, within JOIN_SECONDS."""
        gloo: Any = ProcessGroupGloo  # which torch describes in part
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=JOIN_SECONDS)
        try:
            self._group = gloo(self._store, self.number, self.size, options)
        except RuntimeError as error:
            text = f"rank {self.number} has not met all {self.size} ranks at {LOOPBACK} within {JOIN_SECONDS:g} s"
            raise RankLost(f"{text}: {error}") from error

    def meet(self) -> None:
        """As `Ranks.meet`."""
        self._sum(torch.zeros(1, dtype=torch.float32), LONG)

    def sum_(self, x: Tensor) -> None:
        """As `SumOfRanks`; numbers of other types than float32 are added up in float32."""
        wide = x if x.dtype == torch.float32 else x.float()
        self._sum(wide, self._timeout)
        if wide is not x:
            x.copy_(wide)

    def check(self) -> None:
        """Nothing sums but `sum_`."""

    def tell(self, data: bytes) -> None:
        """As `Ranks.tell`."""
        self._broadcast(torch.tensor([len(data)], dtype=torch.int64))
        self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def hear(self) -> bytes:
        """As `Ranks.hear`."""
        size = torch.empty(1, dtype=torch.int64)
        self._broadcast(size)
        data = torch.empty(int(size[0]), dtype=torch.uint8)
        self._broadcast(data)
        return data.numpy().tobytes()

    def gather(self, part: Tensor, widths: Sequence[int], out: Tensor | None) -> None:
        """As `Ranks.gather`."""
        if out is None:
            self._finish(self._open.send([part], 0, _PARTS), self._timeout)
            return
        columns = torch.split(out, list(widths), dim=1)
        columns[0].copy_(part)
        for rank in range(1, self.size):
            found = torch.empty(columns[rank].shape, dtype=torch.float32)
            self._finish(self._open.recv([found], rank, _PARTS), self._timeout)
            columns[rank].copy_(found)

    def close(self) -> None:
        """As `Ranks.close`."""
        self._group = None

    @property
    def _open(self) -> Any:
        assert self._group is not None, "the ranks have not joined"
        return self._group

    def _sum(self, x: Tensor, timeout: timedelta) -> None:
        options = AllreduceOptions()
        options.timeout = timeout
        self._finish(self._open.allreduce([x], options))

    def _broadcast(self, data: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, LONG
        self._finish(self._open.broadcast([data], options))

    def _finish(self, work: Work, timeout: timedelta | None = None) -> None:
        """
        Args:
            timeout: of an operation that has none yet.

        Raises:
            RankLost: a rank has ended, or did not come in time.
        """
        try:
            work.wait() if timeout is None else work.wait(timeout)
        except RuntimeError as error:
            raise RankLost(f"another rank has ended or did not come in time: {error}") from error
