"""Rows C7, E3, E5, E6, E8 and E10 of the fault table, with the worker on a thread: what breaks is mended or told."""

import logging

import anyio
import pytest

from troupellm.actors.engine.edges import SUPERVISION
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.protocol.errors import EngineStopped, RequestFailed, WorkerCrashed
from troupellm.protocol.messages.worker import RowError, StepPlan, StepResult
from troupellm.tests.support.engines.inside import pulse_of, system_of, worker_host_of
from troupellm.tests.support.servers.canary import under_attack
from troupellm.tests.support.servers.serving import eventually, running_server
from troupellm.tests.support.workers.meddler import MARKER, WorkerHosts, changed

pytestmark = pytest.mark.anyio

ATTACK = {"model": "tiny", "prompt": MARKER, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


async def attack(attacked, **fields):
    return await attacked.client.post("/v1/completions", json=ATTACK | fields)


def check_failed_for_good(answer) -> None:
    assert answer.status_code == 500, answer.text
    assert answer.json()["error"]["code"] == "engine_request_failed"
    assert answer.headers["x-should-retry"] == "false"


async def test_E3_an_error_of_one_row_fails_that_request_only(tiny_engine):
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts) as engine, under_attack(engine) as attacked:

        def fail_marked(result: StepResult) -> StepResult:
            errors = tuple(RowError(row, "this row cannot go on") for row in result.rows if row in hosts.worker.marked)
            return changed(result, errors=errors) if errors else result

        hosts.worker.on_result = fail_marked
        check_failed_for_good(await attack(attacked))
        check_failed_for_good(await attack(attacked, stream=True))  # before its first token, so the status tells
        check_failed_for_good(await attack(attacked, n=3, temperature=1))
    assert hosts.worker.resets == 0


async def test_E3_an_exception_that_one_row_brings_about_fails_that_request_only(tiny_engine):
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts) as engine, under_attack(engine) as attacked:

        def break_on_marked(plan: StepPlan) -> None:
            if hosts.worker.poisoned(plan):
                raise IndexError("index 77 is out of bounds")

        hosts.worker.on_launch = break_on_marked
        check_failed_for_good(await attack(attacked))
        assert engine.snapshot().scheduler.blamed == 1


async def test_E10_a_poison_request_is_found_and_its_neighbours_go_on(tiny_engine):
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts) as engine, under_attack(engine) as attacked:

        def die_late(plan: StepPlan) -> None:
            columns = zip(plan.rows, plan.starts, plan.counts, strict=True)
            ends = {row: start + count for row, start, count in columns}
            if any(ends[row] > len(MARKER) + 2 for row in hosts.worker.marked & ends.keys()):
                raise RuntimeError("the worker died")

        hosts.worker.on_launch = die_late
        neighbours = [{"prompt": [20 + number, 5], "max_tokens": 30} for number in range(6)]
        solo = [
            await engine.generate(ask["prompt"], max_tokens=30, temperature=0.0, ignore_eos=True) for ask in neighbours
        ]
        answers = {}

        async def ask(number: int) -> None:
            body = ATTACK | neighbours[number] | {"return_token_ids": True}
            answers[number] = await attacked.client.post("/v1/completions", json=body)

        async with anyio.create_task_group() as group:
            for number in range(6):
                group.start_soon(ask, number)
            check_failed_for_good(await attack(attacked))
        for number in range(6):
            assert answers[number].status_code == 200, answers[number].text
            assert tuple(answers[number].json()["choices"][0]["token_ids"]) == solo[number].token_ids
        text = (await attacked.client.get("/metrics")).text
        restarts = engine.snapshot().scheduler.worker_losses
    assert restarts == hosts.worker.resets >= 2
    for name in ("worker_restarts_total", "replays_total", "convicted_total", "requests_quarantined"):
        assert f"troupellm_{name}{{" in text


def _garbled(result: StepResult, kind: str, vocabulary: int) -> StepResult:
    match kind:
        case "wrong shape":
            return changed(result, token_counts=(*result.token_counts, 1))
        case "id out of range":
            return changed(result, tokens=tuple(vocabulary for _ in result.tokens))
        case "negative id":
            return changed(result, tokens=tuple(-1 for _ in result.tokens))
        case "missing row":
            kept = result.token_counts[1:]
            return changed(
                result,
                rows=result.rows[1:],
                epochs=result.epochs[1:],
                token_counts=kept,
                tokens=result.tokens[result.token_counts[0] :],
            )
        case "stale epoch":
            return changed(result, engine_epoch=result.engine_epoch - 1)
        case "stale row epoch":
            return changed(result, epochs=tuple(epoch - 1 for epoch in result.epochs))
        case "other step":
            return changed(result, step=result.step - 1)
        case "no tokens":
            return changed(result, token_counts=tuple(0 for _ in result.rows), tokens=())
        case "complete without a guide":
            return changed(result, finished=result.rows)
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "wrong shape",
        "id out of range",
        "missing row",
        "stale epoch",
        "other step",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("negative id", "stale row epoch", "no tokens", "complete without a guide")
        ),
    ],
)
async def test_E6_nonsense_replaces_the_worker_and_costs_nobody_a_request(tiny_engine, kind):
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts) as engine, under_attack(engine, canary_tokens=60) as attacked:
        vocabulary, left = engine.ready.vocab_width, [2]

        def garble(result: StepResult) -> StepResult:
            if left[0] and result.tokens and not hosts.worker.marked.isdisjoint(result.rows):
                left[0] -= 1
                return _garbled(result, kind, vocabulary)
            return result

        solo = await engine.generate(MARKER, max_tokens=8, temperature=0.0, ignore_eos=True)
        hosts.worker.on_result = garble
        answer = await attack(attacked, return_token_ids=True)
        if answer.status_code == 500:  # twice in a row, and it was alone both times
            check_failed_for_good(answer)
            answer = await attack(attacked, return_token_ids=True)
        assert answer.status_code == 200, answer.text
        assert tuple(answer.json()["choices"][0]["token_ids"]) == solo.token_ids
        assert engine.snapshot().scheduler.worker_losses >= 1


async def test_E6_duplicates_and_late_results_are_dropped_and_counted(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine, canary_tokens=60) as attacked:
        system, seen = system_of(engine), []
        offer = system.scheduler.offer

        def twice(message):
            if getattr(message, "result", None) is not None and message.result.rows:
                seen.append(message)
                offer(message)
                if len(seen) > 5:
                    offer(seen[-5])
            return offer(message)

        system.scheduler.offer = twice
        for _ in range(3):
            assert (await attack(attacked)).status_code == 200
        system.scheduler.offer = offer
        assert engine.snapshot().scheduler.dropped_results >= len(seen)
        assert engine.snapshot().scheduler.worker_losses == 0


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")])
async def test_C7_a_step_without_memory_is_computed_again_in_smaller_parts(tiny_engine, error):
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts, max_num_batched_tokens=64) as engine:
        solo = await engine.generate([*MARKER, *range(20, 60)], max_tokens=8, temperature=0.0, ignore_eos=True)
        async with under_attack(engine, canary_tokens=60) as attacked:

            def too_large(plan: StepPlan) -> None:
                if sum(plan.counts) > 20:
                    raise error

            hosts.worker.on_launch = too_large
            answer = await attack(attacked, prompt=[*MARKER, *range(20, 60)], return_token_ids=True)
            hosts.worker.on_launch = lambda plan: None
            if answer.status_code != 200:
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "server_is_overloaded"
                assert int(answer.headers["retry-after"]) > 0
                answer = await attack(attacked, prompt=[*MARKER, *range(20, 60)], return_token_ids=True)
            assert tuple(answer.json()["choices"][0]["token_ids"]) == solo.token_ids


async def test_C7_a_request_that_never_fits_the_memory_may_be_sent_again(tiny_engine):
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts) as engine, under_attack(engine, canary_tokens=60) as attacked:

        def no_memory(plan: StepPlan) -> None:
            if hosts.worker.poisoned(plan):
                raise MemoryError

        hosts.worker.on_launch = no_memory
        answer = await attack(attacked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert answer.headers["x-should-retry"] == "true"
        assert (await attack(attacked, prompt=[5, 6])).status_code == 200


async def test_E5_a_crash_loop_ends_the_engine(tiny_engine):
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts) as engine, running_server(engine) as served, served.client() as client:

        def always(plan: StepPlan) -> None:
            raise RuntimeError("it dies always")

        assert (await client.get("/livez")).status_code == 200
        hosts.worker.on_launch = always
        errors = []

        async def ask(number: int) -> None:
            try:
                await engine.generate([number, 5], max_tokens=4)
            except (WorkerCrashed, EngineStopped, RequestFailed) as error:
                errors.append(error)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                for number in range(20, 40):
                    group.start_soon(ask, number)
        assert len(errors) == 20
        assert engine.state == "failed"
        assert str(engine.failure) == "it dies always"
        notes = engine.failure.__notes__
        assert "actor: worker" in notes
        assert len([note for note in notes if note.startswith("hint: ")]) == 1
        for probe in ("/readyz", "/livez"):
            assert (await client.get(probe)).status_code == 503
        refused = await client.post("/v1/completions", json=ATTACK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
    assert hosts.worker.resets == SUPERVISION["worker"].intensity.restarts


async def test_readiness_tells_the_truth_while_the_worker_restarts(tiny_engine, monkeypatch):
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts) as engine, running_server(engine) as served, served.client() as client:
        solo = await engine.generate(MARKER, max_tokens=30, temperature=0.0, ignore_eos=True)
        gate, left = anyio.Event(), [True]
        worker_host = worker_host_of(engine)
        original = worker_host.restart

        async def slow_restart():
            await gate.wait()
            return await original()

        def once(plan: StepPlan) -> None:
            if left and plan.starts[0] > len(MARKER):
                left.clear()
                raise RuntimeError("it died")

        monkeypatch.setattr(worker_host, "restart", slow_restart)
        hosts.worker.on_launch = once
        answers = []

        async def ask() -> None:
            answers.append(
                await client.post("/v1/completions", json=ATTACK | {"max_tokens": 30, "return_token_ids": True})
            )

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await eventually(lambda: engine.snapshot().unready is not None)
            probe = await client.get("/readyz")
            assert probe.status_code == 503
            assert "engine_restarting" in probe.json()["reasons"][0]
            assert (await client.get("/livez")).status_code == 200
            group.start_soon(ask)  # it waits, it is not refused
            await eventually(lambda: engine.snapshot().open_requests == 2)
            gate.set()
        assert (await client.get("/readyz")).status_code == 200
        for answer in answers:
            assert answer.status_code == 200, answer.text
            assert tuple(answer.json()["choices"][0]["token_ids"]) == solo.token_ids


async def test_E8_a_lost_wake_up_is_noticed_and_mended(tiny_engine, caplog, monkeypatch):
    monkeypatch.setattr("troupellm.actors.engine.watchdog.LOOK_SECONDS", 0.05)
    async with tiny_engine(watchdog_timeout=0.2) as engine, under_attack(engine):
        solo = await engine.generate(MARKER, max_tokens=8, temperature=0.0, ignore_eos=True)
        box = system_of(engine).worker
        wake, lost, mended, unready = Mailbox._wake_consumer, [], [], []

        def lose_until_noticed(self: Mailbox) -> None:
            if self is box and not mended:
                lost.append(True)
                if engine.snapshot().unready is None:
                    return
                mended.append(True)
            wake(self)

        monkeypatch.setattr(Mailbox, "_wake_consumer", lose_until_noticed)

        async def watch() -> None:
            await eventually(lambda: engine.snapshot().unready is not None)
            unready.append(engine.snapshot().unready)

        with caplog.at_level(logging.ERROR, logger="troupellm.engine"), anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                again = await engine.generate(MARKER, max_tokens=8, temperature=0.0, ignore_eos=True)
            await eventually(lambda: engine.snapshot().unready is None)
        assert mended
        assert again.token_ids == solo.token_ids
        assert "no progress" in unready[0]
        assert any("no progress" in record.message and '"scheduler"' in record.message for record in caplog.records)


async def test_E8_a_plan_that_is_lost_is_sent_again(tiny_engine, monkeypatch):
    """It may be the canaries' own."""
    monkeypatch.setattr("troupellm.actors.engine.watchdog.LOOK_SECONDS", 0.05)
    async with tiny_engine(watchdog_timeout=0.2) as engine, under_attack(engine):
        solo = await engine.generate(MARKER, max_tokens=8, temperature=0.0, ignore_eos=True)
        box = system_of(engine).worker
        offer, lost = box.offer, []

        def lose_one(message) -> bool:
            if not lost:
                lost.append(message)
                return True
            return offer(message)

        monkeypatch.setattr(box, "offer", lose_one)
        with anyio.fail_after(10):
            again = await engine.generate(MARKER, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert lost
        assert again.token_ids == solo.token_ids
        assert engine.snapshot().scheduler.worker_losses == 1


async def test_E8_a_deaf_scheduler_ends_the_engine_with_the_reason(tiny_engine, monkeypatch):
    """Which no canary would survive."""
    monkeypatch.setattr("troupellm.actors.engine.watchdog.LOOK_SECONDS", 0.05)
    async with tiny_engine(watchdog_timeout=0.2) as engine:
        box = system_of(engine).scheduler
        wake = Mailbox._wake_consumer
        monkeypatch.setattr(Mailbox, "_wake_consumer", lambda self: None if self is box else wake(self))
        with anyio.fail_after(10), pytest.raises(EngineStopped) as caught:
            await engine.generate(MARKER, max_tokens=8)
        assert caught.value.code == "engine_failed"
        assert "no progress: scheduler" in str(engine.failure)
        assert "actor: scheduler" in engine.failure.__notes__


async def test_an_idle_engine_and_a_long_step_raise_no_alarm(tiny_engine, monkeypatch):
    monkeypatch.setattr("troupellm.actors.engine.watchdog.LOOK_SECONDS", 0.01)
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts, watchdog_timeout=0.02) as engine:
        system = system_of(engine)
        alarms: list[str | None] = []
        monkeypatch.setattr(system, "_on_alarm", alarms.append)
        looks = [0]
        pulse = pulse_of(system)

        def counted():
            looks[0] += 1
            return pulse()

        monkeypatch.setattr(system, "_pulse", counted)
        await eventually(lambda: engine.snapshot().uptime_seconds > 0.2)
        completion = await engine.generate(MARKER, max_tokens=40, ignore_eos=True)
        assert len(completion.token_ids) == 40
        assert alarms == []
