"""Workers on a GPU that is not there, with a host that is.

The device's tensors are torch's fake ones: they have shapes, strides and a device, and operations that mix devices
raise.
Only whole numbers keep their values there, as long as torch computes them, for the host plans some attention by them.
Other numbers are zeros in copies on the host. Kernels of Triton are written down and not launched.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from troupellm.models.gpu import placement as place
from troupellm.models.gpu.device import CpuDevice, Event
from troupellm.models.worker.worker import ModelWorker
from troupellm.tests.support.gpu.device_border import CPU, Border, Python, of_host
from troupellm.tests.support.gpu.faked_gpu import CUDA, MULTIPROCESSORS, Launch
from troupellm.tests.support.gpu.pretended_gpu import LateEvent

MEMORY = 2 * 2**30


class Gpu(CpuDevice):
    """The device, and what was asked of it.

    Attributes:
        launches: of Triton's kernels.
        waits: operators for which the host has waited.
    """

    torch_device = CUDA

    def __init__(self) -> None:
        self.launches = list[Launch]()
        self.waits = list[str]()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned = set[int]()
        self._thread, self._free = threading.local(), threading.Lock()

    def pinned(self, size: int) -> Tensor:
        return self.pin(torch.zeros(size, dtype=torch.int64))

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self._pinned.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._pinned.remove(address)
        return 0

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def record(self) -> Event:
        return LateEvent()

    def memory(self) -> tuple[int, int]:
        return MEMORY - 2**28, MEMORY

    @contextmanager
    def used(self) -> Iterator[None]:
        """On this thread tensors may be there."""
        if getattr(self._thread, "inside", False):
            yield
            return
        self._thread.inside = True
        try:
            with self._free, self.mode, Border(self), Python(self):  # a mode serves one thread at a time
                yield
        finally:
            self._thread.inside = False


class Chance(torch.Generator):
    """The device's generator, whose numbers are not seen."""

    def __new__(cls, device: Any = CPU) -> Self:
        return super().__new__(cls)


class Mark:
    """An event or a stream: nothing is ever late."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


CALLS = ("load", "launch", "complete", "collect", "idle", "command", "reset", "close")


def absent_gpu_worker(patch: pytest.MonkeyPatch) -> Gpu:
    """Workers find the device that is given from now on."""
    from triton.runtime.jit import JITFunction

    gpu = Gpu()

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        for value in arguments:
            if of_host(value):
                raise ValueError(f"{self.__name__} was given a tensor of the host")
        gpu.launches.append(Launch(self, grid, arguments, options))

    patch.setattr(JITFunction, "run", run)
    patch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    )
    patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    patch.setattr(torch.cuda, "cudart", lambda: gpu)
    patch.setattr("troupellm.models.worker.loader.find_device", lambda wanted: gpu)
    measured = place.GpuPlace.measured
    patch.setattr(
        place.GpuPlace,
        "measured",
        lambda self, budget, decoder, dtype, **more: measured(
            self, budget, decoder, dtype, lambda: None, lambda: 0, **more
        ),
    )
    patch.setattr(torch, "Generator", Chance)
    patch.setattr("troupellm.kernels.paged_attention.row_by_row._flex_attention", lambda compiled: _flex)
    for name in ("Event", "Stream"):
        patch.setattr(torch.cuda, name, Mark)
    patch.setattr(torch.cuda, "current_stream", Mark)
    patch.setattr(torch.cuda, "stream", lambda stream: gpu.used())
    for name in CALLS:
        patch.setattr(ModelWorker, name, _inside(gpu, getattr(ModelWorker, name)))
    return gpu


def _flex(query: Tensor, keys: Tensor, values: Tensor, *, score_mod: Any, scale: float, enable_gqa: bool) -> Tensor:
    """Flex attention's definition: compiling it would need the device."""
    assert enable_gqa == (query.shape[1] != keys.shape[1])
    keys, values = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (keys, values))
    scores = query @ keys.transpose(2, 3) * scale
    places = (torch.arange(size, device=query.device) for size in scores.shape)
    index = [place.view([-1 if at == dim else 1 for at in range(4)]) for dim, place in enumerate(places)]
    return score_mod(scores, *index).softmax(-1).to(values.dtype) @ values  # type: ignore[no-any-return]


def _inside(gpu: Gpu, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        with gpu.used():
            return call(*args, **kwargs)

    return called
