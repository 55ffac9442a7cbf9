"""An embedded engine on the device, and what measures ask of it."""

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from troupellm.actors.engine.engine import Engine

CAPTURE_SECONDS = 30.0
"""Graphs that are not captured by then are captured meanwhile."""
LOOK_SECONDS = 0.5
FIRST_PROMPT = list(range(1, 9))

Request = tuple[list[int], int]
"""Prompt, and how long its answer is."""


def random_tokens(count: int, vocab_size: int, seed: object = 0) -> list[int]:
    return random.Random(str(seed)).choices(range(vocab_size), k=count)


@asynccontextmanager
async def opened(settings: dict[str, Any], *, temperature: float = 0.0) -> AsyncIterator[Engine]:
    """With all graphs captured that answers of that temperature need."""
    async with Engine(**settings) as engine:
        await settle(engine, temperature)
        yield engine


async def settle(engine: Engine, temperature: float = 0.0) -> int:
    """Leave the engine alone until all its graphs are captured; how many are still missing."""
    with anyio.move_on_after(CAPTURE_SECONDS):
        while True:
            await engine.generate(FIRST_PROMPT, max_tokens=2, temperature=temperature, ignore_eos=True)
            if not missing_graphs(engine):
                break
            await anyio.sleep(LOOK_SECONDS)
    return missing_graphs(engine)


def missing_graphs(engine: Engine) -> int:
    graphs = engine.snapshot().scheduler.graphs
    return 0 if graphs is None else graphs.missing


async def answer_all(engine: Engine, requests: Sequence[Request], *, temperature: float = 0.0) -> float:
    """Seconds until all are answered that are asked at once."""

    async def ask(prompt: list[int], tokens: int) -> None:
        await engine.generate(prompt, max_tokens=tokens, temperature=temperature, ignore_eos=True)

    begin = time.perf_counter()
    async with anyio.create_task_group() as group:
        for prompt, tokens in requests:
            group.start_soon(ask, prompt, tokens)
    return time.perf_counter() - begin


async def first_token_seconds(engine: Engine, prompt: list[int]) -> float:
    """From asking to the answer's only token."""
    begin = time.perf_counter()
    await engine.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
    return time.perf_counter() - begin
