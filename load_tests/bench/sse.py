"""`bench sse`: what sending events costs beside an app that does nothing else, and what stalled readers hold."""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from troupellm.load_tests.workers.sse_app import ANSWER_TOKENS

MOST_COST = 1.25
"""CPU time per send, over that of the bare app."""
LEAST_TOKENS = 100_000.0
"""Per second of CPU time, at the flush interval of a server."""
MOST_GROWTH = 16 * 2**20
"""Bytes that the server may grow by once all who do not read are paused."""
MOST_STALL_SECONDS = 45.0
"""Until they are; the server gives up a reader that takes nothing for 60 s."""
ANSWER_SECONDS = 300.0
"""For one line of the measured process."""
CHUNK_BYTES = 192
"""Of the bare app where the size of ours is not known."""
READ_BYTES = 1 << 16
STALLED_STREAM_BYTES = 1 << 10
STALLED_WINDOW_BYTES = 4096


class Subject:
    """The server process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.port = 0

    async def line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(await asyncio.wait_for(self._process.stdout.readline(), ANSWER_SECONDS))
        return found

    async def look(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return await self.line()


@asynccontextmanager
async def subject(args: argparse.Namespace, readers: int, *more: str) -> AsyncIterator[Subject]:
    flags = ["--readers", str(readers), "--step-ms", str(args.step_ms), "--flush-ms", str(args.flush_ms)]
    flags += [] if "--chunk-bytes" in more else ["--fronts", str(args.fronts)]
    with tempfile.TemporaryDirectory(prefix="troupe-sse-") as folder:  # the process is killed, and would leave it there
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "troupellm.load_tests.workers.sse_app",
            "--model-folder",
            folder,
            *flags,
            *more,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        found = Subject(process)
        try:
            found.port = int((await found.line())["url"].rpartition(":")[2])
            yield found
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when a bar is missed, 2 without psutil, which looks at the server's processes."""
    if find_spec("psutil") is None:
        print("bench sse: psutil comes with the test tools (make test)", file=sys.stderr)
        return 2
    report = asyncio.run(_measure_all(args))
    for line in _lines(report):
        print(line)
    if args.result_json:
        Path(args.result_json).write_text(json.dumps(report), encoding="utf-8")
    return int(not all(report["kept"].values()))


async def _measure_all(args: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {"kept": {}}
    if args.repeats:
        await _measure_costs(args, report)
    if args.stalled:
        print(f"{args.stalled} readers that never read", file=sys.stderr)
        stalled = report["stalled"] = await _stalled(args)
        standing = stalled["paused"] == stalled["paused_after"] == args.stalled
        still = stalled["growth"] <= MOST_GROWTH and stalled["tokens_meanwhile"] == 0
        report["kept"]["stalled"] = standing and still
    return report


async def _measure_costs(args: argparse.Namespace, report: dict[str, Any]) -> None:
    ours, bare, stock = [], [], []
    print(f"{3 * args.repeats + 1} measurements of {_seconds(args):.0f} s", file=sys.stderr)
    for number in range(args.repeats):
        print(f"round {number + 1} of {args.repeats}", file=sys.stderr)
        ours.append(await _cost(args))
        chunk = ("--chunk-bytes", str(max(CHUNK_BYTES, round(ours[-1]["bytes_per_send"]))))
        bare.append(await _cost(args, *chunk))
        stock.append(await _cost(args, *chunk, "--stock"))
    each = await _cost(args, per_token=True)
    report |= {
        "ours": _middle(ours),
        "bare": _middle(bare),
        "bare, hypercorn": _middle(stock),
        "per_token_events": each,
        "cost": _cost_ratio(ours, stock),
        "cost_on_our_front": _cost_ratio(ours, bare),
    }
    report["kept"] |= {
        "cost": report["cost"] <= MOST_COST,
        "tokens": report["ours"]["tokens_per_cpu_second"] >= LEAST_TOKENS,
        # Made and read are not counted at the same moment.
        "per_token_events": 0.95 <= each["tokens_per_event"] <= 1.05,
    }


def _seconds(args: argparse.Namespace) -> float:
    return float(args.warm_up_sec + args.seconds)


async def _cost(args: argparse.Namespace, *more: str, per_token: bool = False) -> dict[str, float]:
    async with subject(args, args.readers, *more) as server:
        counts: list[_Reader] = [_Reader() for _ in range(args.readers)]
        tasks = [asyncio.create_task(reader.read(server.port, per_token=per_token)) for reader in counts]
        await asyncio.sleep(args.warm_up_sec)
        before, events = await server.look(), sum(reader.events for reader in counts)
        await asyncio.sleep(args.seconds)
        after, events = await server.look(), sum(reader.events for reader in counts) - events
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    spent = {name: after[name] - before[name] for name in ("sends", "bytes", "tokens", "cpu", "fronts_cpu", "wall")}
    if args.fronts and not more:  # a send is one event here: what the readers saw, and what the fronts alone used
        spent |= {"sends": events, "cpu": spent["fronts_cpu"]}
    return {
        "readers": sum(reader.events > 0 for reader in counts),
        "us_per_send": 1e6 * spent["cpu"] / spent["sends"],
        "bytes_per_send": spent["bytes"] / spent["sends"],
        "sends_per_second": spent["sends"] / spent["wall"],
        "tokens_per_second": spent["tokens"] / spent["wall"],
        "tokens_per_cpu_second": spent["tokens"] / spent["cpu"],
        "tokens_per_event": round(spent["tokens"] / max(1, events), 2),
        "busy": spent["cpu"] / spent["wall"],
    }


async def _stalled(args: argparse.Namespace) -> dict[str, float]:
    """Memory with stalled readers: before they connect, once all are paused, and some time later."""
    async with subject(args, args.stalled) as server:
        idle, began = await server.look(), time.monotonic()
        writers = [await _stalled_reader(server.port) for _ in range(args.stalled)]
        before = await _standing_still(server, args.stalled)
        took = time.monotonic() - began
        await asyncio.sleep(args.seconds)
        after = await server.look()
        for writer in writers:
            writer.transport.abort()
    return {
        "readers": args.stalled,
        "paused": before["paused"],
        "paused_after": after["paused"],
        "seconds_until_paused": took,
        "rss": after["rss"],
        "held": before["rss"] - idle["rss"],
        "seconds": args.seconds,
        "growth": after["rss"] - before["rss"],
        "tokens_meanwhile": after["tokens"] - before["tokens"],
    }


async def _stalled_reader(port: int) -> asyncio.StreamWriter:
    """A client that never reads. Its window is small: with the usual one the kernels would take all that is sent."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STALLED_WINDOW_BYTES)
    plain.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
    except BaseException:
        plain.close()
        raise
    _, writer = await asyncio.open_connection(sock=plain, limit=STALLED_STREAM_BYTES)
    writer.write(_request(per_token=False))
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    return writer


async def _standing_still(server: Subject, readers: int) -> dict[str, Any]:
    """The server's state once all sequences are paused and all bytes in flight have arrived."""
    deadline = time.monotonic() + MOST_STALL_SECONDS
    before = await server.look()
    while True:
        await asyncio.sleep(1.0)
        seen = await server.look()
        still = seen["paused"] == readers and seen["tokens"] == before["tokens"]
        if still or time.monotonic() > deadline:
            return seen
        before = seen


class _Reader:
    """Reads one stream and counts its events."""

    def __init__(self) -> None:
        self.events = 0

    async def read(self, port: int, *, per_token: bool) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(_request(per_token=per_token))
            while data := await reader.read(READ_BYTES):
                self.events += data.count(b"data: ")
        finally:
            writer.transport.abort()


def _request(*, per_token: bool) -> bytes:
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": ANSWER_TOKENS, "stream": True, "ignore_eos": True}
    body |= {"temperature": 0, "stream_interval": 1} if per_token else {"temperature": 0}
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _cost_ratio(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    return median(one["us_per_send"] / other["us_per_send"] for one, other in zip(ours, theirs, strict=True))


def _middle(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(run[name] for run in runs) for name in runs[0]}


def _lines(report: dict[str, Any]) -> list[str]:
    kept = {name: "kept" if good else "MISSED" for name, good in report["kept"].items()}
    lines = _cost_lines(report, kept) if "cost" in report else []
    if "stalled" in report:
        stalled = report["stalled"]
        lines.append(
            f"{stalled['readers']} readers that never read: {stalled['paused']} paused after "
            f"{stalled['seconds_until_paused']:.0f} s, {stalled['held'] / 2**20:.0f} MiB held "
            f"({stalled['held'] / stalled['readers'] / 2**10:.0f} KiB each)"
        )
        lines.append(
            f"grown by {stalled['growth'] / 2**20:.1f} MiB in the {stalled['seconds']:.0f} s after that (at most "
            f"{MOST_GROWTH / 2**20:.0f}), {stalled['tokens_meanwhile']} tokens made meanwhile (none): {kept['stalled']}"
        )
    return lines


def _cost_lines(report: dict[str, Any], kept: dict[str, str]) -> list[str]:
    heads = (("us/send", 10), ("bytes/send", 12), ("sends/s", 10), ("tokens/s", 10), ("tokens/CPU s", 14))
    lines = [f"{'':18}" + "".join(f"{head:>{width}}" for head, width in (*heads, ("busy", 7), ("readers", 9)))]
    for name in ("bare, hypercorn", "bare", "ours", "per_token_events"):
        row = report[name]
        lines.append(
            f"{name:18}{row['us_per_send']:>10.1f}{row['bytes_per_send']:>12.0f}{row['sends_per_second']:>10.0f}"
            f"{row['tokens_per_second']:>10.0f}{row['tokens_per_cpu_second']:>14.0f}{row['busy']:>7.2f}"
            f"{row['readers']:>9.0f}"
        )
    ours, both = f"{report['cost_on_our_front']:.2f} behind our own front", f"at most {MOST_COST}: {kept['cost']}"
    lines.append(f"CPU time per send over the bare app's on hypercorn: {report['cost']:.2f} ({both}); {ours}")
    lines.append(f"tokens per second of CPU time: at least {LEAST_TOKENS:.0f}: {kept['tokens']}")
    lines.append(
        f"tokens per event on request: {report['per_token_events']['tokens_per_event']}: {kept['per_token_events']}"
    )
    return lines
