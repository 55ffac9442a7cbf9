"""`bench overlap`: what a step takes beside a device of a fixed time, and what of it is the host's."""

import argparse
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import msgspec

from troupellm.load_tests.random_model import SHAPES, write_random_model
from troupellm.load_tests.workers.host_time import HostTime, host_time
from troupellm.load_tests.workers.overlap import FACTORY, FOUND, ORDERS, PROMPT_TOKENS, Orders

GOALS_US = {32: 250.0, 256: 1200.0}
"""Of the host's own time per step."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds per step while all sequences decode, the median of windows."""

    seat: str
    running: int
    device_ms: float
    step_ms: float

    @property
    def idle(self) -> float:
        """Share of the time in which the device has nothing to do."""
        return 1.0 - self.device_ms / self.step_ms


def run(args: argparse.Namespace) -> int:
    rows, host = list[Row](), list[HostTime]()
    print(f"{'seat':<9}{'running':>8}{'device ms':>11}{'step ms':>9}{'idle':>8}", flush=True)
    with tempfile.TemporaryDirectory(prefix="troupe-overlap-") as name:
        folder = write_random_model(Path(name), SHAPES["tiny"])
        for seat in args.seats:
            for running in args.running:
                for device_ms in args.device_ms:
                    try:
                        rows.append(measure(args, folder, seat, running, device_ms))
                    except TimeoutError:
                        print(f"bench overlap: longer than {args.time_limit_sec:g} s", file=sys.stderr)
                        return 1
                    print(line(rows[-1]), flush=True)
    print(
        f"\nthe host's own time per step, us\n{'running':>8}{'launch':>9}{'collect':>9}{'both':>9}   goal", flush=True
    )
    for running in args.running:
        host.append(host_time(running, args.windows * args.window_steps))
        print(host_line(host[-1]), flush=True)
    if args.result_json:
        found = {
            "rows": [{**msgspec.structs.asdict(row), "idle": row.idle} for row in rows],
            "host": [msgspec.structs.asdict(one) for one in host],
        }
        Path(args.result_json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def measure(args: argparse.Namespace, folder: Path, seat: str, running: int, device_ms: float) -> Row:
    """
    Raises:
        TimeoutError: it took too long.
    """
    orders = Orders(
        running=running,
        window=args.window_steps,
        windows=args.windows,
        device_seconds=device_ms / 1e3,
        launch_seconds=args.launch_us / 1e6,
    )
    (folder / ORDERS).write_bytes(msgspec.json.encode(orders))
    (folder / FOUND).unlink(missing_ok=True)
    options = {"use_uvloop": find_spec("uvloop") is not None}
    anyio.run(_answer_all, args, folder, seat, orders, backend_options=options)
    seconds = msgspec.json.decode((folder / FOUND).read_bytes(), type=float)
    return Row(seat=seat, running=running, device_ms=device_ms, step_ms=seconds * 1e3)


async def _answer_all(args: argparse.Namespace, folder: Path, seat: str, orders: Orders) -> None:
    from troupellm.actors.engine.engine import Engine
    from troupellm.server.host.server_state import STREAM_DEFAULTS

    names = ("wakes_per_second", "most_wakes_per_second")
    rates: dict[str, Any] = {name: STREAM_DEFAULTS[name] for name in names} if args.flush_ms else {}

    async def read(number: int) -> None:
        prompt = [number % 256, number // 256, *range(PROMPT_TOKENS - 2)]
        async with engine.stream(prompt, max_tokens=orders.max_tokens, temperature=0.0, ignore_eos=True) as stream:
            async for _ in stream:
                pass

    engine = Engine(
        folder,
        worker=FACTORY,
        worker_process=seat == "process",
        spare_worker=False,
        max_num_seqs=orders.running,
        max_num_batched_tokens=PROMPT_TOKENS * orders.running,
        max_num_queued_reqs=orders.running,
        flush_interval=args.flush_ms / 1e3,
        **rates,
    )
    with anyio.fail_after(args.time_limit_sec):
        async with engine, anyio.create_task_group() as group:
            for number in range(orders.running):
                group.start_soon(read, number)


def line(row: Row) -> str:
    return f"{row.seat:<9}{row.running:>8}{row.device_ms:>11.2f}{row.step_ms:>9.3f}{row.idle:>8.1%}"


def host_line(found: HostTime) -> str:
    goal = GOALS_US.get(found.running)
    verdict = "" if goal is None else f"   {goal:.0f} {'kept' if found.total_us <= goal else 'MISSED'}"
    return f"{found.running:>8}{found.launch_us:>9.1f}{found.collect_us:>9.1f}{found.total_us:>9.1f}{verdict}"
