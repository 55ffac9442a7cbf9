"""`bench overload`: goodput at several times the capacity, how fast refusals are, and a polite key beside a flood."""

import argparse
import json
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec

from troupellm.load_tests.random_model import SHAPES, write_random_model
from troupellm.load_tests.workers.fake import FakeWorker
from troupellm.load_tests.workers.timed import TimedWorker
from troupellm.protocol.config.engine import TenantConfig
from troupellm.protocol.errors import EngineOverloaded, QueueTimeout

if TYPE_CHECKING:
    from troupellm.actors.engine.engine import Engine

PROMPT = list(range(1, 33))
CONTEXT, NUM_BLOCKS = 4096, 8192
WARM_UP = 0.5
"""Seconds at the start of a phase that are not counted: the room fills up first."""
POLITE_PERIOD = 0.1
"""Seconds between requests of the polite key."""
RECOVERY_LIMIT = 5.0
REFUSED_PAUSE = 0.01
"""Seconds that a client leaves after a refusal: one that asks again at once would have the processor for itself."""


class Outcome(msgspec.Struct):
    """The outcomes of the requests of one phase. Seconds."""

    offered: int = 0
    good: int = 0
    late: int = 0
    first_token: list[float] = []
    refusals: list[float] = []
    """How long each refused request had to wait for that."""
    recovered: float = 0.0
    """From the last request of the load to the end of the first one that was as fast as usual; 0 if not measured."""


class Report(msgspec.Struct, kw_only=True):
    """Rates are requests per second, times milliseconds."""

    peak: float
    goodput: float
    goodput_ratio: float
    offered: float
    refused: int
    refusal_p99_ms: float
    refusal_max_ms: float
    recovery_s: float
    step_ms: float
    solo_p99_ms: float
    flooded_p99_ms: float
    flooded_limit_ms: float
    """Twice the solo value and a step."""
    flooded_refused: int
    """Requests of the polite key that were refused during the flood."""


def run(args: argparse.Namespace) -> int:
    backend = {"use_uvloop": find_spec("uvloop") is not None}
    with tempfile.TemporaryDirectory(prefix="troupe-overload-") as name:
        folder = write_random_model(Path(name) / "model", SHAPES["tiny"])
        report = anyio.run(_measure, args, folder, backend_options=backend)
    print(_text(report))
    if args.result_json:
        Path(args.result_json).write_text(json.dumps(msgspec.structs.asdict(report)), encoding="utf-8")
    return 0


async def _measure(args: argparse.Namespace, folder: Path) -> Report:
    from troupellm.actors.engine.engine import Engine

    async with Engine(
        folder,
        worker=lambda _: TimedWorker(FakeWorker("timed", num_blocks=NUM_BLOCKS, context=CONTEXT), args.step_ms / 1000),
        max_num_seqs=args.max_num_seqs,
        max_num_queued_reqs=args.max_num_queued_reqs,
        tenants=(TenantConfig(name="loud"), TenantConfig(name="polite")),
    ) as engine:
        load = _Load(engine, args)
        solo = await load.polite(args.seconds)
        peak = await load.closed_loop(args.seconds)
        usual = 2 * _percentile(solo.first_token, 0.99)
        overload = await load.open_loop(args.factor * peak.good / args.seconds, args.seconds, usual=usual)
        flooded = Outcome()
        async with anyio.create_task_group() as group:
            group.start_soon(load.open_loop, args.factor * peak.good / args.seconds, args.seconds + 1.0)
            await anyio.sleep(0.5)  # until the flood has filled the room
            flooded = await load.polite(args.seconds)
    solo_p99 = 1000 * _percentile(solo.first_token, 0.99)
    return Report(
        peak=peak.good / args.seconds,
        goodput=overload.good / args.seconds,
        goodput_ratio=overload.good / max(peak.good, 1),
        offered=overload.offered / args.seconds,
        refused=len(overload.refusals),
        refusal_p99_ms=1000 * _percentile(overload.refusals, 0.99),
        refusal_max_ms=1000 * max(overload.refusals, default=0.0),
        recovery_s=overload.recovered,
        step_ms=args.step_ms,
        solo_p99_ms=solo_p99,
        flooded_p99_ms=1000 * _percentile(flooded.first_token, 0.99),
        flooded_limit_ms=2 * solo_p99 + args.step_ms,
        flooded_refused=len(flooded.refusals),
    )


class _Load:
    def __init__(self, engine: "Engine", args: argparse.Namespace) -> None:
        self._engine = engine
        self._max_tokens: int = args.output_len
        self._clients: int = args.max_num_seqs + min(args.max_num_seqs, args.max_num_queued_reqs)
        self._good_within = args.ttft_ms / 1000

    async def closed_loop(self, seconds: float) -> Outcome:
        """As many clients as sequences fit, and as many that wait, if they may; each with one request after another:
        the capacity."""
        outcome = Outcome()
        begin = time.perf_counter() + WARM_UP
        end = begin + seconds

        async def client() -> None:
            while time.perf_counter() < end:
                if not await self._ask(outcome, "loud", begin, end):
                    await anyio.sleep(REFUSED_PAUSE)

        async with anyio.create_task_group() as group:
            for _ in range(self._clients):
                group.start_soon(client)
        return outcome

    async def open_loop(self, rate: float, seconds: float, *, usual: float | None = None) -> Outcome:
        """Requests at even intervals, independent of their outcomes; requests that are open at the end do not count.

        Args:
            usual: seconds to a first token. Given, the recovery is timed, too, while those who wait are still there.
        """
        outcome = Outcome()
        start = time.perf_counter()
        begin = start + WARM_UP
        async with anyio.create_task_group() as group:
            for number in range(int(rate * (WARM_UP + seconds))):
                await anyio.sleep(max(0.0, start + number / rate - time.perf_counter()))
                group.start_soon(self._ask, outcome, "loud", begin, begin + seconds)
            if usual is not None:
                outcome.recovered = await self._recovery(usual)
        return outcome

    async def polite(self, seconds: float) -> Outcome:
        """One request at a time under another key."""
        outcome = Outcome()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            await self._ask(outcome, "polite", 0.0, end)
            await anyio.sleep(POLITE_PERIOD)
        return outcome

    async def _recovery(self, usual: float) -> float:
        """Seconds until a request gets its first token as fast as usual again."""
        begin = time.perf_counter()
        while time.perf_counter() - begin < 2 * RECOVERY_LIMIT:
            outcome = Outcome()
            if not await self._ask(outcome, "loud", 0.0, float("inf")):
                await anyio.sleep(REFUSED_PAUSE)
            elif outcome.first_token[0] <= usual:
                break
        return time.perf_counter() - begin

    async def _ask(self, outcome: Outcome, tenant: str, counted_from: float, counted_to: float) -> bool:
        """Whether it was answered, and not refused."""
        begin = time.perf_counter()
        outcome.offered += counted_from <= begin <= counted_to
        try:
            async with self._engine.stream(
                PROMPT, max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True, wait=False, tenant=tenant
            ) as stream:
                await anext(stream)
                first = time.perf_counter() - begin
                outcome.first_token.append(first)
                async for _ in stream:
                    pass
        except (EngineOverloaded, QueueTimeout):
            outcome.refusals.append(time.perf_counter() - begin)
            return False
        if counted_from <= time.perf_counter() <= counted_to:
            good = first <= self._good_within
            outcome.good += good
            outcome.late += not good
        return True


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _text(report: Report) -> str:
    refused = f"{report.refused} in p99 {report.refusal_p99_ms:.1f} ms, worst {report.refusal_max_ms:.1f} ms"
    flooded = f"{report.flooded_p99_ms:.1f} ms, {report.flooded_refused} refused"
    rows = (
        ("capacity", f"{report.peak:.1f} requests/s", f"steps of {report.step_ms:g} ms"),
        ("offered", f"{report.offered:.1f} requests/s", ""),
        ("goodput", f"{report.goodput:.1f} requests/s", f"{report.goodput_ratio:.2f}x; target: at least 0.90x"),
        ("refusals", refused, "target: 50 ms"),
        ("recovered", f"{report.recovery_s:.2f} s", f"target: {RECOVERY_LIMIT:g} s"),
        ("polite key alone", f"{report.solo_p99_ms:.1f} ms", "first token, p99"),
        ("beside the flood", flooded, f"target: {report.flooded_limit_ms:.1f} ms"),
    )
    return "\n".join(f"{name:18}{value:42}{note}".rstrip() for name, value, note in rows)
