"""What a runner needs of a device beside tensors: memory that it copies from, events, graphs.

`CudaDevice` is the real one. `CpuDevice` runs the same code eagerly, so that all but the device itself is tested on
machines without one: its graphs call what they captured again, its events have happened when they are recorded.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Event(ABC):
    """A place in the device's order of work."""

    @abstractmethod
    def wait(self) -> None:
        """Sleep until the device is there; other threads run meanwhile."""


class Graph(ABC):
    """Launches that were recorded once, over memory that stays where it is."""

    @abstractmethod
    def replay(self) -> None:
        """Launch all of them again."""


class Device(ABC):
    """One device and the one order in which it works."""

    torch_device: torch.device

    @abstractmethod
    def pinned(self, size: int) -> Tensor:
        """int64 [size] on the host, that copies from and to the device need not wait for. Slow."""

    @abstractmethod
    def record(self) -> Event:
        """The place behind all that was launched so far."""

    @abstractmethod
    def capture(self, body: Callable[[], None]) -> Graph:
        """What `body` launches, without running it. All graphs share one pool of memory: what one leaves in it lasts
        until the next one runs.

        Args:
            body: has been run before, so that nothing is compiled or set up in it.
        """

    @abstractmethod
    def forget_graphs(self) -> None:
        """The memory of all graphs may be used again; none of them is replayed any more."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all that there are."""


class CudaEvent(Event):
    """A CUDA event that blocks: waiting for it takes no processor, which `torch.Event` would."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class CudaGraph(Graph):
    """A CUDA graph."""

    def __init__(self, body: Callable[[], None], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (guides, the lifeline) may call CUDA meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            body()

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice(Device):
    """The current GPU and its current stream."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._pool: Any = None

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=True)

    def record(self) -> Event:
        return CudaEvent()

    def capture(self, body: Callable[[], None]) -> Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return CudaGraph(body, self._pool)

    def forget_graphs(self) -> None:
        self._pool = None

    def memory(self) -> tuple[int, int]:
        torch.cuda.empty_cache()  # what torch keeps of what was given back is free, too
        return torch.cuda.mem_get_info(self.torch_device)


class CpuEvent(Event):
    """Has happened."""

    def wait(self) -> None:
        pass


class CpuGraph(Graph):
    """Calls its body."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body

    def replay(self) -> None:
        self._body()


class CpuDevice(Device):
    """The same without a GPU."""

    torch_device = torch.device("cpu")

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64)

    def record(self) -> Event:
        return CpuEvent()

    def capture(self, body: Callable[[], None]) -> Graph:
        return CpuGraph(body)

    def forget_graphs(self) -> None:
        pass

    def memory(self) -> tuple[int, int]:
        raise NotImplementedError("a CPU's memory is planned by models.memory")
