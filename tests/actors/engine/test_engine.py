"""The engine end to end over a fake worker: answers, cancellation, slow readers, overload, leaks."""

import gc
import os
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

import troupellm
from troupellm import Engine

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]


async def test_an_answer_is_the_models(engine_of: Any, expected: Any) -> None:
    async with engine_of() as engine:
        assert engine.state == "ready"
        completion = await engine.generate(PROMPT, max_tokens=40, temperature=0.0)
        assert list(completion.token_ids) == expected(PROMPT, 40)
        assert completion.finish_reason == "length"
        assert completion.usage.completion_tokens == 40
        assert completion.prompt_token_ids == tuple(PROMPT)
        timing = completion.timing
        assert 0 <= timing.scheduled <= timing.first_token <= timing.finished
    assert engine.state == "stopped"


async def test_a_stream_gives_deltas_that_add_up(engine_of: Any, expected: Any) -> None:
    async with engine_of() as engine, engine.stream("hello", max_tokens=30, n=2, seed=1) as stream:
        await stream.opened()
        assert bytes(token - 3 for token in stream.prompt_token_ids)  # known before the first delta
        tokens: dict[int, list[int]] = {0: [], 1: []}
        async for delta in stream:
            tokens[delta.index] += delta.token_ids
        wanted = expected(list(stream.prompt_token_ids), 30)
        assert tokens == {0: wanted, 1: wanted}
        assert stream.finish_reasons == {0: "length", 1: "length"}
        assert stream.usage.completion_tokens == 60
        assert stream.finished


async def test_chat_uses_the_template(engine_of: Any) -> None:
    async with engine_of() as engine, engine.chat([{"role": "user", "content": "hi"}], max_tokens=2) as stream:
        await stream.opened()
        assert engine.tokenizer.decode(stream.prompt_token_ids) == "user:hi;"
        assert engine.tokenizer.decode(await engine.render(troupellm_chat("hi"))) == "user:hi;"


def troupellm_chat(text: str) -> Any:
    from troupellm.protocol.messages.input import ChatPrompt

    return ChatPrompt(messages=[{"role": "user", "content": text}])


async def test_leaving_the_block_ends_the_request(engine_of: Any, quiet: Any) -> None:
    async with engine_of() as engine:
        async with engine.stream(PROMPT, max_tokens=400) as stream:
            async for _ in stream:
                break
        assert stream.finished
        assert engine.snapshot().open_requests == 0
        await quiet(engine)
        assert [delta async for delta in stream] == []


@pytest.mark.parametrize("rounds", range(8))
async def test_cancelling_at_any_moment_leaves_nothing(engine_of: Any, rounds: int, quiet: Any) -> None:
    """Before admission, in the intake, on the way to the scheduler, in its first steps."""
    async with engine_of() as engine:
        async with anyio.create_task_group() as group:
            for prompt in (PROMPT, "x" * 3000):
                group.start_soon(lambda prompt=prompt: engine.generate(prompt, max_tokens=300))
            for _ in range(rounds):
                await checkpoint()
            group.cancel_scope.cancel()
        await quiet(engine)


async def test_native_cancellation_and_timeouts(engine_of: Any, quiet: Any) -> None:
    import asyncio

    async with engine_of() as engine:

        async def never_ends() -> None:
            async with asyncio.timeout(0.01):
                while True:
                    await engine.generate(PROMPT, max_tokens=400)

        with pytest.raises(TimeoutError):
            await never_ends()
        with anyio.move_on_after(0.01) as scope:
            while True:
                await engine.generate(PROMPT, max_tokens=400)
        assert scope.cancelled_caught
        await quiet(engine)


async def test_a_slow_reader_pauses_its_own_request_only(engine_of: Any, expected: Any, until: Any) -> None:
    async with engine_of(stream_budget_tokens=8) as engine, engine.stream(PROMPT, max_tokens=100) as slow:
        await until(lambda: engine.snapshot().scheduler.paused)
        other = await engine.generate([9, 9], max_tokens=50)
        assert len(other.token_ids) == 50
        assert not slow.finished
        tokens: list[int] = []
        async for delta in slow:
            assert len(delta.token_ids) <= 8 + 2 * engine.config.scheduler.plans_in_flight
            tokens += delta.token_ids
        assert tokens == expected(PROMPT, 100)


async def test_overload_is_refused_or_waited_for(engine_of: Any, fake_worker: Any, expected: Any, until: Any) -> None:
    fake_worker.gate = threading.Event()
    async with engine_of(max_num_seqs=1, max_num_queued_reqs=1) as engine, anyio.create_task_group() as group:
        answers: dict[int, Any] = {}

        async def ask(number: int) -> None:
            answers[number] = await engine.generate([number], max_tokens=5)

        for number in (10, 11, 12, 13):
            group.start_soon(ask, number)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(troupellm.EngineOverloaded) as caught:
            await engine.generate([14], wait=False)
        assert 1.0 <= caught.value.retry_after <= 30.0
        with pytest.raises(troupellm.TroupeError) as late:
            await engine.generate([15], deadline=0.01)
        assert late.value.code == "server_is_overloaded"
        fake_worker.gate.set()
        await until(lambda: len(answers) == 4)
        assert {number: list(done.token_ids) for number, done in answers.items()} == {
            number: expected([number], 5) for number in answers
        }
        assert b'troupellm_rejected_total{engine="0",model_name=' in engine.metrics_text()


async def test_many_prompts_in_the_order_they_finish(engine_of: Any, expected: Any, quiet: Any) -> None:
    async with engine_of() as engine:
        prompts = [[20 + index] for index in range(30)]
        answers = {index: done async for index, done in engine.map(prompts, concurrency=4, max_tokens=5)}
        assert [list(answers[index].token_ids) for index in range(30)] == [expected(prompt, 5) for prompt in prompts]
        results = engine.map(prompts, concurrency=4, max_tokens=200)
        async for _ in results:
            break
        await results.aclose()
        await quiet(engine)


async def test_two_engines_at_once(engine_of: Any, make_worker: Any, expected: Any) -> None:
    async with engine_of(make_worker()) as one, engine_of(make_worker()) as two:
        answers: list[list[int]] = []

        async def ask(engine: Engine) -> None:
            answers.append(list((await engine.generate(PROMPT, max_tokens=50)).token_ids))

        async with anyio.create_task_group() as group:
            for engine in (one, two, one, two):
                group.start_soon(ask, engine)
        assert answers == [expected(PROMPT, 50)] * 4


async def test_progress_arrives_on_the_loop(model_folder: Path, fake_worker: Any) -> None:
    reports: list[tuple[str, str]] = []

    def progress(report: Any) -> None:
        reports.append((report.phase, threading.current_thread().name))

    async with Engine(model_folder, worker=lambda folder: fake_worker, progress=progress):
        await checkpoint()
    assert ("weights", threading.current_thread().name) in reports


async def test_opening_in_one_task_and_closing_in_another(model_folder: Path, fake_worker: Any) -> None:
    engine = await Engine.open(model_folder, worker=lambda folder: fake_worker)
    async with anyio.create_task_group() as group:
        group.start_soon(engine.generate, PROMPT)
    async with anyio.create_task_group() as group:
        group.start_soon(engine.aclose)
    await engine.aclose()
    assert engine.state == "stopped"
    with pytest.raises(troupellm.ModelLoadError):
        await Engine.open(model_folder / "nothing")


async def test_ready_deltas_are_taken_together_and_once(engine_of: Any, expected: Any) -> None:
    async with engine_of() as engine, engine.stream(PROMPT, max_tokens=30, n=3, temperature=0.0) as stream:
        assert stream.take_ready() == []
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        first = await anext(stream)
        tokens[first.index] += first.token_ids
        while not stream.finished:
            await checkpoint()
        ready = stream.take_ready()
        assert sorted(delta.index for delta in ready) == [0, 1, 2]
        for delta in ready:
            tokens[delta.index] += delta.token_ids
        assert stream.take_ready() == []
        assert [delta async for delta in stream] == []
        assert tokens == {index: expected(PROMPT, 30) for index in range(3)}
        assert stream.finish_reasons == dict.fromkeys(range(3), "length")
        await stream.cancel()
        assert stream.take_ready() == []


async def test_a_dropped_stream_is_ended_with_a_warning(engine_of: Any, quiet: Any) -> None:
    async with engine_of() as engine:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stream = engine.stream(PROMPT, max_tokens=400)
            await anext(stream)
            del stream
            gc.collect()
        assert [warning.category for warning in caught] == [ResourceWarning]
        await quiet(engine)


async def test_leaving_gives_everything_back(engine_of: Any, make_worker: Any) -> None:
    import asyncio

    async def once() -> None:
        async with engine_of(make_worker()) as engine:
            await engine.generate("x" * 2000, max_tokens=5, detokenize=False)
            async with engine.stream(PROMPT, max_tokens=400) as stream:
                await anext(stream)

    await once()
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()))
    for _ in range(3):
        await once()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())) == before


async def test_an_unknown_engine_setting_is_refused(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="unknown setting"):
        Engine(model_folder, max_seqs=3)
    base = troupellm.Engine(model_folder, max_num_seqs=3).config
    assert Engine(model_folder, config=base, block_size=8).config.scheduler.max_num_seqs == 3


@pytest.mark.parametrize(
    ("blocks", "settings"),
    [
        (1024, {"max_plans_in_flight": 2}),
        (1024, {"max_num_batched_tokens": 7, "max_num_seqs": 3}),
        (14, {"block_size": 4, "enable_prefix_caching": False}),
        (14, {"block_size": 4, "max_plans_in_flight": 2}),
    ],
)
async def test_a_crowd_gets_the_same_answers(
    engine_of: Any, make_worker: Any, expected: Any, quiet: Any, blocks: int, settings: dict[str, Any]
) -> None:
    """Chunked, preempted, with two plans in flight: each answer is what it would be alone."""
    prompts = [[3 + number] * (1 + number % 9) for number in range(24)]
    async with engine_of(make_worker(num_blocks=blocks, max_model_len=48), **settings) as engine:
        answers = {number: done async for number, done in engine.map(prompts, concurrency=24, max_tokens=20)}
        for number, prompt in enumerate(prompts):
            assert list(answers[number].token_ids) == expected(prompt, 20)[: len(answers[number].token_ids)]
            assert len(answers[number].token_ids) == 20
        assert (engine.snapshot().scheduler.preemptions > 0) == (blocks == 14)
        await quiet(engine)


async def test_only_a_step_that_is_under_way_has_a_duration(engine_of: Any, fake_worker: Any, until: Any) -> None:
    async with engine_of() as engine:
        assert engine.snapshot().step_seconds is None
        fake_worker.gate = threading.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(partial(engine.generate, PROMPT, max_tokens=3))
            await until(lambda: engine.snapshot().step_seconds)
            assert engine.snapshot().last_step_age_seconds is None
            earlier = engine.snapshot().step_seconds
            await until(lambda: engine.snapshot().step_seconds > earlier)
            fake_worker.gate.set()
        await until(lambda: engine.snapshot().step_seconds is None)
        assert engine.snapshot().last_step_age_seconds is not None
