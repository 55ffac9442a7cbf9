"""A GPU that is a CPU."""

import pytest

from tests.support.tensor_attention import plan_tensors
from troupellm.models.cuda import place
from troupellm.models.cuda.device import CpuDevice, CpuEvent, Event

MEMORY = 2 * 2**30


class LateEvent(CpuEvent):
    """Has happened once somebody has waited for it."""

    happened = False

    def wait(self) -> None:
        self.happened = True


class PretendedGpu(CpuDevice):
    """Says how much memory it has, and that what was launched is not done yet."""

    def record(self) -> Event:
        return LateEvent()

    def memory(self) -> tuple[int, int]:
        return MEMORY - 2**28, MEMORY


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troupellm.models.worker.find_device", lambda wanted: PretendedGpu())
    monkeypatch.setattr(place, "host_planner", lambda planner: plan_tensors)
    measured = place.GpuPlace.measured
    monkeypatch.setattr(
        place.GpuPlace, "measured",
        lambda self, budget, decoder, dtype, **more: measured(
            self, budget, decoder, dtype, lambda: None, lambda: 0, **more
        ),
    )  # fmt: skip
