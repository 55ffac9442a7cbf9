"""The seat of a worker process, with processes that only exist in the test."""

import signal
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from troupellm.actors.worker.process_host import ProcessSeat
from troupellm.actors.worker.thread_host import WorkerGone, WorkerStuck, found_no_memory
from troupellm.models.worker.main import failed
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import GraphCaptureError, InvalidRequest, ModelLoadError
from troupellm.protocol.messages.sleep import SleepWorker, StopProfile, WakeWorker, WorkerReport
from troupellm.protocol.messages.worker import LoadProgress, StepPlan, StepResult
from troupellm.protocol.wire.worker import (
    Failed,
    Finished,
    Launch,
    Load,
    Loaded,
    Obey,
    Obeyed,
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
def seat(processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch) -> ProcessSeat:
    monkeypatch.setattr("troupellm.actors.worker.process_host.SPARE_DELAY_SECONDS", 0.0)
    config = EngineConfig.from_flat({"hf_token": "a secret"})
    return ProcessSeat("some:Worker", config, processes, lambda progress: None, spare=True)


async def test_plans_go_out_and_results_come_back(seat: ProcessSeat, processes: FakeProcesses) -> None:
    await seat.prepare()
    assert await seat.start() == READY
    (child,) = processes.children
    load = child.heard[0]
    assert isinstance(load, Load)
    assert (load.factory, load.config.model.hf_token) == ("some:Worker", None)
    seat.send(PLAN)
    assert child.heard[1] == Launch(PLAN)
    child.say(Finished(RESULT))
    assert await seat.receive() == RESULT
    assert (seat.pid, seat.spare_pid) == (100, None)
    assert await seat.close()
    assert child.code == -signal.SIGKILL


async def test_the_spare_takes_over_with_the_sizes_of_the_first(seat: ProcessSeat, processes: FakeProcesses) -> None:
    await seat.start()
    await seat.stand_by()
    await seat.stand_by()
    assert (seat.pid, seat.spare_pid, len(processes.children)) == (100, 101, 2)
    processes.children[0].die(-signal.SIGKILL)
    with pytest.raises(WorkerGone, match="killed by SIGKILL") as caught:
        await seat.receive()
    assert not caught.value.fault
    assert await seat.restart() == READY
    assert (seat.pid, seat.spare_pid) == (101, None)
    load = processes.children[1].heard[0]
    assert isinstance(load, Load)
    assert (load.config.cache.num_gpu_blocks_override, load.config.model.max_model_len) == (7, 64)
    first = processes.children[0].heard[0]
    assert isinstance(first, Load)
    assert first.config.scheduler.max_num_prefill_tokens == "auto"  # which is measured, and once is enough
    assert load.config.scheduler.max_num_prefill_tokens == first.config.scheduler.max_num_batched_tokens
    assert await seat.close()


async def test_a_dead_spare_is_not_used(seat: ProcessSeat, processes: FakeProcesses) -> None:
    await seat.start()
    await seat.stand_by()
    processes.children[1].die(1)
    assert seat.spare_pid is None
    await seat.restart()
    assert seat.pid == 102
    await seat.close()


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
    seat: ProcessSeat, processes: FakeProcesses, code: int, reason: str, fault: bool
) -> None:
    await seat.start()
    processes.children[0].die(code)
    with pytest.raises(WorkerGone, match=reason) as caught:
        await seat.receive()
    assert caught.value.fault is fault
    await seat.close()


async def test_the_successors_of_a_worker_that_cannot_capture_graphs_do_without(
    seat: ProcessSeat, processes: FakeProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    """No request is to blame, and successors avoid the cause of the first death."""
    await seat.start()
    processes.children[0].say(failed(GraphCaptureError("a graph could not be captured"), loading=False))
    with pytest.raises(WorkerGone, match="a graph could not be captured") as caught:
        await seat.receive()
    assert not caught.value.fault
    assert isinstance(caught.value.__cause__, GraphCaptureError)
    assert "enforce_eager, which is slower" in caplog.text
    for _ in range(2):
        await seat.restart()
    eager = [
        load.config.worker.enforce_eager for child in processes.children if isinstance(load := child.heard[0], Load)
    ]
    assert eager == [False, True, True]
    await seat.close()


async def test_a_worker_that_cannot_capture_graphs_refuses_commands(
    seat: ProcessSeat, processes: FakeProcesses
) -> None:
    await seat.start()
    processes.children[0].say(Refused(failed(GraphCaptureError("a graph could not be captured"), loading=False)))
    with pytest.raises(WorkerGone, match="a graph could not be captured"):
        await seat.command(SleepWorker(level=1))
    await seat.close()


async def test_a_worker_that_the_kernel_kills_for_want_of_memory_is_at_fault(
    seat: ProcessSeat, processes: FakeProcesses
) -> None:
    await seat.start()
    await seat.stand_by()
    processes.kernel_kills = 1
    processes.children[0].die(-signal.SIGKILL)
    with pytest.raises(WorkerGone, match="killed by the kernel for want of memory") as caught:
        await seat.receive()
    assert caught.value.fault
    assert found_no_memory(caught.value)
    await seat.restart()
    processes.children[1].die(-signal.SIGKILL)  # the spare was there when the first one died, and is not meant
    with pytest.raises(WorkerGone, match="killed by SIGKILL") as caught:
        await seat.receive()
    assert not caught.value.fault
    assert not found_no_memory(caught.value)
    await seat.close()


@pytest.mark.parametrize(("before", "after"), [(3, 3), (None, None), (None, 3), (3, None)])
async def test_a_kernel_that_does_not_say_whom_it_killed_accuses_nobody(
    seat: ProcessSeat, processes: FakeProcesses, before: int | None, after: int | None
) -> None:
    processes.kernel_kills = before
    await seat.start()
    processes.kernel_kills = after
    processes.children[0].die(-signal.SIGKILL)
    with pytest.raises(WorkerGone, match="killed by SIGKILL") as caught:
        await seat.receive()
    assert not caught.value.fault
    await seat.close()


async def test_a_step_that_raised_keeps_its_text_from_clients(seat: ProcessSeat, processes: FakeProcesses) -> None:
    await seat.start()
    processes.children[0].say(Failed(kind="KeyError", message="a secret", detail="Traceback: a secret"))
    with pytest.raises(Exception, match="a model step failed with KeyError") as caught:
        await seat.receive()
    assert "secret" not in str(caught.value)
    assert caught.value.__notes__ == ["Traceback: a secret"]
    await seat.close()


@pytest.mark.parametrize("out_of_turn", [Loaded(READY), Progress(LoadProgress(phase="weights"))])
async def test_messages_out_of_turn_end_the_worker(
    seat: ProcessSeat, processes: FakeProcesses, out_of_turn: Any
) -> None:
    await seat.start()
    processes.children[0].say(out_of_turn)
    with pytest.raises(WorkerGone, match="out of turn"):
        await seat.receive()
    await seat.close()


async def test_what_fails_while_loading_is_told(seat: ProcessSeat, processes: FakeProcesses) -> None:
    await seat.prepare()
    processes.children[0].mute = True
    processes.children[0].say(Failed(kind="ModelLoadError", message="config.json: no", hint="look"))
    with pytest.raises(ModelLoadError, match=r"config\.json: no") as caught:
        await seat.start()
    assert caught.value.hint == "look"
    await seat.close()


async def test_a_successor_that_falls_silent_is_given_up(
    seat: ProcessSeat, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("troupellm.actors.worker.process_host.RELOAD_SILENCE_SECONDS", 0.01)
    await seat.start()
    await seat.stand_by()
    processes.children[1].mute = True
    with pytest.raises(WorkerGone, match="fallen silent"):
        await seat.restart()
    assert await seat.restart() == READY
    assert processes.children[1].code == -signal.SIGKILL
    await seat.close()


async def test_a_spare_that_a_signal_has_stopped_is_replaced_at_once(
    seat: ProcessSeat, processes: FakeProcesses
) -> None:
    await seat.start()
    await seat.stand_by()
    processes.children[1].stopped = True
    with anyio.fail_after(1.0):
        assert await seat.restart() == READY
    assert processes.children[1].code == -signal.SIGKILL
    assert seat.pid == processes.children[2].pid
    await seat.close()


@pytest.mark.slow
async def test_a_successor_that_is_stopped_while_it_loads_is_given_up_after_two_looks(
    seat: ProcessSeat, processes: FakeProcesses
) -> None:
    await seat.start()
    await seat.stand_by()
    successor = processes.children[1]
    successor.mute = True
    with anyio.fail_after(10.0):
        async with anyio.create_task_group() as group:
            group.start_soon(_stop_soon, successor)
            with pytest.raises(WorkerGone, match="stopped by a signal"):
                await seat.restart()
    await seat.close()


async def _stop_soon(child: FakeChild) -> None:
    while not any(isinstance(message, Load) for message in child.heard):
        await checkpoint()
    child.stopped = True


async def test_a_worker_process_that_cannot_be_started_is_reported(seat: ProcessSeat, processes: FakeProcesses) -> None:
    processes.exhausted = True
    with pytest.raises(WorkerGone, match="cannot be started"):
        await seat.prepare()
    processes.exhausted = False
    await seat.start()
    processes.exhausted = True
    await seat.stand_by()
    assert seat.spare_pid is None
    await seat.close()


async def test_a_process_that_does_not_go(seat: ProcessSeat, processes: FakeProcesses) -> None:
    await seat.start()
    processes.children[0].immortal = True
    with pytest.raises(WorkerStuck):
        await seat.restart()
    await seat.start()
    processes.children[1].immortal = True
    assert not await seat.close()


async def test_waiting_can_be_cancelled_and_loses_nothing(seat: ProcessSeat, processes: FakeProcesses) -> None:
    await seat.start()
    with anyio.move_on_after(0.0):
        await seat.receive()
    processes.children[0].say(Finished(RESULT))
    assert await seat.receive() == RESULT
    await seat.close()


async def test_a_command_is_answered(seat: ProcessSeat, processes: FakeProcesses) -> None:
    await seat.start()
    (child,) = processes.children
    child.say(Obeyed(SLEPT))
    assert await seat.command(SleepWorker(1)) == SLEPT
    assert child.heard[-1] == Obey(SleepWorker(1))
    child.say(Progress(LoadProgress(phase="weights")))
    child.say(Obeyed(WorkerReport(ready=READY)))
    assert (await seat.command(WakeWorker())).ready == READY
    seat.send(PLAN)
    child.say(Finished(RESULT))
    assert await seat.receive() == RESULT
    await seat.close()


async def test_a_refusal_leaves_the_worker_as_it_was(seat: ProcessSeat, processes: FakeProcesses) -> None:
    await seat.start()
    (child,) = processes.children
    child.say(Refused(Failed(kind="InvalidRequest", message="no profile", code="no_profile")))
    with pytest.raises(InvalidRequest, match="no profile") as refused:
        await seat.command(StopProfile())
    assert refused.value.code == "no_profile"
    child.say(Refused(Failed(kind="ModelLoadError", message="gone")))
    with pytest.raises(ModelLoadError, match="gone"):
        await seat.command(WakeWorker())
    assert child.code is None
    await seat.close()


async def test_nonsense_and_silence_end_the_worker(
    seat: ProcessSeat, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    await seat.start()
    processes.children[0].say(Loaded(READY))
    with pytest.raises(WorkerGone, match="out of turn"):
        await seat.command(SleepWorker(1))
    monkeypatch.setattr("troupellm.actors.worker.process_host.RELOAD_SILENCE_SECONDS", 0.01)
    with pytest.raises(WorkerGone, match="fallen silent"):
        await seat.command(SleepWorker(1))
    await seat.close()


async def test_the_deepest_sleep_needs_no_spare_and_survives_the_death_of_the_sleeper(
    seat: ProcessSeat, processes: FakeProcesses
) -> None:
    await seat.start()
    await seat.stand_by()
    sleeper, spare = processes.children
    sleeper.say(Obeyed(SLEPT))
    await seat.command(SleepWorker(2))
    assert spare.code == -signal.SIGKILL
    sleeper.die(-signal.SIGKILL)
    assert await seat.command(WakeWorker()) == WorkerReport(ready=READY, renewed=True)
    assert seat.pid == processes.children[-1].pid != sleeper.pid
    await seat.close()


async def test_a_seat_that_is_closed_while_its_spare_ends_waits_for_it(
    seat: ProcessSeat, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    await seat.start()
    await seat.stand_by()
    spare = processes.children[1]
    waits: list[float] = []

    async def ended(timeout: float) -> int | None:
        waits.append(timeout)
        if len(waits) == 1:
            await anyio.sleep_forever()
        return spare.code

    monkeypatch.setattr(spare, "ended", ended)
    async with anyio.create_task_group() as group:
        group.start_soon(seat.command, SleepWorker(2))
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert len(waits) == 1
    assert await seat.close()
    assert len(waits) == 2
