"""Streams that are open while their engine rests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

PROMPT = [5, 6, 7]
LENGTH = 300


class Reader:
    """Reads one stream to its end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self.finished = False

    async def read(self, engine: Any, prompt: list[int], length: int, **options: Any) -> None:
        try:
            async with engine.stream(prompt, max_tokens=length, temperature=0.0, **options) as stream:
                async for delta in stream:
                    self.tokens += delta.token_ids
            self.finished = True
        except Exception as error:
            self.error = error


@asynccontextmanager
async def reading(engine: Any, until: Any, length: int = LENGTH, **options: Any) -> AsyncIterator[Reader]:
    """A stream that has begun."""
    reader = Reader()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: reader.read(engine, PROMPT, length, **options))
        await until(lambda: len(reader.tokens) >= 3)
        yield reader


async def stands_still(engine: Any) -> bool:
    """Whether nothing is planned for a while."""
    steps = engine.snapshot().scheduler.steps
    for _ in range(50):
        await checkpoint()
    return bool(engine.snapshot().scheduler.steps == steps and not engine.snapshot().scheduler.plans_in_flight)
