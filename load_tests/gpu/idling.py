"""How long the device has nothing to do while an engine decodes, from a profile of the engine's process."""

from collections.abc import Sequence
from typing import Any

import anyio
import torch
from torch._C._autograd import DeviceType

from troupellm.actors.engine.engine import Engine
from troupellm.load_tests.gpu.engine import LARGE, SHORT, SMALL, Models
from troupellm.load_tests.gpu.engines import opened, random_tokens
from troupellm.load_tests.gpu.gathered import Found
from troupellm.load_tests.roofline import SIZES

BATCH, CONTEXT = 32, 1024
BEFORE, STEPS = 16, 96
"""Tokens of every stream before the profile, and in it."""
SPARE = 64
"""Tokens that streams are still to get when it ends."""
POLL_SECONDS = 0.005
WITHIN = 3e-6
"""Seconds: gaps that are shorter lie between two kernels of a step."""
LIMIT_SECONDS = 120.0

Interval = tuple[float, float]
"""Of something that the device did; seconds."""


def idle_shares(models: Models) -> Found:
    """G12: 1 less the steps' time on the device over the time that passed."""
    found, details = dict[str, float](), dict[str, Any]()
    for name in (LARGE, SMALL):
        prompts = [random_tokens(CONTEXT, SIZES[name].vocab, row) for row in range(BATCH)]
        length = CONTEXT + BEFORE + STEPS + SPARE
        settings = models.serving(name, BATCH, length + 8)

        async def measure(settings: dict[str, Any] = settings, prompts: list[list[int]] = prompts) -> list[Interval]:
            async with opened(settings) as engine:
                return await _profiled(engine, prompts)

        worked = steady(models.run(measure, LIMIT_SECONDS))
        span = worked[-1][1] - worked[0][0]
        found[SHORT[name]] = idle_share(worked, WITHIN)
        details[SHORT[name]] = {
            "ms": span * 1e3,
            "kernels and copies": len(worked),
            "with gaps within steps": idle_share(worked, 0.0),
        }
    return found, details


async def _profiled(engine: Engine, prompts: Sequence[list[int]]) -> list[Interval]:
    """The device's activity in the middle of the answers."""
    counts = [0] * len(prompts)

    async def read(row: int) -> None:
        options: dict[str, Any] = {"max_tokens": BEFORE + STEPS + SPARE, "temperature": 0.0, "ignore_eos": True}
        async with engine.stream(prompts[row], **options) as stream:
            async for delta in stream:
                counts[row] += len(delta.token_ids)

    async def reached(count: int) -> None:
        while min(counts) < count:
            await anyio.sleep(POLL_SECONDS)

    async with anyio.create_task_group() as group:
        for row in range(len(prompts)):
            group.start_soon(read, row)
        await reached(BEFORE)
        with torch.profiler.profile(activities=_activities()) as profile:
            await reached(min(counts) + STEPS)
        group.cancel_scope.cancel()
    return intervals(profile)


def _activities() -> list[torch.profiler.ProfilerActivity]:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    return [*kinds, torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else kinds


def intervals(profile: torch.profiler.profile) -> list[Interval]:
    """Of the device's kernels and copies, in their order."""
    events = profile.events() or []  # type: ignore[no-untyped-call]
    ranges = [event.time_range for event in events if event.device_type == DeviceType.CUDA]
    return sorted((one.start * 1e-6, one.end * 1e-6) for one in ranges)


def steady(worked: Sequence[Interval]) -> Sequence[Interval]:
    """Without the first third: the engine stands still while the profile is begun.

    Raises:
        RuntimeError: nothing was recorded.
    """
    if not worked:
        raise RuntimeError("the profile has nothing that the device did")
    return worked[len(worked) // 3 :]


def idle_share(worked: Sequence[Interval], within: float) -> float:
    """Of the time from the first beginning to the last end, the share of gaps that are longer than `within`."""
    begin = until = worked[0][0]
    idle = 0.0
    for start, end in worked:
        if start - until > within:
            idle += start - until
        until = max(until, end)
    return idle / (until - begin)
