"""The calls to CUDA around a capture, seen without one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from troupellm.models.gpu import device
from troupellm.models.gpu.device import CudaDevice, empty_cache
from troupellm.models.kv_offload.gpu_mover import CudaMover
from troupellm.models.kv_offload.host_memory import HostBuffer


class Recorded:
    """A CUDA whose every call is written down, with free memory that a capture takes 100 bytes of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.free = 1000
        self.unlocked = list[str]()
        """Calls that another engine's capture may lie between."""
        self.damage: Exception | None = None
        """That comes of ending a capture."""
        told = self

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                told.calls.append(("begin", pool, capture_error_mode))

            def capture_end(self) -> None:
                told.free -= 100
                told.calls.append("end")
                if told.damage is not None:
                    raise told.damage

            def replay(self) -> None:
                told.calls.append("replay")

        @contextmanager
        def stream(found: object) -> Iterator[None]:
            self.calls.append(("on", found))
            yield
            self.calls.append("off")

        for name, value in {
            "current_device": lambda: 0,
            "is_initialized": lambda: True,
            "CUDAGraph": Graph,
            "Stream": lambda device, priority=0: f"a stream of priority {priority}",
            "stream": stream,
            "synchronize": lambda device: self.note("synchronize"),
            "empty_cache": lambda: self.note("empty"),
            "graph_pool_handle": lambda: "a pool",
            "mem_get_info": lambda device: (self.free, 4000),
            "current_blas_handle": lambda: self.calls.append("cuBLAS"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def note(self, call: str) -> None:
        self.calls.append(call)
        if not device._CAPTURING.locked():
            self.unlocked.append(call)


WORKSPACE = [("on", "a stream of priority -1"), "cuBLAS", "off"]
CAPTURE = [("on", "a stream of priority -1"), ("begin", "a pool", "thread_local"), "body", "end", "off"]


def test_cached_memory_is_given_back_before_the_first_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Recorded(monkeypatch)
    gpu = CudaDevice()
    for _ in range(2):
        graph = gpu.capture(lambda: cuda.calls.append("body"))
    assert cuda.calls == ["synchronize", *WORKSPACE, "empty", *CAPTURE, "synchronize", *CAPTURE]
    assert gpu.graph_bytes == 200
    graph.replay()
    assert cuda.calls[-1] == "replay"
    gpu.forget_graphs()
    assert gpu.graph_bytes == 0
    gpu.capture(lambda: None)
    assert cuda.calls.count("empty") == 2


def test_no_block_is_moved_on_the_stream_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though torch, which has 32 streams of each priority, lends one of them to many; here it has but one."""
    cuda = Recorded(monkeypatch)
    CudaDevice().capture(lambda: None)
    cache: Any = SimpleNamespace(storages=[], storage=SimpleNamespace(device=torch.device("cuda", 0)))
    mover = CudaMover(cache, HostBuffer(1, 1))
    assert ("on", mover._stream) not in cuda.calls


def test_no_other_engine_captures_while_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Recorded(monkeypatch)
    gpu = CudaDevice()
    gpu.capture(lambda: None)
    assert gpu.memory() == (900, 4000)
    empty_cache()
    assert cuda.calls.count("empty") == 3
    assert not cuda.unlocked


def test_want_of_memory_for_what_was_recorded_is_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the body has found none either."""
    cuda = Recorded(monkeypatch)
    cuda.damage = torch.AcceleratorError("CUDA error: out of memory")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        CudaDevice().capture(lambda: None)
    assert caught.value.__cause__ is cuda.damage
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        CudaDevice().capture(raising(torch.OutOfMemoryError("none left")))
    cuda.damage = torch.AcceleratorError("CUDA error: operation not permitted")
    with pytest.raises(torch.AcceleratorError, match="not permitted"):
        CudaDevice().capture(lambda: None)


@pytest.mark.parametrize("damage", [None, RuntimeError("the capture was invalidated")])
def test_a_capture_ends_where_its_body_fails(damage: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error is reported, even if ending the capture fails too."""
    cuda = Recorded(monkeypatch)
    cuda.damage = damage
    with pytest.raises(ValueError, match="a wrong shape") as caught:
        CudaDevice().capture(raising(ValueError("a wrong shape")))
    assert cuda.calls[-1] == "end"
    notes = [f"its capture could not be ended: {damage}"] if damage is not None else []
    assert getattr(caught.value, "__notes__", []) == notes


def test_want_of_memory_is_nothing_worse_only_where_the_capture_could_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Recorded(monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        CudaDevice().capture(raising(torch.OutOfMemoryError("none left")))
    cuda.damage = RuntimeError("the capture was invalidated")
    with pytest.raises(RuntimeError, match="could not be ended") as caught:
        CudaDevice().capture(raising(torch.OutOfMemoryError("none left")))
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def raising(error: Exception) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body
