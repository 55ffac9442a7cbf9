"""`bench heartbeat`: how late a host's own coroutine runs while an embedded engine starts, answers and stops."""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from troupellm.protocol.errors import ContextLengthExceeded

BEAT_SECONDS = 0.001
IDLE_SECONDS = 1.0
_STORY = "Tell me a story about a fox who lives near the river. "


class Heart:
    """A coroutine that wants to run every millisecond and notes how late it was, by phase."""

    def __init__(self) -> None:
        self.lags: dict[str, list[float]] = {}
        self._phase: list[float] = []

    async def beat(self) -> None:
        while True:
            due = time.perf_counter() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            self._phase.append(max(0.0, time.perf_counter() - due))

    async def during(self, phase: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run `work` as a phase of its own."""
        self._phase = self.lags.setdefault(phase, [])
        try:
            return await work()
        finally:
            await asyncio.sleep(2 * BEAT_SECONDS)  # a lag at the end of the work still belongs to it


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when the worst lag with the engine is above --limit-ms."""
    with asyncio.Runner(loop_factory=_uvloop() if args.uvloop else None) as runner:
        heart = runner.run(_host(args))
    report = {phase: summary(lags) for phase, lags in heart.lags.items()}
    print(table(report))
    if args.result_json:
        Path(args.result_json).write_text(json.dumps(report), encoding="utf-8")
    worst = max(numbers["worst_ms"] for phase, numbers in report.items() if phase != "idle loop")
    return int(args.limit_ms is not None and worst > args.limit_ms)


async def _host(args: argparse.Namespace) -> Heart:
    from troupellm.actors.engine.engine import Engine  # the host's own import, before its loop has to keep time

    heart = Heart()
    beating = asyncio.create_task(heart.beat())
    try:
        await heart.during("idle loop", lambda: asyncio.sleep(IDLE_SECONDS))
        settings = {} if args.num_threads is None else {"num_threads": args.num_threads}
        first = Engine(args.model, **settings)
        await heart.during("first start-up (imports torch)", first.__aenter__)
        await heart.during("shut-down", lambda: first.__aexit__(None, None, None))
        engine = Engine(args.model, **settings)
        await heart.during("second start-up", engine.__aenter__)
        try:
            await heart.during(f"{args.streams} streams", lambda: _streams(engine, args, _STORY))
            await heart.during("and long prompts", lambda: _with_long_prompts(engine, args))
        finally:
            await heart.during("shut-down", lambda: engine.__aexit__(None, None, None))
    finally:
        beating.cancel()
    return heart


async def _streams(engine: Any, args: argparse.Namespace, prompt: str) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(args.streams):
            group.create_task(_read(engine, args, f"{number}. {prompt}"))


async def _with_long_prompts(engine: Any, args: argparse.Namespace) -> None:
    """Streams go on while four very long prompts are tokenized; what does not fit the context is refused, late."""
    long_prompt = (_STORY * (args.long_prompt_chars // len(_STORY) + 1))[: args.long_prompt_chars]
    async with asyncio.TaskGroup() as group:
        group.create_task(_streams(engine, args, _STORY))
        for number in range(4):
            group.create_task(_read(engine, args, f"{number}. {long_prompt}"))


async def _read(engine: Any, args: argparse.Namespace, prompt: str) -> None:
    stream = engine.stream(prompt, max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
    try:
        async with stream:
            async for _ in stream:
                pass
    except ContextLengthExceeded:
        return


def summary(lags: list[float]) -> dict[str, float]:
    """Milliseconds of lateness; the host's beats are what is counted."""
    ordered = sorted(1000.0 * lag for lag in lags) or [0.0]
    return {
        "beats": len(lags),
        "p50_ms": ordered[len(ordered) // 2],
        "p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "worst_ms": ordered[-1],
    }


def table(report: dict[str, dict[str, float]]) -> str:
    lines = [f"{'lateness of a 1 ms heartbeat':<32}{'beats':>8}{'p50 ms':>9}{'p99 ms':>9}{'worst ms':>10}"]
    for phase, numbers in report.items():
        lines.append(
            f"{phase:<32}{numbers['beats']:>8.0f}{numbers['p50_ms']:>9.2f}{numbers['p99_ms']:>9.2f}"
            f"{numbers['worst_ms']:>10.2f}"
        )
    return "\n".join(lines)


def _uvloop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
