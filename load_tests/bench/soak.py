"""`bench soak`: mixed traffic with aborts, errors, stalls and worker kills, and what it leaves behind in the server.

Passes when memory grows by less than `--max-slope`, the server's own process by little per killed worker, nothing is
leaked, and no answer ends in a way it must not: a stream that is silently short, a 5xx, a broken connection. Worker
kills need a server whose worker is a process.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import time
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import msgspec

from troupellm.load_tests.traffic.held import Held, held_when_idle, own_mebibytes, resident_mebibytes
from troupellm.load_tests.traffic.own_server import OwnServer, own_server
from troupellm.load_tests.traffic.soak import UNEXPECTED, Traffic

SAMPLE_SECONDS = 2.0
WARM_UP_SHARE, WARM_UP_SECONDS = 0.2, (2.0, 240.0)
"""Caches fill and allocators find their size in this part of the run, within these bounds."""
KILLING_SHARE, JUDGED_SHARE = 0.3, 0.5
"""Workers are killed in the first part of the run; memory is judged in the last, when their successors have grown."""
MEBIBYTES_PER_KILL = 1.0
"""By which the server's own process may grow with each killed worker, beside what it may grow with time."""
MARGIN = {"descriptors": 4, "tasks": 4, "threads": 4, "blocks": 0, "requests": 0, "messages": 0}
"""Connections close a little later than their clients think, and pools keep a thread."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    minutes: float
    slope_mebibytes_per_minute: float
    mebibytes: tuple[float, float]
    """At the start of what is measured, and at its end: medians of a tenth of the samples each."""
    before: Held
    after: Held
    worker_kills: int
    own_mebibytes: tuple[float, float]
    """Of the server's own process, without workers: before the first of them was killed, and after the last."""
    exit_code: int
    ends: dict[str, int]
    samples: list[tuple[float, float]]
    """Minutes since the start, mebibytes."""

    @property
    def leaks(self) -> dict[str, int]:
        before, after = msgspec.structs.asdict(self.before), msgspec.structs.asdict(self.after)
        return {name: after[name] - before[name] for name in MARGIN if after[name] - before[name] > MARGIN[name]}

    def failures(self, max_slope: float) -> list[str]:
        failures = [f"{count} leaked: {name}" for name, count in self.leaks.items()]
        failures += [f"{count} x {end}" for end, count in self.ends.items() if end.startswith(UNEXPECTED)]
        if self.slope_mebibytes_per_minute >= max_slope:
            failures.append(f"memory grows by {self.slope_mebibytes_per_minute:.2f} MiB/min")
        grown, kills = self.own_mebibytes[1] - self.own_mebibytes[0], self.worker_kills
        if kills and grown >= kills * MEBIBYTES_PER_KILL + KILLING_SHARE * self.minutes * max_slope:
            failures.append(f"the server's own process has grown by {grown:.1f} MiB over {kills} worker kills")
        if self.exit_code != 0:
            failures.append(f"the server ended with exit code {self.exit_code}")
        return failures


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when the soak fails."""
    report = asyncio.run(_soak(args))
    failures = report.failures(args.max_slope)
    print(_table(report, failures))
    if args.result_json:
        Path(args.result_json).write_bytes(msgspec.json.encode(report))
    return 1 if failures else 0


async def _soak(args: argparse.Namespace) -> Report:
    async with own_server(args.model, args.serve_arg) as server:
        seconds = 60 * args.minutes
        warm_up = min(max(seconds * WARM_UP_SHARE, WARM_UP_SECONDS[0]), WARM_UP_SECONDS[1])
        await _drive(server, args, args.seed, warm_up)
        before = await held_when_idle(server)
        driven = await _drive(server, args, args.seed + 1, seconds)
        after = await held_when_idle(server)
        judged = driven.samples[int(len(driven.samples) * (1 - JUDGED_SHARE)) :]
        tenth = max(1, len(judged) // 10)
        return Report(
            minutes=args.minutes,
            slope_mebibytes_per_minute=slope(judged),
            mebibytes=(
                statistics.median(size for _, size in judged[:tenth]),
                statistics.median(size for _, size in judged[-tenth:]),
            ),
            before=before,
            after=after,
            worker_kills=len(driven.kills),
            own_mebibytes=around(driven.kills, driven.own, KILLING_SHARE * args.minutes),
            exit_code=await server.stop(),
            ends=dict(sorted(driven.ends.items())),
            samples=driven.samples,
        )


class Driven(NamedTuple):
    """The outcome of traffic. Samples are (minutes since its start, mebibytes)."""

    samples: list[tuple[float, float]]
    own: list[tuple[float, float]]
    """Of the server's own process."""
    ends: dict[str, int]
    """How calls ended, and how many did so."""
    kills: list[float]
    """When workers were killed, in minutes."""


async def _drive(server: OwnServer, args: argparse.Namespace, seed: int, seconds: float) -> Driven:
    """Traffic for so long.

    Raises:
        RuntimeError: the server has ended.
    """
    traffic = Traffic(server, seed)
    driven = Driven([], [], traffic.ends, [])
    began = killed = time.monotonic()
    clients = [asyncio.create_task(traffic.run()) for _ in range(args.concurrency)]
    try:
        while (now := time.monotonic()) - began < seconds and server.running:
            minutes = (now - began) / 60
            driven.samples.append((minutes, resident_mebibytes(server)))
            driven.own.append((minutes, own_mebibytes(server)))
            due = args.kill_every and now - killed >= args.kill_every and now - began < KILLING_SHARE * seconds
            if due and (workers := server.workers()):
                killed = now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(workers[0], signal.SIGKILL)
                    driven.kills.append(minutes)
            await asyncio.sleep(min(SAMPLE_SECONDS, seconds))
        traffic.over = True
        await asyncio.gather(*clients)
    finally:
        for client in clients:
            client.cancel()
        await traffic.close()
    if not server.running:
        raise RuntimeError("the server ended by itself:\n" + "\n".join(server.log))
    return driven


def around(kills: list[float], samples: list[tuple[float, float]], over: float) -> tuple[float, float]:
    """Medians of the samples before the first kill, and of as many from minute `over` on, after the last
    kill; both 0 where there is nothing to compare."""
    before = [size for minute, size in samples if kills and minute <= kills[0]]
    after = [size for minute, size in samples if minute >= over][: len(before)]
    return (statistics.median(before), statistics.median(after)) if before and after else (0.0, 0.0)


def slope(samples: list[tuple[float, float]]) -> float:
    """Per unit of the first coordinate: the median over all pairs, which single jumps do not move (Theil and Sen)."""
    thinned = samples[:: max(1, len(samples) // 300)]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(thinned, 2) if b[0] > a[0]]
    return statistics.median(slopes) if slopes else 0.0


def _table(report: Report, failures: list[str]) -> str:
    lines = [
        f"{'minutes':<34}{report.minutes:>10.1f}",
        f"{'memory slope (MiB/min)':<34}{report.slope_mebibytes_per_minute:>10.2f}",
        f"{'memory, start and end (MiB)':<34}{report.mebibytes[0]:>10.1f}{report.mebibytes[1]:>10.1f}",
        f"{'worker kills':<34}{report.worker_kills:>10}",
        f"{'own process, around them (MiB)':<34}{report.own_mebibytes[0]:>10.1f}{report.own_mebibytes[1]:>10.1f}",
        f"{'exit code of the server':<34}{report.exit_code:>10}",
        f"{'held when idle':<34}{'before':>10}{'after':>10}",
    ]
    before, after = msgspec.structs.asdict(report.before), msgspec.structs.asdict(report.after)
    lines += [f"  {name:<32}{before[name]:>10}{after[name]:>10}" for name in before]
    lines.append(f"{'how calls ended':<34}")
    lines += [f"  {end:<60}{count:>8}" for end, count in report.ends.items()]
    lines.append("failed: " + json.dumps(failures) if failures else "passed: nothing leaked")
    return "\n".join(lines)
