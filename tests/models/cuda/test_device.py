"""What is asked of CUDA around a capture, seen without one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from troupellm.models.cuda.device import CudaDevice


class Recorded:
    """A CUDA whose every call is written down, with free memory that a capture takes 100 bytes of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.free = 1000
        told = self

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                told.calls.append(("begin", pool, capture_error_mode))

            def capture_end(self) -> None:
                told.free -= 100
                told.calls.append("end")

            def replay(self) -> None:
                told.calls.append("replay")

        @contextmanager
        def stream(found: object) -> Iterator[None]:
            self.calls.append(("on", found))
            yield
            self.calls.append("off")

        for name, value in {
            "current_device": lambda: 0,
            "CUDAGraph": Graph,
            "Stream": lambda device: "a stream",
            "stream": stream,
            "synchronize": lambda device: self.calls.append("synchronize"),
            "empty_cache": lambda: self.calls.append("empty"),
            "graph_pool_handle": lambda: "a pool",
            "mem_get_info": lambda device: (self.free, 4000),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


CAPTURE = [("on", "a stream"), ("begin", "a pool", "thread_local"), "body", "end", "off"]


def test_cached_memory_is_given_back_before_the_first_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Recorded(monkeypatch)
    device = CudaDevice()
    for _ in range(2):
        graph = device.capture(lambda: cuda.calls.append("body"))
    assert cuda.calls == ["synchronize", "empty", *CAPTURE, "synchronize", *CAPTURE]
    assert device.graph_bytes == 200
    graph.replay()
    assert cuda.calls[-1] == "replay"
    device.forget_graphs()
    assert device.graph_bytes == 0
    device.capture(lambda: None)
    assert cuda.calls.count("empty") == 2


def test_a_capture_ends_where_its_body_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Recorded(monkeypatch)

    def body() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        CudaDevice().capture(body)
    assert cuda.calls[-1] == "end"
