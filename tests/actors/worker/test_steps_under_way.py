"""Both hosts launch a plan when it comes, also while the device is waited for; results come in order all the same."""

import socket
import threading
from typing import Any

import pytest

from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.runtime.ports import SystemClock
from troupellm.actors.runtime.restart_intensity import Intensity
from troupellm.actors.runtime.thread_pool import StepThread, ThreadPool
from troupellm.actors.worker.actor import WorkerActor
from troupellm.actors.worker.thread_host import ThreadWorker
from troupellm.models.worker import main
from troupellm.models.worker.main import EXIT_FAILED, Server
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import WorkerCrashed
from troupellm.protocol.messages.sleep import StopProfile
from troupellm.protocol.messages.worker import LaunchedStep, StepPlan
from troupellm.protocol.params.guide import GuideProgram
from troupellm.protocol.wire.frame_socket import FrameSocket
from troupellm.protocol.wire.frames import FrameError, PeerGone
from troupellm.protocol.wire.worker import (
    HELLO,
    Execute,
    Failed,
    Finished,
    FromWorker,
    GuidePrepared,
    Launch,
    Load,
    Loaded,
    PrepareGuide,
    Progress,
    ToWorker,
)
from troupellm.tests.support.engines.inside import send_together
from troupellm.tests.support.workers.hand_device import PATIENCE, HandDevice

pytestmark = pytest.mark.anyio


def plan(step: int) -> StepPlan:
    return StepPlan(step=step, engine_epoch=0, rows=(), epochs=(), starts=(), counts=())


class OnThread:
    """The worker's thread and its seat."""

    def __init__(self, device: HandDevice) -> None:
        self.thread = StepThread("step")
        self.worker_host = ThreadWorker(device, self.thread, device.ready(), None)

    async def send(self, step: int) -> None:
        self.worker_host.send(plan(step))

    async def receive(self) -> int:
        return (await self.worker_host.receive()).step

    async def close(self) -> None:
        assert await self.thread.close()


class OnLink:
    """The main loop of a worker process, on a thread, with the other end of its socket."""

    def __init__(self, device: HandDevice) -> None:
        near, far = socket.socketpair()
        self.link: FrameSocket[ToWorker, FromWorker] = FrameSocket(near, FromWorker, HELLO)
        self._pool = ThreadPool("listens", 1)
        self._serving: main.Link = FrameSocket(far, ToWorker, HELLO)
        self._server = Server(self._serving)
        self.ends: list[int | type[Exception]] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.link.greet()
        self.link.send(Load(factory="", folder="", config=EngineConfig()))
        assert isinstance(self.link.receive(PATIENCE), Progress)
        assert isinstance(self.link.receive(PATIENCE), Loaded)

    def _serve(self) -> None:
        self._serving.greet()
        try:
            self.ends.append(self._server.run())
        except FrameError as error:
            self.ends.append(type(error))

    async def send(self, step: int) -> None:
        self.link.send(Launch(plan(step)))

    async def receive(self) -> int:
        message = await self._pool.run(self.link.receive, PATIENCE)
        assert isinstance(message, Finished)
        return message.result.step

    def end(self) -> list[int | type[Exception]]:
        """How the loop ended."""
        self._thread.join(PATIENCE)
        return self.ends

    async def close(self) -> None:
        assert await self._pool.close()
        self.link.close()
        self._thread.join(PATIENCE)
        self._serving.close()
        self._server._waits.end()  # which a process leaves to its end
        self._server._guides.shutdown()
        if self._server._bell is not None:
            self._server._bell.close()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HandDevice:
    made = HandDevice()

    def resolve(factory: str) -> Any:
        return lambda folder: made

    monkeypatch.setattr(main, "resolve", resolve)
    return made


Seat = OnThread | OnLink
SEATS = pytest.mark.parametrize("sit", [OnThread, OnLink])


@SEATS
async def test_a_plan_is_launched_while_another_step_is_waited_for(device: HandDevice, sit: type[Seat]) -> None:
    worker_host, elsewhere = sit(device), ThreadPool("tests", 1)
    await worker_host.send(1)
    await elsewhere.run(device.until_waited, 1)
    await worker_host.send(2)
    await elsewhere.run(device.until_launched, 2)
    assert device.calls == ["launch 1", "launch 2"]
    device.finish(1)
    assert await worker_host.receive() == 1
    await elsewhere.run(device.until_waited, 2)
    await worker_host.send(3)
    await elsewhere.run(device.until_launched, 3)
    assert device.calls == ["launch 1", "launch 2", "collect 1", "launch 3"]
    device.finish(2, 3)
    assert [await worker_host.receive(), await worker_host.receive()] == [2, 3]
    assert len(device.threads) == len(device.waiting_threads) == 1
    assert device.threads.isdisjoint(device.waiting_threads)
    await worker_host.close()
    await elsewhere.close()


@SEATS
async def test_a_step_that_is_done_keeps_its_place_behind_one_that_is_not(device: HandDevice, sit: type[Seat]) -> None:
    device.at_once = {1, 3}
    worker_host, elsewhere = sit(device), ThreadPool("tests", 1)
    await worker_host.send(1)
    assert await worker_host.receive() == 1
    assert not device.waiting_threads
    await worker_host.send(2)
    await worker_host.send(3)
    await elsewhere.run(device.until_launched, 3)
    assert device.calls == ["launch 1", "collect 1", "launch 2", "launch 3"]
    device.finish(2)
    assert [await worker_host.receive(), await worker_host.receive()] == [2, 3]
    await worker_host.close()
    await elsewhere.close()


@SEATS
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_step_of_which_a_part_is_launched_later_is_waited_for_then(
    device: HandDevice, sit: type[Seat], at_once: bool
) -> None:
    device.late, device.at_once = {2, 3}, {2} if at_once else set()
    worker_host, elsewhere = sit(device), ThreadPool("tests", 1)
    await worker_host.send(1)
    await worker_host.send(2)
    await elsewhere.run(device.until_launched, 2)
    assert device.late == {2, 3}
    device.finish(1, 2)
    assert [await worker_host.receive(), await worker_host.receive()] == [1, 2]
    await worker_host.send(3)
    device.finish(3)
    assert await worker_host.receive() == 3
    assert device.calls == [
        "launch 1",
        "launch 2",
        "collect 1",
        "complete 2",
        "collect 2",
        "launch 3",
        "complete 3",
        "collect 3",
    ]
    await worker_host.close()
    await elsewhere.close()


async def test_a_bell_is_heard_that_rings_for_a_step_which_the_next_launch_has_completed(
    device: HandDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter that left the bell ringing would never sleep again."""
    device.late, device.at_once = {1}, {1, 2}
    worker_host, launch, heard = OnLink(device), device.launch, threading.Event()
    steps = worker_host._server._steps
    assert steps is not None
    landed = steps.landed

    def launch_and_complete(plan: StepPlan) -> LaunchedStep:
        if plan.step == 2:
            device.late.clear()
        return launch(plan)

    def note() -> None:
        landed()
        heard.set()

    monkeypatch.setattr(device, "launch", launch_and_complete)
    monkeypatch.setattr(steps, "landed", note)
    send_together(worker_host.link, Launch(plan(1)), Launch(plan(2)))
    assert [await worker_host.receive(), await worker_host.receive()] == [1, 2]
    was_heard = heard.wait(PATIENCE)
    await worker_host.close()
    assert was_heard
    assert "complete 1" not in device.calls


@SEATS
async def test_a_step_that_computes_at_its_collection_is_not_launched_ahead(
    device: HandDevice, sit: type[Seat]
) -> None:
    device.at_once = {1, 2, 3}
    worker_host = sit(device)
    for step in (1, 2, 3):
        await worker_host.send(step)
    assert [await worker_host.receive() for _ in range(3)] == [1, 2, 3]
    assert device.calls == ["launch 1", "collect 1", "launch 2", "collect 2", "launch 3", "collect 3"]
    await worker_host.close()


async def test_a_device_that_breaks_is_the_steps_failure(device: HandDevice) -> None:
    device.broken = {1}
    worker_host = OnThread(device)
    await worker_host.send(1)
    await worker_host.send(2)
    device.finish(1, 2)
    with pytest.raises(RuntimeError, match="the device is broken"):
        await worker_host.receive()
    await worker_host.thread.run(int)  # behind what the other wait has posted
    assert device.calls == ["launch 1", "launch 2", "collect 1"]
    await worker_host.worker_host.restart()
    await worker_host.send(3)
    device.finish(3)
    assert await worker_host.receive() == 3
    await worker_host.close()


async def test_a_device_that_breaks_ends_the_process(device: HandDevice) -> None:
    device.broken = {1}
    worker_host = OnLink(device)
    await worker_host.send(1)
    device.finish(1)
    message = worker_host.link.receive(PATIENCE)
    assert isinstance(message, Failed)
    assert message.message == "the device is broken"
    assert worker_host.end() == [EXIT_FAILED]
    await worker_host.close()


async def test_an_error_while_the_rest_of_a_step_is_launched_is_told(
    device: HandDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def complete(ticket: LaunchedStep) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(device, "complete", complete)
    device.late = {1}
    worker_host = OnLink(device)
    await worker_host.send(1)
    message = worker_host.link.receive(PATIENCE)
    assert isinstance(message, Failed)
    assert message.message == "out of memory"
    assert worker_host.end() == [EXIT_FAILED]
    await worker_host.close()


async def test_results_of_steps_under_way_at_a_restart_are_discarded(device: HandDevice) -> None:
    worker_host = OnThread(device)
    await worker_host.send(1)
    await worker_host.send(2)
    await worker_host.thread.run(int)
    await worker_host.worker_host.restart()
    await worker_host.send(3)
    device.finish(1, 2, 3)
    assert await worker_host.receive() == 3
    assert device.calls == ["launch 1", "launch 2", "reset", "launch 3", "collect 3"]
    await worker_host.close()


async def test_a_device_that_hangs_is_the_end(device: HandDevice) -> None:
    plans: Mailbox[Any, Any] = Mailbox("worker", 2)
    results: Mailbox[Any, Any] = Mailbox("scheduler", 2)
    worker_host = OnThread(device)
    actor = WorkerActor(plans, results, worker_host.worker_host, SystemClock(), 0.01, Intensity())
    await plans.put(plan(1))
    with pytest.raises(WorkerCrashed, match=r"longer than 0\.01 s \(step_timeout\)"):
        await actor.run()
    assert not await worker_host.thread.close(0.01)  # left behind
    device.finish(1)
    for thread in threading.enumerate():
        if thread.name.startswith("step"):
            thread.join(PATIENCE)
            assert not thread.is_alive()


async def test_guides_are_built_while_a_device_is_waited_for(device: HandDevice) -> None:
    worker_host, program = OnLink(device), GuideProgram(backend="any", text="x")
    await worker_host.send(1)
    device.until_waited(1)
    worker_host.link.send(PrepareGuide(7, program))
    assert worker_host.link.receive(PATIENCE) == GuidePrepared(7)
    assert device.guides == [program]
    device.finish(1)
    assert await worker_host.receive() == 1
    await worker_host.close()
    assert worker_host.ends == [PeerGone]


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_command_while_a_step_is_under_way_breaks_the_protocol(device: HandDevice, at_once: bool) -> None:
    device.at_once = {1} if at_once else set()
    worker_host = OnLink(device)
    send_together(worker_host.link, Launch(plan(1)), Execute(StopProfile()))
    assert worker_host.end() == [FrameError]
    device.finish(1)
    await worker_host.close()
