"""On both hosts an idle worker does its postponed work, part by part."""

import threading
from typing import Any

import pytest

from tests.actors.worker.test_steps_under_way import OnLink, OnThread
from troupellm.actors.runtime import thread_pool
from troupellm.models.worker import main
from troupellm.tests.support.workers.hand_device import PATIENCE, HandDevice

pytestmark = pytest.mark.anyio


class PuttingOff(HandDevice):
    """Its steps are done at once; `left` parts of something else are to be done."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = {0, 1}
        self.left = 0
        self.begun, self.rested, self.go_on = threading.Event(), threading.Event(), threading.Event()
        self.go_on.set()

    def idle(self) -> bool:
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        self._note("idle")
        if not self.left:
            self.rested.set()
            return False
        self.left -= 1
        return True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PuttingOff:
    made = PuttingOff()
    monkeypatch.setattr(main, "resolve", lambda factory: lambda folder: made)
    monkeypatch.setattr(main, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(thread_pool, "QUIET_SECONDS", 0.0)
    return made


@pytest.fixture(params=[OnThread, OnLink])
def worker_host(request: pytest.FixtureRequest, device: PuttingOff) -> Any:
    made = request.param(device)
    if isinstance(made, OnThread):
        made.thread.when_idle(device.idle)
    else:
        assert device.rested.wait(PATIENCE)  # behind its load
        device.rested.clear()
        device.begun.clear()
        device.calls.clear()
    return made


def parts_and_launches(device: PuttingOff) -> list[str]:
    return [call for call in device.calls if call.split()[0] in ("launch", "idle")]


async def step(worker_host: Any, number: int) -> None:
    await worker_host.send(number)
    assert await worker_host.receive() == number


async def test_all_parts_are_done_and_it_is_asked_again_after_the_next_call(
    worker_host: Any, device: PuttingOff
) -> None:
    device.left = 2
    await step(worker_host, 0)
    assert device.rested.wait(PATIENCE)
    device.rested.clear()
    await step(worker_host, 1)
    assert device.rested.wait(PATIENCE)
    await worker_host.close()
    assert parts_and_launches(device) == ["launch 0", "idle", "idle", "idle", "launch 1", "idle"]


async def test_a_call_waits_for_the_part_that_is_under_way_alone(worker_host: Any, device: PuttingOff) -> None:
    device.left = 5
    device.go_on.clear()
    await step(worker_host, 0)
    assert device.begun.wait(PATIENCE)
    await worker_host.send(1)
    device.go_on.set()
    assert await worker_host.receive() == 1
    assert device.rested.wait(PATIENCE)
    await worker_host.close()
    assert [call for call in device.calls if call.split()[0] in ("launch", "idle")][:3] == [
        "launch 0",
        "idle",
        "launch 1",
    ]
