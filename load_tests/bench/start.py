"""`bench start`: from starting `troupellm serve` to its port, to its readiness, and to the first token of an answer.

A client sees all of it from outside: it tries to connect, asks `/readyz`, and sends a request once that is 200. The
environment is in place, and a first start, which is not counted, has read the files into memory. Beside that, how long
`--help` takes.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import httpx
import msgspec

from troupellm.load_tests.client.client import Target, exchange
from troupellm.load_tests.client.records import RequestRecord, SampleRequest
from troupellm.load_tests.peers.servers import free_port
from troupellm.load_tests.traffic.own_server import START_SECONDS, OwnServer, starting_server

BAR_SECONDS = 10.0
"""Within which the first token is wanted, on two cores."""
HELP_BAR_SECONDS = 0.5
"""Within which every help is wanted."""
HELPS = {"troupellm --help": ["--help"], "troupellm serve --help": ["serve", "--help"]}
POLL_SECONDS = 0.02
REQUEST_SECONDS = 60.0
_HOST = "127.0.0.1"
_PROMPT = SampleRequest(prompt="Once upon a time", output_len=16)


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Of one server. Seconds since its process was started."""

    bound: float
    """Connections are accepted."""
    ready: float
    first_token: float
    """Of a request that was sent when it was ready."""


class Help(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the start of the command to its end."""

    command: str
    uncounted: float
    counted: list[float]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    uncounted: Start
    starts: list[Start]
    helps: list[Help]

    def seconds(self, name: str) -> list[float]:
        return [getattr(start, name) for start in self.starts]

    @property
    def kept(self) -> bool:
        return median(self.seconds("first_token")) < BAR_SECONDS

    @property
    def helps_kept(self) -> bool:
        return all(median(each.counted) < HELP_BAR_SECONDS for each in self.helps)


def run(args: argparse.Namespace) -> int:
    """0 when every server started, answered and stopped; raises RuntimeError where one did not."""
    report = asyncio.run(_measure(args))
    print(text(report))
    if args.result_json:
        Path(args.result_json).write_bytes(msgspec.json.encode(report))
    return 0


async def _measure(args: argparse.Namespace) -> Report:
    from tqdm import tqdm

    starts = []
    with tqdm(total=args.rounds + 1, unit="start") as bar:
        for _ in range(args.rounds + 1):
            starts.append(await start_once(args.model, args.serve_arg))
            bar.update()
    return Report(uncounted=starts[0], starts=starts[1:], helps=[_help(name, args.rounds) for name in HELPS])


def _help(name: str, rounds: int) -> Help:
    uncounted, *counted = [help_once(HELPS[name]) for _ in range(rounds + 1)]
    return Help(command=name, uncounted=uncounted, counted=counted)


def help_once(words: list[str]) -> float:
    """
    Raises:
        subprocess.CalledProcessError: there is no such help.
    """
    began = time.perf_counter()
    command = [sys.executable, "-m", "troupellm.server.cli.main", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


async def start_once(model: str | None, flags: list[str]) -> Start:
    """
    Raises:
        RuntimeError: the server did not start, did not answer, or did not stop as it should.
    """
    port = free_port()
    began = time.perf_counter()
    async with starting_server(model, [*flags, f"--port={port}"]) as server:
        bound = await _when(server, lambda: _connects(port))
        async with httpx.AsyncClient(base_url=f"http://{_HOST}:{port}", trust_env=False, verify=False) as client:
            ready = await _when(server, lambda: _is_ready(client))
        await server.ready()
        first_token = await _first_token(server)
        await server.end()
    return Start(bound=bound - began, ready=ready - began, first_token=first_token - began)


async def _when(server: OwnServer, holds: Callable[[], Awaitable[bool]]) -> float:
    """The moment when something holds for the first time."""
    try:
        async with asyncio.timeout(START_SECONDS):
            while not await holds():
                if not server.running:
                    await server.ready()  # which raises, with all that it said, unless it had been ready before
                    raise RuntimeError("the server ended by itself:\n" + "\n".join(server.log))
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        said = "\n".join(server.log)
        raise RuntimeError(f"the server was not that far within {START_SECONDS:.0f} s:\n{said}") from None
    return time.perf_counter()


async def _connects(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(_HOST, port)
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).status_code == 200
    except httpx.HTTPError:  # it has gone, or is too busy to answer
        return False


async def _first_token(server: OwnServer) -> float:
    body = {"temperature": 0.0, "ignore_eos": True}
    target = Target.completions(server.url, model=server.model, body=body, timeout=REQUEST_SECONDS)
    record = RequestRecord(index=0, wanted_tokens=_PROMPT.output_len, ignore_eos=True)
    await exchange(target, _PROMPT, record)
    if record.error:
        raise RuntimeError(f"the first request failed: {record.error}")
    return record.chunk_times[0]


def text(report: Report) -> str:
    lines = [f"{'seconds since the start of the process':<40}{'median':>8}{'least':>8}{'most':>8}{'uncounted':>11}"]
    for label, name in (("port bound", "bound"), ("ready", "ready"), ("first token", "first_token")):
        lines.append(_line(label, report.seconds(name), getattr(report.uncounted, name)))
    lines += [_line(f"end of {each.command}", each.counted, each.uncounted) for each in report.helps]
    verdict, helps_verdict = ("kept" if kept else "MISSED" for kept in (report.kept, report.helps_kept))
    lines.append(f"{len(report.starts)} starts; the first token is wanted within {BAR_SECONDS:g} s   {verdict}")
    lines.append(f"every help is wanted within {HELP_BAR_SECONDS:g} s   {helps_verdict}")
    return "\n".join(lines)


def _line(label: str, seconds: list[float], uncounted: float) -> str:
    return f"{label:<40}{median(seconds):>8.2f}{min(seconds):>8.2f}{max(seconds):>8.2f}{uncounted:>11.2f}"
