"""Real engines inside a program that goes on without them: what they give back, and two of them at once."""

import gc
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from troupellm import Engine
from troupellm.models.worker.memory_use import resident_bytes

pytestmark = pytest.mark.anyio

CACHE_BYTES = 64 * 2**20
PROMPTS = ("What is 23 + 45?", "Once upon a time", "x")


async def test_leaving_an_engine_returns_its_memory(checkpoint: Path) -> None:
    """All of its cache is written to, so that the system has really given it: far more than anything else changes."""
    settings = {"kv_cache_memory_bytes": CACHE_BYTES, "device": "cpu", "num_threads": 1, "poison_memory": "nan"}
    left: list[int] = []
    for _ in range(4):
        async with Engine(str(checkpoint), **settings) as engine:
            await engine.generate("x", max_tokens=2)
            held = resident_bytes()
        gc.collect()
        left.append(resident_bytes())
        assert held - left[-1] > CACHE_BYTES // 2
    assert left[-1] - left[1] < CACHE_BYTES // 2


async def answers_of(engine: Engine) -> list[tuple[int, ...]]:
    answers: list[tuple[int, ...]] = [()] * len(PROMPTS)
    async for index, completion in engine.map(PROMPTS, temperature=0.0, max_tokens=24, ignore_eos=True):
        answers[index] = completion.token_ids
    return answers


async def test_two_real_engines_at_once_answer_as_each_does_alone(
    tiny_engine: Callable[..., Engine], builtin_engine: Callable[..., Engine]
) -> None:
    alone = []
    for make in (tiny_engine, builtin_engine):
        async with make() as engine:
            alone.append(await answers_of(engine))
    together: list[list[tuple[int, ...]]] = [[], []]

    async def ask(place: int, engine: Engine) -> None:
        together[place] = await answers_of(engine)

    async with tiny_engine() as tiny, builtin_engine() as builtin:
        async with anyio.create_task_group() as group:
            group.start_soon(ask, 0, tiny)
            group.start_soon(ask, 1, builtin)
        async with tiny_engine() as third:
            assert await answers_of(third) == alone[0]
        assert await answers_of(builtin) == alone[1], "another engine of the process has ended"
    assert together == alone
    assert alone[0] != alone[1]
