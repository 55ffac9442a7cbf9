"""Adapters that are loaded while streams run: the gaps between their tokens, and the memory after many loads."""

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from troupellm.models.worker.memory_use import resident_bytes

if TYPE_CHECKING:
    from troupellm.actors.engine.engine import Engine

MODEL_LEN = 1024
"""Least `max_model_len` of engines that are measured."""
_PROMPT = tuple(range(300, 331))
_GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class Gaps(msgspec.Struct, kw_only=True):
    """Seconds between a stream's tokens: the 99th percentile, an entry per round."""

    quiet: list[float]
    loading: list[float]
    loads: int = 0
    """Adapters that were loaded meanwhile, in all rounds."""


class Memory(msgspec.Struct, kw_only=True, frozen=True):
    """Bytes of the process."""

    before: int
    """Without an adapter."""
    expected: int
    """With slots and host memory full."""
    after: int
    """After all loads and unloads."""
    loads: int


async def gaps_beside_loads(
    engine: "Engine", folders: Sequence[Path], *, streams: int, rounds: int, loads: int
) -> Gaps:
    """Each round has streams with `loads` loads, one after another, and the same streams for as long without any.

    Args:
        folders: of adapters, more than host memory holds, so that each load reads one.
    """
    found = Gaps(quiet=[], loading=[])

    async def load() -> None:
        for _ in range(loads):
            await engine.load_adapter("loaded", folders[found.loads % len(folders)], replace=True)
            found.loads += 1

    for _ in range(rounds):
        begin = time.perf_counter()
        found.loading.append(await _p99(engine, streams, load))
        seconds = time.perf_counter() - begin
        found.quiet.append(await _p99(engine, streams, partial(anyio.sleep, seconds)))
    return found


async def _p99(engine: "Engine", streams: int, work: Callable[[], Awaitable[None]]) -> float:
    """The gap of streams that run from before `work` to its end."""
    times: list[list[float]] = [[] for _ in range(streams)]

    async def read(number: int) -> None:
        while True:  # a stream that is full is followed by the next one
            prompt = [number, *_PROMPT]
            async with engine.stream(prompt, max_tokens=MODEL_LEN - len(prompt), **_GREEDY) as stream:
                async for _ in stream:
                    times[number].append(time.perf_counter())

    async with anyio.create_task_group() as group:
        for number in range(streams):
            group.start_soon(read, number)
        while any(len(found) < 3 for found in times):
            await anyio.sleep(0.01)
        begin = time.perf_counter()
        await work()
        group.cancel_scope.cancel()
    gaps = sorted(after - before for found in times for before, after in pairwise(found) if after >= begin)
    return gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)]


async def memory_of_loads(engine: "Engine", folders: Sequence[Path], *, loads: int) -> Memory:
    """Load and unload adapters in turns, each with an answer of its own.

    Args:
        folders: of adapters, more than host memory holds, so that each load reads one.
    """
    lora, num_bytes = engine.config.lora, 0
    await _answer(engine, "")
    before = resident_bytes()
    for number in range(loads):
        name = f"loaded-{number % len(folders)}"
        num_bytes = (await engine.load_adapter(name, folders[number % len(folders)])).num_bytes
        await _answer(engine, name)
        await engine.unload_adapter(name)
    held = min(len(folders), lora.max_loras) + min(len(folders), lora.host_adapters)
    return Memory(before=before, expected=before + held * num_bytes, after=resident_bytes(), loads=loads)


async def _answer(engine: "Engine", adapter: str) -> None:
    await engine.generate(_PROMPT, adapter=adapter, max_tokens=2, **_GREEDY)
