"""A runner's interface to a device beside tensors: pinned memory, events, graphs.

`CudaDevice` is the real one. `CpuDevice` runs the same code eagerly, so that everything except the device itself is
tested on machines without one. Its graphs call the captured functions again; its events have happened when they are
recorded.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_CAPTURING = threading.Lock()
"""CUDA has one capture at a time in a process, which may have several engines, and memory is not given back in one."""


class Event(ABC):
    """A place in the device's order of work."""

    @property
    @abstractmethod
    def happened(self) -> bool:
        """True if the device has reached the event."""

    @abstractmethod
    def wait(self) -> None:
        """Sleep until the device has reached the event, on any thread; other threads run meanwhile."""


class Graph(ABC):
    """Kernel launches that were recorded once, over memory at fixed addresses."""

    @abstractmethod
    def replay(self) -> None:
        """Launch all of them again."""


class Device(ABC):
    """One device and the one order in which it works."""

    torch_device: torch.device
    graph_bytes = 0
    """Memory of the graphs that were not forgotten."""

    @abstractmethod
    def pinned(self, size: int) -> Tensor:
        """int64 [size] on the host, that copies from and to the device need not wait for. Slow."""

    @abstractmethod
    def record(self) -> Event:
        """The place behind all that was launched so far."""

    @abstractmethod
    def capture(self, body: Callable[[], None]) -> Graph:
        """Record the launches of `body` without running them. All graphs share one pool of memory: a graph's results
        last until the next graph runs.

        Args:
            body: has been run before, so that nothing is compiled or set up in it.

        Raises:
            torch.OutOfMemoryError: there is no memory for it; nothing else has changed.
            Exception: the device can no longer be used.
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

    @property
    def happened(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


@contextmanager
def memory_errors() -> Iterator[None]:
    """CUDA's own calls have no type of error for missing memory, as torch's allocator has; only the text says so.

    Raises:
        torch.OutOfMemoryError: in place of such an error.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


class CudaGraph(Graph):
    """A CUDA graph."""

    def __init__(self, body: Callable[[], None], pool: Any, stream: torch.cuda.Stream) -> None:
        """As `torch.cuda.graph`, without emptying the memory cache each time: steps between two captures would have to
        allocate it anew. stream: any but the current one, which launches steps."""
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # thread_local: other threads (guides, the lifeline) may call CUDA meanwhile.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                body()
            except Exception as error:
                self._end_after(error)
                raise
            with memory_errors():
                self._graph.capture_end()

    def _end_after(self, error: Exception) -> None:
        """Stop recording; where that fails, torch's allocator goes on as if it recorded, and little can be freed."""
        try:
            with memory_errors():
                self._graph.capture_end()
        except torch.OutOfMemoryError:
            pass  # for the graph, which is made of what was recorded behind the end of the capture
        except Exception as damage:
            error.add_note(f"its capture could not be ended: {damage}")
            if isinstance(error, torch.OutOfMemoryError):  # which is all there is to it only where the capture ended
                raise RuntimeError("a capture found no memory, and could not be ended") from error

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice(Device):
    """The current GPU and its current stream."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=True)

    def record(self) -> Event:
        return CudaEvent()

    def capture(self, body: Callable[[], None]) -> Graph:
        with _CAPTURING:
            torch.cuda.synchronize(self.torch_device)
            if self._stream is None:
                # torch lends the streams of each priority in turn, again and again. Those of a higher one move no
                # blocks meanwhile; and graphs, which keep it, come before kernels that do.
                self._stream = torch.cuda.Stream(self.torch_device, priority=-1)  # type: ignore[no-untyped-call]
                with torch.cuda.stream(self._stream):  # cuBLAS takes its workspace here, outside of the graphs' pool
                    torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
            if self._pool is None:
                torch.cuda.empty_cache()  # the pool takes memory of its own
                self._pool = torch.cuda.graph_pool_handle()
            free, _ = torch.cuda.mem_get_info(self.torch_device)  # with all that torch keeps for later captures
            graph = CudaGraph(body, self._pool, self._stream)
            self.graph_bytes += max(0, free - torch.cuda.mem_get_info(self.torch_device)[0])
        return graph

    def forget_graphs(self) -> None:
        self._pool, self.graph_bytes = None, 0

    def memory(self) -> tuple[int, int]:
        with _CAPTURING:
            torch.cuda.empty_cache()  # memory that torch has cached counts as free, too
            return torch.cuda.mem_get_info(self.torch_device)


def empty_cache() -> None:
    """Return the freed memory that torch has cached, if any."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with _CAPTURING:
            torch.cuda.empty_cache()


class CpuEvent(Event):
    """Has happened."""

    happened = True

    def wait(self) -> None:
        pass


class CpuGraph(Graph):
    """Calls its body."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body

    def replay(self) -> None:
        self._body()


class CpuDevice(Device):
    """The same interface without a GPU."""

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
