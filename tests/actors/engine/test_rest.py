"""An engine that pauses and sleeps over a fake worker: what happens to those inside, those who come, and the worker."""

from typing import Any

import anyio
import msgspec
import pytest
from anyio.lowlevel import checkpoint

from troupellm.protocol.errors import Conflict, EngineStopped, InvalidRequest, ModelLoadError, RequestAborted
from troupellm.protocol.messages.kv_transfers import TierInfo
from troupellm.protocol.messages.sleep import SleepWorker, WakeWorker
from troupellm.tests.support.engines.inside import pulse_of, system_of
from troupellm.tests.support.engines.resting import LENGTH, PROMPT, Reader, reading, stands_still

pytestmark = pytest.mark.anyio


async def test_a_kept_stream_waits_and_goes_on_with_the_same_tokens(engine_of: Any, expected: Any, until: Any) -> None:
    async with engine_of() as engine, reading(engine, until) as reader:
        await engine.pause("keep")
        assert engine.is_paused
        assert engine.snapshot().paused
        assert await stands_still(engine)
        newcomer = Reader()
        async with anyio.create_task_group() as group:
            group.start_soon(newcomer.read, engine, [9, 9], 5)
            assert await stands_still(engine)
            assert newcomer.tokens == []
            await engine.resume()
            await until(lambda: reader.finished and newcomer.finished)
        assert not engine.is_paused
        assert reader.tokens == expected(PROMPT, LENGTH)
        assert newcomer.tokens == expected([9, 9], 5)


async def test_pausing_ends_those_inside_unless_told_otherwise(engine_of: Any, until: Any, quiet: Any) -> None:
    async with engine_of() as engine, reading(engine, until) as reader:
        await engine.pause()
        await until(lambda: reader.error is not None)
        assert isinstance(reader.error, RequestAborted)
        assert await stands_still(engine)
        assert 'cancelled_total{by="admin"' in engine.metrics_text().decode().replace('engine="0",', "").replace(
            'model_name="' + engine.model_names[0] + '",', ""
        )
        await quiet(engine)
        await engine.resume()


async def test_waiting_lets_those_inside_finish_and_holds_newcomers_back(
    engine_of: Any, expected: Any, until: Any
) -> None:
    async with engine_of() as engine, reading(engine, until) as reader, anyio.create_task_group() as group:
        paused, newcomer = anyio.Event(), Reader()

        async def pause() -> None:
            await engine.pause("wait")
            paused.set()

        group.start_soon(pause)
        await checkpoint()
        group.start_soon(newcomer.read, engine, [9, 9], 5)
        await paused.wait()
        await until(lambda: reader.finished)
        assert reader.tokens == expected(PROMPT, LENGTH)
        assert newcomer.tokens == []
        assert await stands_still(engine)
        await engine.resume()
        await until(lambda: newcomer.finished)
        assert newcomer.tokens == expected([9, 9], 5)


async def test_a_pause_that_waits_is_called_off(engine_of: Any, expected: Any, until: Any) -> None:
    """By a resumption, and by being cancelled."""
    async with engine_of() as engine, reading(engine, until, length=1500) as reader:
        async with anyio.create_task_group() as group:

            async def pause() -> None:
                with pytest.raises(Conflict, match="resumed"):
                    await engine.pause("wait")

            group.start_soon(pause)
            await checkpoint()
            with pytest.raises(Conflict, match="finish"):  # it would stop those who are to finish
                await engine.stop_profile()
            await engine.resume()
        with anyio.move_on_after(0):
            await engine.pause("wait")
        assert not engine.is_paused
        await until(lambda: reader.finished)
        assert reader.tokens == expected(PROMPT, 1500)


async def test_requests_held_back_by_a_pause_can_leave_and_time_out(engine_of: Any, until: Any, quiet: Any) -> None:
    async with engine_of() as engine:
        await engine.pause("keep")
        late, gone = Reader(), Reader()
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: late.read(engine, PROMPT, 5, deadline=0.01))
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(gone.read, engine, PROMPT, 5)
                    await until(lambda: engine.snapshot().scheduler.waiting == 2)
                    scope.cancel()
            await until(lambda: late.error is not None)
        assert getattr(late.error, "code", "") == "server_is_overloaded"
        await engine.resume()
        await quiet(engine)


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_a_stream_that_is_kept_over_a_sleep_goes_on(
    engine_of: Any, expected: Any, until: Any, fake_worker: Any, level: int
) -> None:
    async with engine_of() as engine, reading(engine, until) as reader:
        report = await engine.sleep(level, "keep")
        assert engine.is_sleeping
        assert report.level == level
        assert report.freed == (5 if level else 0)
        assert fake_worker.missing == [set(), {"kv_cache"}, {"kv_cache", "weights"}][level]
        assert await stands_still(engine)
        with pytest.raises(EngineStopped) as refused:
            await engine.generate(PROMPT, max_tokens=2, wait=False)
        assert refused.value.code == "asleep"
        with pytest.raises(Conflict):
            await engine.resume()
        report = await engine.wake()
        assert report.level is None
        assert not engine.is_sleeping
        await until(lambda: reader.finished)
        assert reader.tokens == expected(PROMPT, LENGTH)
        snapshot = engine.snapshot()
        assert snapshot.scheduler.worker_losses == 0
        assert {actor.name: actor.restarts for actor in snapshot.actors}["worker"] == 0
        assert fake_worker.resets == 0


async def test_a_sleep_that_the_worker_cannot_ends_no_request(engine_of: Any, expected: Any, until: Any) -> None:
    async with engine_of() as engine, reading(engine, until) as reader:
        engine._require().system.sleep_control.gives_back = False
        with pytest.raises(InvalidRequest, match="level 0 pauses it") as refused:
            await engine.sleep()
        assert refused.value.code == "sleep_unsupported"
        assert not engine.is_sleeping
        await until(lambda: reader.finished)
        assert reader.tokens == expected(PROMPT, LENGTH)


async def test_sleep_ends_or_finishes_those_inside(engine_of: Any, expected: Any, until: Any, quiet: Any) -> None:
    async with engine_of() as engine:
        async with reading(engine, until) as reader:
            await engine.sleep()
            await until(lambda: reader.error is not None)
            await engine.wake()
        async with reading(engine, until) as reader:
            await engine.sleep(1, "wait")
            await until(lambda: reader.finished)
            assert reader.tokens == expected(PROMPT, LENGTH)
        await engine.wake()
        await quiet(engine)


async def test_a_request_to_a_sleeping_engine_is_answered_after_it_wakes(
    engine_of: Any, expected: Any, until: Any
) -> None:
    async with engine_of() as engine, anyio.create_task_group() as group:
        await engine.sleep(2)
        reader = Reader()
        group.start_soon(reader.read, engine, PROMPT, 5)
        assert await stands_still(engine)
        await engine.wake()
        await until(lambda: reader.finished)
        assert reader.tokens == expected(PROMPT, 5)


async def test_parts_wake_one_by_one(engine_of: Any, expected: Any, fake_worker: Any) -> None:
    async with engine_of() as engine:
        await engine.sleep(1)
        await engine.sleep(2)  # deeper
        await engine.sleep(1)  # not higher
        assert fake_worker.commands == [SleepWorker(1), SleepWorker(2)]
        await engine.wake(["weights"])
        assert engine.is_sleeping
        assert fake_worker.missing == {"kv_cache"}
        await engine.wake(["weights"])
        await engine.wake(["kv_cache"])
        assert not engine.is_sleeping
        assert fake_worker.commands[2:] == [
            WakeWorker(weights=True, kv_cache=False),
            WakeWorker(weights=False, kv_cache=True),
        ]
        assert list((await engine.generate(PROMPT, max_tokens=5, temperature=0.0)).token_ids) == expected(PROMPT, 5)
        await engine.wake()  # idempotent
        await engine.sleep(0)
        await engine.wake(["kv_cache"])
        assert engine.is_sleeping
        await engine.wake(["scheduling"])
        assert not engine.is_sleeping


async def test_a_paused_engine_is_paused_after_its_sleep(engine_of: Any) -> None:
    async with engine_of() as engine:
        await engine.pause()
        await engine.sleep(2)
        await engine.wake()
        assert engine.is_paused
        assert engine.snapshot().scheduler.halted
        await engine.resume()
        assert len((await engine.generate(PROMPT, max_tokens=5)).token_ids) == 5


async def test_weights_that_are_gone_leave_the_engine_asleep(engine_of: Any, fake_worker: Any) -> None:
    async with engine_of() as engine:
        await engine.sleep(2)
        fake_worker.refusal = ModelLoadError("model.safetensors is missing")
        with pytest.raises(ModelLoadError):
            await engine.wake()
        assert engine.is_sleeping
        assert engine.state == "ready"
        fake_worker.refusal = None
        await engine.wake()
        assert len((await engine.generate(PROMPT, max_tokens=5)).token_ids) == 5


async def test_a_worker_that_refuses_to_sleep_goes_on(engine_of: Any, fake_worker: Any, until: Any) -> None:
    async with engine_of() as engine, reading(engine, until) as reader:
        fake_worker.refusal = RuntimeError("no")
        with pytest.raises(RuntimeError, match="no"):
            await engine.sleep(1, "keep")
        assert not engine.is_sleeping
        await until(lambda: reader.finished)
        assert engine.snapshot().scheduler.worker_losses == 0


async def test_unknown_levels_modes_and_tags_of_rest_are_refused(engine_of: Any) -> None:
    async with engine_of() as engine:
        for call in (engine.sleep(3), engine.sleep(1, "never"), engine.pause("later"), engine.wake(["keys"])):
            with pytest.raises(InvalidRequest):
                await call
        assert not engine.is_sleeping
        assert not engine.is_paused


@pytest.mark.parametrize("inside", [False, True])
async def test_closing_a_sleeping_engine_ends_everybody(engine_of: Any, until: Any, inside: bool) -> None:
    reader = Reader()
    async with anyio.create_task_group() as group, engine_of() as engine:
        if inside:
            group.start_soon(reader.read, engine, PROMPT, LENGTH)
            await until(lambda: len(reader.tokens) > 2)
        await engine.sleep(2, "keep")
    assert isinstance(reader.error, EngineStopped) == inside
    assert engine.state == "stopped"


@pytest.mark.parametrize("tiers", [(), (TierInfo(name="disk"),)])
async def test_a_pause_under_way_hears_that_the_engine_was_closed(
    engine_of: Any, until: Any, fake_worker: Any, monkeypatch: pytest.MonkeyPatch, tiers: tuple[TierInfo, ...]
) -> None:
    load = fake_worker.load
    monkeypatch.setattr(fake_worker, "load", lambda *told: msgspec.structs.replace(load(*told), tiers=tiers))
    reader, errors = Reader(), list[Exception]()

    async def pause(engine: Any) -> None:
        try:
            await engine.pause("wait")
        except Exception as error:
            errors.append(error)

    async with anyio.create_task_group() as group, engine_of() as engine:
        group.start_soon(reader.read, engine, PROMPT, LENGTH)
        await until(lambda: len(reader.tokens) > 2)
        group.start_soon(pause, engine)
        await checkpoint()
    assert [type(error) for error in (*errors, reader.error)] == [EngineStopped, EngineStopped]


async def test_the_watchdog_leaves_a_resting_engine_alone(engine_of: Any, until: Any) -> None:
    """It looks once a second here as well, but is asked directly: two looks are as many as it needs."""
    from troupellm.actors.engine.watchdog import Looks

    async with engine_of() as engine, reading(engine, until) as reader:
        for rest, back in ((engine.pause, engine.resume), (engine.sleep, engine.wake)):
            await rest(mode="keep")
            assert await stands_still(engine)
            looks, system = Looks(), system_of(engine)
            assert [looks.look(pulse_of(system)) for _ in range(3)] == [None] * 3
            assert engine.snapshot().scheduler.running + engine.snapshot().scheduler.waiting == 1
            await back()
        await until(lambda: reader.finished)


async def test_requests_are_ended_by_their_id(engine_of: Any, until: Any) -> None:
    async with engine_of() as engine, reading(engine, until, request_id="cmpl-1") as reader:
        async with reading(engine, until, request_id="cmpl-2-7") as numbered:
            assert await engine.abort("cmpl-3") == 0
            assert await engine.abort("cmpl-2") == 1
            await until(lambda: numbered.error is not None)
            assert reader.error is None
        assert await engine.abort_all() == 1
        await until(lambda: reader.error is not None)
        assert isinstance(reader.error, RequestAborted)
        assert await engine.abort("cmpl-1") == 0
