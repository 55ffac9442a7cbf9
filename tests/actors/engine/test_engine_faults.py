"""The engine when something breaks: bad requests, crashed actors, hung steps, failed starts, ends under load."""

import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

import troupellm
from troupellm import Engine
from troupellm.protocol.config.engine import TenantConfig
from troupellm.protocol.messages.input import Demand
from troupellm.protocol.messages.output import StepOutput
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.tests.support.engines.inside import system_of

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]


async def test_a_reader_that_stays_away_is_aborted(engine_of: Any, until: Any, quiet: Any) -> None:
    async with engine_of(stream_budget_tokens=4, stall_timeout=0.02) as engine:
        async with engine.stream(PROMPT, max_tokens=100) as stream:
            await until(lambda: stream.finished)
            with pytest.raises(troupellm.TroupeError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.code == "reader_stalled"
        await quiet(engine)


async def test_errors_are_typed_and_flat(engine_of: Any, quiet: Any) -> None:
    async with engine_of() as engine:
        with pytest.raises(troupellm.ContextLengthExceeded) as caught:
            await engine.generate([5] * 5000)
        assert (caught.value.limit, caught.value.got >= 5000) == (4096, True)
        with pytest.raises(troupellm.InvalidRequest):
            await engine.generate("x", temperature=3.0)
        with pytest.raises(troupellm.InvalidRequest):
            await engine.generate(5)
        await quiet(engine)
    with pytest.raises(troupellm.EngineStopped):
        await engine.generate("x")


async def test_a_sick_row_fails_alone(engine_of: Any, fake_worker: Any, expected: Any, until: Any) -> None:
    fake_worker.sick = 666
    async with engine_of() as engine, anyio.create_task_group() as group:
        answers: list[Any] = []

        async def healthy() -> None:
            answers.append(await engine.generate(PROMPT, max_tokens=60))

        group.start_soon(healthy)
        with pytest.raises(troupellm.RequestFailed, match="sick"):
            await engine.generate([666], max_tokens=5)
        await until(lambda: answers)
        assert list(answers[0].token_ids) == expected(PROMPT, 60)


async def test_a_poison_request_fails_alone(engine_of: Any, fake_worker: Any, expected: Any, quiet: Any) -> None:
    fake_worker.poison = 666
    answers: dict[int, Any] = {}
    async with engine_of() as engine:
        async with anyio.create_task_group() as group:

            async def ask(prompt: list[int]) -> None:
                try:
                    answers[prompt[0]] = (await engine.generate(prompt, max_tokens=40)).token_ids
                except troupellm.TroupeError as error:
                    answers[prompt[0]] = error

            for prompt in (PROMPT, [8], [666], [9]):
                group.start_soon(ask, prompt)
        for prompt in (PROMPT, [8], [9]):
            assert list(answers[prompt[0]]) == expected(prompt, 40)
        assert isinstance(answers[666], troupellm.RequestFailed)
        assert answers[666].code == "engine_request_failed"
        assert engine.state == "ready"
        scheduler = engine.snapshot().scheduler
        assert (scheduler.blamed, scheduler.quarantined) == (1, 0)
        assert fake_worker.resets == scheduler.worker_losses > 1
        await quiet(engine)


async def test_a_worker_that_dies_always_fails_the_engine_with_the_cause(engine_of: Any, fake_worker: Any) -> None:
    fake_worker.poison = 5
    errors: list[troupellm.TroupeError] = []
    async with engine_of() as engine:
        async with anyio.create_task_group() as group:

            async def victim(prompt: list[int]) -> None:
                try:
                    await engine.generate(prompt, max_tokens=400)
                except troupellm.TroupeError as error:
                    errors.append(error)

            for number in range(20):
                group.start_soon(victim, [5, number])
        assert len(errors) == 20
        ended = [error for error in errors if isinstance(error, troupellm.WorkerCrashed)]
        assert {(str(error.__cause__), error.code) for error in ended} == {("poisoned", "engine_failed")}
        assert all(error.code == "engine_request_failed" for error in errors if error not in ended)
        assert engine.state == "failed"
        assert str(await engine.wait_failed()) == "poisoned"
        notes = engine.failure.__notes__
        assert "actor: worker" in notes
        assert len([note for note in notes if note.startswith("hint: ")]) == 1
        with pytest.raises(troupellm.WorkerCrashed):
            await engine.generate(PROMPT)
    assert engine.state == "failed"


async def test_a_hung_step_fails_the_engine(engine_of: Any, fake_worker: Any) -> None:
    fake_worker.gate = threading.Event()
    async with engine_of(step_timeout=0.02) as engine:
        with pytest.raises(troupellm.WorkerCrashed, match="step_timeout"):
            await engine.generate(PROMPT)
        fake_worker.gate.set()


async def test_an_intake_crash_restarts_it(engine_of: Any, monkeypatch: pytest.MonkeyPatch, quiet: Any) -> None:
    from troupellm.actors.input.actor import Intake

    async with engine_of() as engine:
        original = Intake._pass_on

        async def broken(self: Intake, *arguments: Any, **options: Any) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(Intake, "_pass_on", broken)
        with pytest.raises(troupellm.RequestFailed) as caught:
            await engine.generate(PROMPT, max_tokens=5)
        assert repr(caught.value.__cause__) == "KeyError('a bug')"
        monkeypatch.setattr(Intake, "_pass_on", original)
        assert len((await engine.generate(PROMPT, max_tokens=5)).token_ids) == 5
        assert {actor.name: actor.restarts for actor in engine.snapshot().actors}["intake"] == 1
        await quiet(engine)


async def test_an_intake_crash_spares_those_who_wait_in_its_mailbox(
    engine_of: Any, expected: Any, monkeypatch: pytest.MonkeyPatch, quiet: Any
) -> None:
    from troupellm.actors.input.actor import Intake

    answers: dict[int, Any] = {}
    async with engine_of() as engine:
        original = Intake._pass_on

        async def broken(self: Intake, *arguments: Any, **options: Any) -> None:
            monkeypatch.setattr(Intake, "_pass_on", original)
            raise KeyError("a bug")

        monkeypatch.setattr(Intake, "_pass_on", broken)

        async def ask(number: int) -> None:
            try:
                answers[number] = (await engine.generate([number, 5], max_tokens=5)).token_ids
            except troupellm.RequestFailed as error:
                answers[number] = error

        async with anyio.create_task_group() as group:
            for number in range(10, 15):
                group.start_soon(ask, number)
        failed = [number for number, answer in answers.items() if isinstance(answer, Exception)]
        assert len(failed) == 1
        for number in set(answers) - set(failed):
            assert list(answers[number]) == expected([number, 5], 5)
        await quiet(engine)


async def test_an_output_crash_fails_what_is_open_and_goes_on(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch, quiet: Any
) -> None:
    from troupellm.actors.output.core import OutputCore

    async with engine_of() as engine:
        original = OutputCore.handle

        def broken(self: OutputCore, message: Any, now: float) -> None:
            monkeypatch.setattr(OutputCore, "handle", original)
            raise KeyError("a bug")

        async with engine.stream(PROMPT, max_tokens=400) as stream:
            await stream.opened()
            monkeypatch.setattr(OutputCore, "handle", broken)
            with pytest.raises(troupellm.EngineStopped) as caught:
                async for _ in stream:
                    pass
        assert caught.value.code == "engine_restarting"
        assert len((await engine.generate(PROMPT, max_tokens=5)).token_ids) == 5
        await quiet(engine)


async def test_usage_is_settled_when_the_end_of_a_request_crashes_the_output_actor(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch, quiet: Any
) -> None:
    from troupellm.actors.output.core import OutputCore

    original = OutputCore.handle

    def broken(self: OutputCore, message: Any, now: float) -> None:
        if isinstance(message, StepOutput) and message.closed:
            monkeypatch.setattr(OutputCore, "handle", original)
            raise KeyError("a bug")
        original(self, message, now)

    async with engine_of(tenants=(TenantConfig(name="a", tokens_per_minute=1000),)) as engine:
        monkeypatch.setattr(OutputCore, "handle", broken)
        with pytest.raises(troupellm.EngineStopped):
            await engine.generate(PROMPT, max_tokens=5, ignore_eos=True, tenant="a")
        await quiet(engine)
        (account,) = engine.snapshot().tenants
        assert (account.prompt_tokens, account.completion_tokens, account.inside) == (len(PROMPT), 5, 0)
        assert not system_of(engine).requests._owed


async def test_draining_lets_open_requests_finish(engine_of: Any, fake_worker: Any) -> None:
    async with engine_of() as engine:
        async with engine.stream(PROMPT, max_tokens=20) as stream:
            await stream.opened()
            await engine.drain(10.0)
            assert engine.state == "draining"
            assert sum([len(delta.token_ids) async for delta in stream]) == 20
        with pytest.raises(troupellm.EngineStopped):
            await engine.generate(PROMPT)


async def test_draining_ends_what_does_not_finish(engine_of: Any, fake_worker: Any) -> None:
    fake_worker.gate = threading.Event()
    async with engine_of() as engine, engine.stream(PROMPT, max_tokens=20) as stream:
        await stream.opened()
        await engine.drain(0.01)
        with pytest.raises(troupellm.EngineStopped):
            async for _ in stream:
                pass
        fake_worker.gate.set()


async def test_closing_under_load_answers_the_readers(engine_of: Any) -> None:
    errors: list[str] = []

    async with anyio.create_task_group() as group, engine_of() as engine:

        async def ask() -> None:
            try:
                await engine.generate(PROMPT, max_tokens=400)
            except troupellm.EngineStopped as error:
                errors.append(error.message)

        for _ in range(3):
            group.start_soon(ask)
        await checkpoint()
        await checkpoint()
    assert errors == ["the engine was closed"] * 3


async def test_the_blocks_own_exception_passes_unwrapped(engine_of: Any) -> None:
    async def breaks() -> None:
        async with engine_of() as engine, engine.stream(PROMPT, max_tokens=400) as stream:
            async for _ in stream:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await breaks()


async def test_loading_failures_are_flat(engine_of: Any, fake_worker: Any, tmp_path: Path) -> None:
    def fails() -> None:
        raise RuntimeError("no memory")

    fake_worker.on_load = fails
    before = threading.active_count()
    with pytest.raises(troupellm.ModelLoadError, match="no memory") as caught:
        async with engine_of():
            pass
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(troupellm.ModelLoadError):
        async with Engine(tmp_path / "nothing here"):
            pass
    assert threading.active_count() == before


async def test_cancelling_the_start_stops_the_loading(engine_of: Any, fake_worker: Any) -> None:
    gate = threading.Event()
    fake_worker.on_load = lambda: gate.wait(10) and None
    before = threading.active_count()
    with anyio.move_on_after(0.05) as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(_release, gate)
            async with engine_of():
                raise AssertionError("it cannot have started")
    assert scope.cancelled_caught
    assert fake_worker.closed
    assert threading.active_count() == before


async def _release(gate: threading.Event) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        gate.set()


async def test_a_failed_engine_answers_those_who_wait_at_the_intake(engine_of: Any, fake_worker: Any) -> None:
    fake_worker.gate = threading.Event()
    errors: list[str] = []
    with anyio.fail_after(10):
        async with engine_of(step_timeout=0.05) as engine, anyio.create_task_group() as group:

            async def ask(prompt: list[int]) -> None:
                try:
                    await engine.generate(prompt, max_tokens=4)
                except troupellm.WorkerCrashed as error:
                    errors.append(error.code)

            group.start_soon(ask, [299, 5])
            await checkpoint()
            for number in range(300):
                group.start_soon(ask, [3 + number % 50, 5])
            await engine.wait_failed()
            fake_worker.gate.set()
    assert errors == ["engine_failed"] * 301


async def test_closing_with_a_full_control_lane(engine_of: Any, fake_worker: Any, until: Any) -> None:
    fake_worker.gate = threading.Event()
    errors: list[Exception] = []

    async def ask(engine: Engine) -> None:
        try:
            await engine.generate(PROMPT, max_tokens=4)
        except troupellm.EngineStopped as error:
            errors.append(error)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group, engine_of(max_num_queued_reqs=64) as engine:
            system_of(engine).scheduler.control_capacity = 8
            for _ in range(32):
                group.start_soon(ask, engine)
            await until(lambda: engine.snapshot().open_requests == 32)
            fake_worker.gate.set()
    assert len(errors) == 32


async def test_the_control_lane_has_room_for_every_request(engine_of: Any) -> None:
    async with engine_of(max_num_queued_reqs=10_000) as engine:
        assert system_of(engine).scheduler.control_capacity > 4 * 10_000


async def test_cancelling_open_stops_the_loading(model_folder: Path, make_worker: Any) -> None:
    ran_on: list[bool] = []

    class Endless(make_worker):  # type: ignore[misc]
        def load(self, config: Any, progress: Any) -> Any:
            never = threading.Event()
            for _ in range(1000):
                never.wait(0.005)
                progress(LoadProgress(phase="weights", done=0, total=1))
            ran_on.append(True)
            raise AssertionError("it was not stopped")

    before = threading.active_count()
    with anyio.move_on_after(0.05) as scope:
        await Engine.open(model_folder, worker=lambda folder: Endless())
    assert scope.cancelled_caught
    assert not ran_on
    assert threading.active_count() == before


async def test_an_output_crash_spares_who_is_on_the_way_in(
    engine_of: Any, fake_worker: Any, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    from troupellm.actors.output.core import OutputCore

    original = OutputCore.handle

    def broken(self: OutputCore, message: Any, now: float) -> None:
        monkeypatch.setattr(OutputCore, "handle", original)
        raise KeyError("a bug")

    async with engine_of() as engine, anyio.create_task_group() as group:
        system = system_of(engine)
        outbox = system.requests.add(system.admission.enter(Demand(sequences=1, tokens=1)), 0.0, None)
        monkeypatch.setattr(OutputCore, "handle", broken)

        async def ask() -> None:
            with pytest.raises(troupellm.EngineStopped):
                await engine.generate(PROMPT, max_tokens=5)

        group.start_soon(ask)
        await until(lambda: engine.snapshot().actors[-1].restarts or len(system_of(engine).requests) == 1)
        await checkpoint()
        assert not outbox.terminal
        outbox.fail(troupellm.RequestAborted("the test is over"))
