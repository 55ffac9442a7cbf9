"""The rank processes of one model: all load, any death is the group's, and the cause is the rank that ended first."""

import signal
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from troupellm.actors.worker.process_host import ProcessWorker
from troupellm.actors.worker.rank_group import RankGroup
from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.kernels.meeting import RankLost
from troupellm.models.worker import main
from troupellm.models.worker.main import failed
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import StepPlan
from troupellm.protocol.wire.worker import RANK_LOST, Failed, Launch, Leading, Load, RankPlace
from troupellm.tests.support.workers.fake_processes import READY, FakeChild, FakeProcesses

pytestmark = pytest.mark.anyio
PLAN = StepPlan(step=1, engine_epoch=0, rows=(), epochs=(), starts=(), counts=())
LOST = Failed(kind="RankLost", message="a rank has ended")


def host(processes: FakeProcesses, size: int = 3) -> ProcessWorker:
    config = EngineConfig.from_flat({"tensor_parallel_size": size})
    return ProcessWorker("module:worker", config, processes, lambda _: None, spare=False)  # type: ignore[arg-type]


async def started(size: int = 3) -> tuple[ProcessWorker, list[FakeChild], Any]:
    """A group that has loaded, where the fake leader has said where it is met."""
    processes = FakeProcesses()
    worker = host(processes, size)
    await worker.prepare()
    for child in processes.children[1:]:
        child.mute = True
    processes.children[0].say(Leading("there"))
    assert await worker.start() == READY
    return worker, processes.children, processes


async def test_the_others_load_where_the_leader_is_met() -> None:
    worker, children, _ = await started()
    places = [message.place for child in children for message in child.heard if isinstance(message, Load)]
    assert places == [RankPlace(number=number, size=3, address="there" if number else "") for number in range(3)]
    worker.send(PLAN)
    assert [any(isinstance(message, Launch) for message in child.heard) for child in children] == [True, False, False]
    assert worker.rank_pids == tuple(child.pid for child in children)


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_killed_rank_is_named_and_no_requests_fault(rank: int) -> None:
    worker, children, _ = await started()
    children[rank].die(-signal.SIGKILL)
    for number, child in enumerate(children):
        if number != rank:
            child.say(LOST)
            child.die(1)
    with pytest.raises(WorkerGone, match="SIGKILL") as caught:
        await worker.receive()
    assert caught.value.fault is False
    assert caught.value.message.startswith(f"rank {rank}: " if rank else "the worker process")


async def test_a_leader_that_waits_in_vain_tells_why_the_other_rank_failed() -> None:
    worker, children, _ = await started()
    children[0].say(LOST)
    children[0].die(1)
    children[2].say(Failed(kind="MemoryError", message="no memory"))
    children[2].die(1)
    with pytest.raises(MemoryError, match="no memory"):
        await worker.receive()


async def test_a_rank_that_gives_up_waiting_for_a_leader_that_is_there_tells_so() -> None:
    worker, children, _ = await started()
    children[2].say(Failed(kind="RankLost", message="rank 0 has not come to a sum within 5 s"))
    children[2].die(1)
    with pytest.raises(WorkerGone, match="^rank 2: rank 0 has not come to a sum within 5 s$"):
        await worker.receive()


def test_a_rank_says_that_it_waits_in_vain_also_while_it_loads() -> None:
    for loading in (False, True):
        said = failed(RankLost("rank 1 has ended"), loading=loading)
        assert (said.kind, said.message) == (RANK_LOST, "rank 1 has ended")


class Part:
    """A rank beside the leader that finds no memory: while it loads, or later."""

    def __init__(self, *, loads: bool) -> None:
        self._loads = loads

    def lead(self, *_: Any) -> str:
        raise AssertionError("it is no leader")

    def follow(self, *_: Any) -> Callable[[], None]:
        if not self._loads:
            self._compute()
        return self._compute

    def _compute(self) -> None:
        raise MemoryError("no memory")


class Link:
    """The parent's end: asks to load, and keeps the answers."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def receive(self, _: float | None) -> Load:
        return Load(factory="", folder="", config=EngineConfig(), place=RankPlace(number=1, size=2))

    def send(self, message: Any) -> None:
        self.answers.append(message)


@pytest.mark.parametrize(("loads", "kind"), [(False, "ModelLoadError"), (True, "MemoryError")])
def test_a_rank_that_fails_in_a_step_does_not_blame_the_model(
    monkeypatch: pytest.MonkeyPatch, loads: bool, kind: str
) -> None:
    link = Link()
    monkeypatch.setattr(main, "resolve", lambda _: lambda _: Part(loads=loads))
    assert main.Server(link).run() == main.EXIT_FAILED  # type: ignore[arg-type]
    (answer,) = link.answers
    assert answer.kind == kind


async def test_a_rank_that_cannot_load_fails_the_start() -> None:
    processes = FakeProcesses()
    worker = host(processes)
    await worker.prepare()
    for child in processes.children:
        child.mute = True
    processes.children[0].say(Leading("there"))
    processes.children[1].say(Failed(kind="ModelLoadError", message="rank 1 reads another model"))
    with pytest.raises(ModelLoadError, match="rank 1 reads another model"):
        await worker.start()


async def test_all_ranks_are_replaced_together() -> None:
    worker, children, processes = await started()
    children[1].die(-signal.SIGKILL)
    before = list(children)
    group = await successors(worker, processes)
    assert [child.code for child in before] == [-signal.SIGKILL] * 3
    assert worker.rank_pids == tuple(child.pid for child in group)


async def successors(worker: ProcessWorker, processes: FakeProcesses) -> list[FakeChild]:
    """Restart the group; the new processes."""
    await worker.prepare()
    group = processes.children[3:]
    for child in group[1:]:
        child.mute = True
    group[0].say(Leading("elsewhere"))
    await worker.restart()
    return group


class OneProcess(FakeProcesses):
    """A machine that starts one process and no more."""

    async def start(self, module: str, events: Any) -> FakeChild:
        self.exhausted = bool(self.children)
        return await super().start(module, events)


class Cancelled(FakeProcesses):
    """Its second start is cancelled."""

    async def start(self, module: str, events: Any) -> FakeChild:
        if self.children:
            raise anyio.get_cancelled_exc_class()
        return await super().start(module, events)


async def test_a_start_that_is_cancelled_leaves_no_process_behind() -> None:
    processes = Cancelled()
    with pytest.raises(anyio.get_cancelled_exc_class()):
        await RankGroup(2).open(processes)  # type: ignore[arg-type]
    assert [child.code for child in processes.children] == [-signal.SIGKILL]


async def test_a_process_that_cannot_be_started_leaves_none_behind() -> None:
    processes = OneProcess()
    with pytest.raises(WorkerGone, match="cannot be started"):
        await RankGroup(2).open(processes)  # type: ignore[arg-type]
    assert [child.code for child in processes.children] == [-signal.SIGKILL]
