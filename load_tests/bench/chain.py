"""`bench chain`: microseconds per step of the whole actor chain, split by actor, without any model."""

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from troupellm.load_tests.workers.instant import InstantWorker, Stamp
from troupellm.load_tests.workers.meter import Meter, metered
from troupellm.load_tests.workers.timed import TimedWorker
from troupellm.protocol.messages.worker import Worker

if TYPE_CHECKING:
    from troupellm.actors.engine.engine import Engine

PROMPT_TOKENS = 8
NO_BUDGET = 1 << 40
"""An instant worker outruns any reader that is woken every 20 ms; here that must not pause it."""
BUDGETS_US = {256: 450.0, 1024: 1800.0}
"""Host budget of a step at the server's flush interval."""


class Row(msgspec.Struct, kw_only=True):
    """Microseconds per step, medians over windows. The split comes from a second, metered run."""

    running: int
    flush_ms: float
    """Between two wakes of one reader: less than was asked for where there are few, more where there are many."""
    total: float
    """Wall time, without wrappers."""
    loop_cpu: float
    """CPU time of the event loop's thread; 0 where the system has no such clock."""
    thread_cpu: float
    """CPU time of the worker's thread: the instant worker and its end of the hop."""
    metered_total: float
    plan: float
    update: float
    scheduler: float
    """The scheduler's loop around plan and update: mailboxes, statistics, snapshot."""
    worker: float
    """The worker actor's part on the event loop; its thread is in `rest`."""
    output: float
    readers: float
    """The consumers' own coroutines."""
    rest: float
    """Hop to the worker's thread and back, the instant worker itself, the event loop."""


def run(args: argparse.Namespace) -> int:
    backend = {"use_uvloop": find_spec("uvloop") is not None}
    rows: list[Row] = []
    print(_heading(), flush=True)
    try:
        _measure_all(args, backend, rows)
    except TimeoutError:
        print(f"bench chain: a measurement took longer than {args.time_limit_sec:g} s", file=sys.stderr)
        return 1
    if args.result_json:
        Path(args.result_json).write_text(json.dumps([msgspec.structs.asdict(row) for row in rows]), encoding="utf-8")
    return 0


def chain_total(running: int, flush_ms: float) -> float:
    """Wall microseconds of one step of the whole chain, from a short run for comparisons.

    Raises:
        TimeoutError: it took longer than two minutes.
    """
    args = argparse.Namespace(window_steps=100, windows=5, step_ms=0.0, time_limit_sec=120.0, plain_interval=False)
    backend = {"use_uvloop": find_spec("uvloop") is not None}
    with tempfile.TemporaryDirectory(prefix="troupe-chain-") as name:
        folder = _model_folder(Path(name))
        stamps = anyio.run(_measure, args, folder, running, flush_ms, None, backend_options=backend)
    return _per_step(args.window_steps, stamps)["total"]


def _measure_all(args: argparse.Namespace, backend: dict[str, bool], rows: list[Row]) -> None:
    """Append and print one row per flush interval and number of running sequences."""
    with tempfile.TemporaryDirectory(prefix="troupe-chain-") as name:
        folder = _model_folder(Path(name))
        for flush_ms in args.flush_ms:
            for running in args.running:
                plain = anyio.run(_measure, args, folder, running, flush_ms, None, backend_options=backend)
                meter = Meter()
                split = anyio.run(_measure, args, folder, running, flush_ms, meter, backend_options=backend)
                rows.append(_row(args.window_steps, running, _pause_ms(args, flush_ms, running), plain, split))
                print(_line(rows[-1]), flush=True)


async def _measure(
    args: argparse.Namespace, folder: Path, running: int, flush_ms: float, meter: Meter | None
) -> list[Stamp]:
    """Run one engine until its worker has seen enough steps; give the stamps at the windows' borders."""
    from troupellm.actors.engine.engine import Engine

    workers: list[InstantWorker] = []
    full = threading.Event()
    get_clock = getattr(time, "pthread_getcpuclockid", None)
    loop_clock = get_clock(threading.get_ident()) if get_clock is not None else None

    def make_worker(_: Path) -> Worker:
        worker = InstantWorker(
            running,
            window=args.window_steps,
            stamps=args.windows + 2,
            parts=meter.seconds if meter is not None else {},
            loop_clock=loop_clock,
            on_full=full.set,
        )
        workers.append(worker)
        return TimedWorker(worker, args.step_ms / 1000.0) if args.step_ms else worker

    async with AsyncExitStack() as stack:
        if meter is not None:
            stack.enter_context(metered(meter))
        engine = await stack.enter_async_context(
            Engine(
                folder,
                worker=make_worker,
                max_num_seqs=running,
                max_num_batched_tokens=max(2048, running),
                max_num_queued_reqs=running,
                stream_budget_tokens=NO_BUDGET,
                flush_interval=flush_ms / 1000.0,
                **_rates(args, flush_ms),
            )
        )
        with anyio.fail_after(args.time_limit_sec):
            await _read_all(engine, running, workers[0].max_tokens, full, meter)
    return workers[0].stamps


def _rates(args: argparse.Namespace, flush_ms: float) -> dict[str, Any]:
    """The server's, of wakes of all streams in a second."""
    from troupellm.server.host.server_state import STREAM_DEFAULTS

    names = ("wakes_per_second", "most_wakes_per_second")
    return {name: STREAM_DEFAULTS[name] for name in names} if flush_ms and not args.plain_interval else {}


def _pause_ms(args: argparse.Namespace, flush_ms: float, running: int) -> float:
    """Between two wakes of one stream, as the output actor has it."""
    rates = _rates(args, flush_ms)
    if not rates:
        return flush_ms
    few = min(flush_ms, 1000.0 * running / rates["wakes_per_second"])
    return float(max(few, min(1000.0 * running / rates["most_wakes_per_second"], 100.0)))


async def _read_all(
    engine: "Engine", running: int, max_tokens: int, full: threading.Event, meter: Meter | None
) -> None:
    """Read `running` answers at once until the worker has its stamps."""

    async def read(number: int) -> None:
        prompt = [number % 256, number // 256, *range(PROMPT_TOKENS - 2)]
        stream = engine.stream(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        async with stream:
            async for _ in stream:
                pass

    reader = read if meter is None else meter.task("readers", read)
    async with anyio.create_task_group() as group:
        for number in range(running):
            group.start_soon(reader, number)
        while not full.is_set():
            await anyio.sleep(0.05)
        group.cancel_scope.cancel()


def _row(window: int, running: int, flush_ms: float, plain: Sequence[Stamp], split: Sequence[Stamp]) -> Row:
    clean, parts = _per_step(window, plain), _per_step(window, split)
    plan, update = parts["plan"], parts["update"]
    loops = sum(parts[name] for name in ("scheduler", "worker", "output", "readers"))
    return Row(
        running=running,
        flush_ms=flush_ms,
        total=clean["total"],
        loop_cpu=clean.get("loop_cpu", 0.0),
        thread_cpu=clean["thread_cpu"],
        metered_total=parts["total"],
        plan=plan,
        update=update,
        scheduler=parts["scheduler"] - plan - update,
        worker=parts["worker"],
        output=parts["output"],
        readers=parts["readers"],
        rest=max(0.0, parts["total"] - loops),
    )


def _per_step(window: int, stamps: Sequence[Stamp]) -> dict[str, float]:
    """Microseconds per step by clock: medians over the windows after the first."""
    medians = {}
    for clock in stamps[1].seconds:
        windows = [later.seconds[clock] - earlier.seconds[clock] for earlier, later in itertools.pairwise(stamps[1:])]
        medians[clock] = 1e6 * median(windows) / window
    return medians


_COLUMNS = ("total", "loop_cpu", "thread_cpu", "plan", "update", "scheduler", "worker", "output", "readers", "rest")


def _heading() -> str:
    names = "".join(f"{name:>11}" for name in _COLUMNS)
    return f"microseconds per step\n{'running':>8}{'flush ms':>10}{names}   budget"


def _line(row: Row) -> str:
    values = "".join(f"{getattr(row, name):>11.1f}" for name in _COLUMNS)
    budget = BUDGETS_US.get(row.running) if row.flush_ms else None
    verdict = "" if budget is None else f"   {budget:.0f} {'kept' if row.total <= budget else 'MISSED'}"
    return f"{row.running:>8}{row.flush_ms:>10.1f}{values}{verdict}"


def _model_folder(folder: Path) -> Path:
    """A tokenizer to detokenize with; its weights are never read."""
    from troupellm.load_tests.random_model import SHAPES, write_random_model

    return write_random_model(folder, SHAPES["tiny"])
