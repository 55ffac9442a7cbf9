"""A GPU that is a CPU."""

import pytest

from troupellm.models.gpu import placement
from troupellm.models.gpu.device import CpuDevice, CpuEvent, Event
from troupellm.models.gpu.runner import CudaRunner
from troupellm.tests.support.gpu.tensor_attention import plan_tensors

MEMORY = 2 * 2**30


class LateEvent(CpuEvent):
    """Has happened once it has been waited for."""

    happened = False

    def wait(self) -> None:
        self.happened = True


class PretendedGpu(CpuDevice):
    """Says how much memory it has, and that what was launched is not done yet."""

    def record(self) -> Event:
        return LateEvent()

    def memory(self) -> tuple[int, int]:
        return MEMORY - 2**28, MEMORY


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...] | None = None) -> None:
    """Workers find one from now on. sizes: of its graphs; None: its attention is such that it has none."""
    monkeypatch.setattr("troupellm.models.worker.loader.find_device", lambda wanted: PretendedGpu())
    monkeypatch.setattr(placement, "host_planner", lambda planner: plan_tensors)
    measured = placement.GpuPlace.measured
    monkeypatch.setattr(
        placement.GpuPlace,
        "measured",
        lambda self, budget, decoder, dtype, **more: measured(
            self, budget, decoder, dtype, lambda: None, lambda: 0, **more
        ),
    )
    if sizes is not None:
        monkeypatch.setattr(
            placement, "CudaRunner", lambda *args, **more: CudaRunner(*args, **{**more, "capture_sizes": sizes})
        )
