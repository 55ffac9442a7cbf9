"""The host of a worker process, with processes that only exist in the test."""

import signal
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from troupellm.actors.worker.process_host import ProcessWorker
from troupellm.actors.worker.thread_host import WorkerGone, WorkerStuck, found_no_memory
from troupellm.models.worker.main import failed
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import GraphCaptureError, InvalidRequest, ModelLoadError
from troupellm.protocol.messages.sleep import SleepWorker, StopProfile, WakeWorker, WorkerReport
from troupellm.protocol.messages.worker import LoadProgress, StepPlan, StepResult
from troupellm.protocol.wire.worker import (
    Execute,
    Executed,
    Failed,
    Finished,
    Launch,
    Load,
    Loaded,
    Progress,
    Refused,
)
from troupellm.tests.support.workers.fake_processes import READY, FakeChild, FakeProcesses

pytestmark = pytest.mark.anyio

PLAN = StepPlan(step=3, engine_epoch=0, rows=(), epochs=(), starts=(), counts=())
RESULT = StepResult(step=3, engine_epoch=0, rows=(), epochs=(), token_counts=(), tokens=())
SLEPT = WorkerReport(rss_before=9, rss_after=3)


@pytest.fixture
def processes() -> FakeProcesses:
    return FakeProcesses()


@pytest.fixture
def worker_host(processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch) -> ProcessWorker:
    monkeypatch.setattr("troupellm.actors.worker.process_host.SPARE_DELAY_SECONDS", 0.0)
    config = EngineConfig.from_flat({"hf_token": "a secret"})
    return ProcessWorker("some:Worker", config, processes, lambda progress: None, spare=True)


async def test_plans_go_out_and_results_come_back(worker_host: ProcessWorker, processes: FakeProcesses) -> None:
    await worker_host.prepare()
    assert await worker_host.start() == READY
    (child,) = processes.children
    load = child.heard[0]
    assert isinstance(load, Load)
    assert (load.factory, load.config.model.hf_token) == ("some:Worker", None)
    worker_host.send(PLAN)
    assert child.heard[1] == Launch(PLAN)
    child.say(Finished(RESULT))
    assert await worker_host.receive() == RESULT
    assert (worker_host.pid, worker_host.spare_pid) == (100, None)
    assert await worker_host.close()
    assert child.code == -signal.SIGKILL


async def test_the_spare_takes_over_with_the_sizes_of_the_first(
    worker_host: ProcessWorker, processes: FakeProcesses
) -> None:
    await worker_host.start()
    await worker_host.stand_by()
    await worker_host.stand_by()
    assert (worker_host.pid, worker_host.spare_pid, len(processes.children)) == (100, 101, 2)
    processes.children[0].die(-signal.SIGKILL)
    with pytest.raises(WorkerGone, match="killed by SIGKILL") as caught:
        await worker_host.receive()
    assert not caught.value.fault
    assert await worker_host.restart() == READY
    assert (worker_host.pid, worker_host.spare_pid) == (101, None)
    load = processes.children[1].heard[0]
    assert isinstance(load, Load)
    assert (load.config.cache.num_gpu_blocks_override, load.config.model.max_model_len) == (7, 64)
    first = processes.children[0].heard[0]
    assert isinstance(first, Load)
    assert first.config.scheduler.max_num_prefill_tokens == "auto"  # which is measured, and once is enough
    assert load.config.scheduler.max_num_prefill_tokens == first.config.scheduler.max_num_batched_tokens
    assert await worker_host.close()


async def test_a_dead_spare_is_not_used(worker_host: ProcessWorker, processes: FakeProcesses) -> None:
    await worker_host.start()
    await worker_host.stand_by()
    processes.children[1].die(1)
    assert worker_host.spare_pid is None
    await worker_host.restart()
    assert worker_host.pid == 102
    await worker_host.close()


@pytest.mark.parametrize(
    ("code", "reason", "fault"),
    [
        (-signal.SIGTERM, "killed by SIGTERM", False),
        (-signal.SIGSEGV, "killed by SIGSEGV", True),
        (-signal.SIGABRT, "killed by SIGABRT", True),
        (7, "exit code 7", True),
        (0, "exit code 0", True),
    ],
)
async def test_how_a_worker_died_says_whose_fault_it_was(
    worker_host: ProcessWorker, processes: FakeProcesses, code: int, reason: str, fault: bool
) -> None:
    await worker_host.start()
    processes.children[0].die(code)
    with pytest.raises(WorkerGone, match=reason) as caught:
        await worker_host.receive()
    assert caught.value.fault is fault
    await worker_host.close()


async def test_the_successors_of_a_worker_that_cannot_capture_graphs_do_without(
    worker_host: ProcessWorker, processes: FakeProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    """No request is to blame, and successors avoid the cause of the first death."""
    await worker_host.start()
    processes.children[0].say(failed(GraphCaptureError("a graph could not be captured"), loading=False))
    with pytest.raises(WorkerGone, match="a graph could not be captured") as caught:
        await worker_host.receive()
    assert not caught.value.fault
    assert isinstance(caught.value.__cause__, GraphCaptureError)
    assert "enforce_eager, which is slower" in caplog.text
    for _ in range(2):
        await worker_host.restart()
    eager = [
        load.config.worker.enforce_eager for child in processes.children if isinstance(load := child.heard[0], Load)
    ]
    assert eager == [False, True, True]
    await worker_host.close()


async def test_a_worker_that_cannot_capture_graphs_refuses_commands(
    worker_host: ProcessWorker, processes: FakeProcesses
) -> None:
    await worker_host.start()
    processes.children[0].say(Refused(failed(GraphCaptureError("a graph could not be captured"), loading=False)))
    with pytest.raises(WorkerGone, match="a graph could not be captured"):
        await worker_host.command(SleepWorker(level=1))
    await worker_host.close()


async def test_a_worker_that_the_kernel_kills_for_want_of_memory_is_at_fault(
    worker_host: ProcessWorker, processes: FakeProcesses
) -> None:
    await worker_host.start()
    await worker_host.stand_by()
    processes.kernel_kills = 1
    processes.children[0].die(-signal.SIGKILL)
    with pytest.raises(WorkerGone, match="killed by the kernel for want of memory") as caught:
        await worker_host.receive()
    assert caught.value.fault
    assert found_no_memory(caught.value)
    await worker_host.restart()
    processes.children[1].die(-signal.SIGKILL)  # the spare was there when the first one died, and is not meant
    with pytest.raises(WorkerGone, match="killed by SIGKILL") as caught:
        await worker_host.receive()
    assert not caught.value.fault
    assert not found_no_memory(caught.value)
    await worker_host.close()


@pytest.mark.parametrize(("before", "after"), [(3, 3), (None, None), (None, 3), (3, None)])
async def test_a_kernel_that_does_not_say_whom_it_killed_accuses_nobody(
    worker_host: ProcessWorker, processes: FakeProcesses, before: int | None, after: int | None
) -> None:
    processes.kernel_kills = before
    await worker_host.start()
    processes.kernel_kills = after
    processes.children[0].die(-signal.SIGKILL)
    with pytest.raises(WorkerGone, match="killed by SIGKILL") as caught:
        await worker_host.receive()
    assert not caught.value.fault
    await worker_host.close()


async def test_a_step_that_raised_keeps_its_text_from_clients(
    worker_host: ProcessWorker, processes: FakeProcesses
) -> None:
    await worker_host.start()
    processes.children[0].say(Failed(kind="KeyError", message="a secret", detail="Traceback: a secret"))
    with pytest.raises(Exception, match="a model step failed with KeyError") as caught:
        await worker_host.receive()
    assert "secret" not in str(caught.value)
    assert caught.value.__notes__ == ["Traceback: a secret"]
    await worker_host.close()


@pytest.mark.parametrize("out_of_turn", [Loaded(READY), Progress(LoadProgress(phase="weights"))])
async def test_messages_out_of_turn_end_the_worker(
    worker_host: ProcessWorker, processes: FakeProcesses, out_of_turn: Any
) -> None:
    await worker_host.start()
    processes.children[0].say(out_of_turn)
    with pytest.raises(WorkerGone, match="out of turn"):
        await worker_host.receive()
    await worker_host.close()


async def test_an_error_while_loading_is_told_with_its_hint(
    worker_host: ProcessWorker, processes: FakeProcesses
) -> None:
    await worker_host.prepare()
    processes.children[0].mute = True
    processes.children[0].say(Failed(kind="ModelLoadError", message="config.json: no", hint="look"))
    with pytest.raises(ModelLoadError, match=r"config\.json: no") as caught:
        await worker_host.start()
    assert caught.value.hint == "look"
    await worker_host.close()


async def test_a_successor_that_falls_silent_is_given_up(
    worker_host: ProcessWorker, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("troupellm.actors.worker.process_host.RELOAD_SILENCE_SECONDS", 0.01)
    await worker_host.start()
    await worker_host.stand_by()
    processes.children[1].mute = True
    with pytest.raises(WorkerGone, match="fallen silent"):
        await worker_host.restart()
    assert await worker_host.restart() == READY
    assert processes.children[1].code == -signal.SIGKILL
    await worker_host.close()


async def test_a_spare_that_a_signal_has_stopped_is_replaced_at_once(
    worker_host: ProcessWorker, processes: FakeProcesses
) -> None:
    await worker_host.start()
    await worker_host.stand_by()
    processes.children[1].stopped = True
    with anyio.fail_after(1.0):
        assert await worker_host.restart() == READY
    assert processes.children[1].code == -signal.SIGKILL
    assert worker_host.pid == processes.children[2].pid
    await worker_host.close()


@pytest.mark.slow
async def test_a_successor_that_is_stopped_while_it_loads_is_given_up_after_two_looks(
    worker_host: ProcessWorker, processes: FakeProcesses
) -> None:
    await worker_host.start()
    await worker_host.stand_by()
    successor = processes.children[1]
    successor.mute = True
    with anyio.fail_after(10.0):
        async with anyio.create_task_group() as group:
            group.start_soon(_stop_soon, successor)
            with pytest.raises(WorkerGone, match="stopped by a signal"):
                await worker_host.restart()
    await worker_host.close()


async def _stop_soon(child: FakeChild) -> None:
    while not any(isinstance(message, Load) for message in child.heard):
        await checkpoint()
    child.stopped = True


async def test_a_worker_process_that_cannot_be_started_is_reported(
    worker_host: ProcessWorker, processes: FakeProcesses
) -> None:
    processes.exhausted = True
    with pytest.raises(WorkerGone, match="cannot be started"):
        await worker_host.prepare()
    processes.exhausted = False
    await worker_host.start()
    processes.exhausted = True
    await worker_host.stand_by()
    assert worker_host.spare_pid is None
    await worker_host.close()


async def test_a_process_that_does_not_go(worker_host: ProcessWorker, processes: FakeProcesses) -> None:
    await worker_host.start()
    processes.children[0].immortal = True
    with pytest.raises(WorkerStuck):
        await worker_host.restart()
    await worker_host.start()
    processes.children[1].immortal = True
    assert not await worker_host.close()


async def test_waiting_can_be_cancelled_and_loses_nothing(worker_host: ProcessWorker, processes: FakeProcesses) -> None:
    await worker_host.start()
    with anyio.move_on_after(0.0):
        await worker_host.receive()
    processes.children[0].say(Finished(RESULT))
    assert await worker_host.receive() == RESULT
    await worker_host.close()


async def test_a_command_is_answered(worker_host: ProcessWorker, processes: FakeProcesses) -> None:
    await worker_host.start()
    (child,) = processes.children
    child.say(Executed(SLEPT))
    assert await worker_host.command(SleepWorker(1)) == SLEPT
    assert child.heard[-1] == Execute(SleepWorker(1))
    child.say(Progress(LoadProgress(phase="weights")))
    child.say(Executed(WorkerReport(ready=READY)))
    assert (await worker_host.command(WakeWorker())).ready == READY
    worker_host.send(PLAN)
    child.say(Finished(RESULT))
    assert await worker_host.receive() == RESULT
    await worker_host.close()


async def test_a_refusal_leaves_the_worker_as_it_was(worker_host: ProcessWorker, processes: FakeProcesses) -> None:
    await worker_host.start()
    (child,) = processes.children
    child.say(Refused(Failed(kind="InvalidRequest", message="no profile", code="no_profile")))
    with pytest.raises(InvalidRequest, match="no profile") as refused:
        await worker_host.command(StopProfile())
    assert refused.value.code == "no_profile"
    child.say(Refused(Failed(kind="ModelLoadError", message="gone")))
    with pytest.raises(ModelLoadError, match="gone"):
        await worker_host.command(WakeWorker())
    assert child.code is None
    await worker_host.close()


async def test_nonsense_and_silence_end_the_worker(
    worker_host: ProcessWorker, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker_host.start()
    processes.children[0].say(Loaded(READY))
    with pytest.raises(WorkerGone, match="out of turn"):
        await worker_host.command(SleepWorker(1))
    monkeypatch.setattr("troupellm.actors.worker.process_host.RELOAD_SILENCE_SECONDS", 0.01)
    with pytest.raises(WorkerGone, match="fallen silent"):
        await worker_host.command(SleepWorker(1))
    await worker_host.close()


async def test_the_deepest_sleep_needs_no_spare_and_survives_the_death_of_the_sleeper(
    worker_host: ProcessWorker, processes: FakeProcesses
) -> None:
    await worker_host.start()
    await worker_host.stand_by()
    sleeper, spare = processes.children
    sleeper.say(Executed(SLEPT))
    await worker_host.command(SleepWorker(2))
    assert spare.code == -signal.SIGKILL
    sleeper.die(-signal.SIGKILL)
    assert await worker_host.command(WakeWorker()) == WorkerReport(ready=READY, renewed=True)
    assert worker_host.pid == processes.children[-1].pid != sleeper.pid
    await worker_host.close()


async def test_a_seat_that_is_closed_while_its_spare_ends_waits_for_it(
    worker_host: ProcessWorker, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker_host.start()
    await worker_host.stand_by()
    spare = processes.children[1]
    waits: list[float] = []

    async def ended(timeout: float) -> int | None:
        waits.append(timeout)
        if len(waits) == 1:
            await anyio.sleep_forever()
        return spare.code

    monkeypatch.setattr(spare, "ended", ended)
    async with anyio.create_task_group() as group:
        group.start_soon(worker_host.command, SleepWorker(2))
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert len(waits) == 1
    assert await worker_host.close()
    assert len(waits) == 2
