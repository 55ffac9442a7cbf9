"""`bench input`: long request bodies go through a real server while a stream runs beside them and a probe asks.

The probe asks `/livez` all the time over one connection, and the stream is a completion of one sequence. Their longest
wait while a body is under way says for how long the server's event loop stood still: a body that is decoded,
rendered or tokenized while the interpreter's lock is held stops both.
"""

import argparse
import asyncio
import http.client
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from troupellm.load_tests.client.client import Target, exchange
from troupellm.load_tests.client.records import RequestRecord, SampleRequest
from troupellm.load_tests.random_model import Shape, write_model_of_texts
from troupellm.load_tests.traffic.bodies import Body, bodies
from troupellm.load_tests.traffic.own_server import OwnServer, own_server

PROBE_BAR = 0.100
"""Seconds within which every probe is to be answered."""
GAP_BAR = 0.150
"""Seconds between two chunks of the stream, at most."""
PROBE_PAUSE = 0.005
QUIET_SECONDS = 3.0
"""Without any body, to show how much of a wait is the machine's."""
REQUEST_SECONDS = 120.0
STREAM_SECONDS = 600.0
STREAM_TOKENS = 4_096
WARM_CHUNKS = 50
"""Of the stream, before anything is measured."""
SHAPE = Shape(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=2048,
    max_position_embeddings=2**20,
)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The waits beside the bodies of one route, in seconds."""

    name: str
    body_seconds: list[float]
    statuses: list[int]
    longest_probe: float
    longest_gap: float
    wrong: bool = False
    """A body had another answer than the right one."""

    @property
    def kept(self) -> bool:
        return not self.wrong and self.longest_probe < PROBE_BAR and self.longest_gap < GAP_BAR


class _Watch:
    """Times of the probe's answers and of the stream's chunks."""

    def __init__(self, server: OwnServer) -> None:
        self._server = server
        self._url = urlsplit(server.url)
        self.probes: list[tuple[float, float]] = []
        """When each was sent, and when it was answered."""
        self.chunks: list[float] = []

    async def probe(self) -> None:
        reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        request = f"GET /livez HTTP/1.1\r\nhost: {self._url.netloc}\r\n\r\n".encode()
        try:
            while True:
                sent = time.perf_counter()
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"/livez answered {head.splitlines()[0].decode()}")
                fields = dict(line.lower().split(b": ", 1) for line in head.splitlines()[1:] if line)
                await reader.readexactly(int(fields[b"content-length"]))
                self.probes.append((sent, time.perf_counter()))
                await asyncio.sleep(PROBE_PAUSE)
        finally:
            writer.close()

    async def stream(self) -> None:
        """One completion after another.

        Raises:
            RuntimeError: one failed.
        """
        body = {"temperature": 0.0, "ignore_eos": True}
        server = self._server
        target = Target.completions(server.url, model=server.model, body=body, timeout=STREAM_SECONDS)
        while True:
            record = RequestRecord(index=0, wanted_tokens=STREAM_TOKENS, ignore_eos=True, chunk_times=self.chunks)
            await exchange(target, SampleRequest(prompt="Once upon a time", output_len=STREAM_TOKENS), record)
            if record.error:
                raise RuntimeError(f"the stream beside the bodies failed: {record.error}")
            self.chunks.append(time.perf_counter())

    def longest_probe(self, begin: float, end: float) -> float:
        return max((answered - sent for sent, answered in self.probes if answered > begin and sent < end), default=0.0)

    def longest_gap(self, begin: float, end: float) -> float:
        return max((after - before for before, after in pairwise(self.chunks) if after > begin and before < end))


def run(args: argparse.Namespace) -> int:
    """1 when a wait is over its bar, or a body had a wrong answer.

    Raises:
        RuntimeError: the server did not start or stop as it should, or the stream failed.
    """
    routes = asyncio.run(_measure(args))
    print(table(routes, args.mebibytes))
    if args.result_json:
        Path(args.result_json).write_bytes(msgspec.json.encode(routes))
    return 0 if all(route.kept for route in routes) else 1


async def _measure(args: argparse.Namespace) -> list[Route]:
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(_long_context_model(Path(folder)))
        async with own_server(model, args.serve_arg) as server:
            routes = await _routes(server, args.mebibytes * 2**20, args.rounds)
            await server.end()
    return routes


def _long_context_model(folder: Path) -> Path:
    """No text of a body is refused before it is tokenized."""
    return write_model_of_texts(folder, SHAPE)


async def _routes(server: OwnServer, num_bytes: int, rounds: int) -> list[Route]:
    from tqdm import tqdm

    asked = bodies(server.model, num_bytes)
    async with _watching(server) as watch:
        begin = time.perf_counter()
        await asyncio.sleep(QUIET_SECONDS)
        routes = [_route("(no body)", watch, [], [], begin)]
        for body in tqdm(asked, unit="route"):
            begin = time.perf_counter()
            answers = [await asyncio.to_thread(send, server.url, body) for _ in range(rounds)]
            seconds, statuses = [each[0] for each in answers], [each[1] for each in answers]
            await asyncio.sleep(PROBE_BAR + GAP_BAR)  # so that a wait at the very end is seen
            wrong = any(status not in body.statuses for status in statuses)
            routes.append(_route(body.name, watch, seconds, statuses, begin, wrong=wrong))
    return routes


@asynccontextmanager
async def _watching(server: OwnServer) -> AsyncIterator[_Watch]:
    watch = _Watch(server)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(watch.probe()), group.create_task(watch.stream())]
        async with asyncio.timeout(REQUEST_SECONDS):
            while len(watch.chunks) < WARM_CHUNKS:
                await asyncio.sleep(PROBE_PAUSE)
        yield watch
        for task in tasks:
            task.cancel()


def _route(
    name: str, watch: _Watch, seconds: list[float], statuses: list[int], begin: float, *, wrong: bool = False
) -> Route:
    end = time.perf_counter()
    probe, gap = watch.longest_probe(begin, end), watch.longest_gap(begin, end)
    return Route(name=name, body_seconds=seconds, statuses=statuses, longest_probe=probe, longest_gap=gap, wrong=wrong)


def send(url: str, body: Body) -> tuple[float, int]:
    """Seconds from sending a body to the end of its answer, and the status. Blocks."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=REQUEST_SECONDS)
    began = time.perf_counter()
    try:
        connection.request("POST", body.path, body.content, {"content-type": "application/json"})
        answer = connection.getresponse()
        while answer.read(2**16):
            """The answer's own content is checked elsewhere."""
        return time.perf_counter() - began, answer.status
    finally:
        connection.close()


def table(routes: Sequence[Route], mebibytes: int) -> str:
    lines = [f"bodies of {mebibytes} MiB; milliseconds, the longest of each while they were under way"]
    lines.append(f"{'':<18}{'answers':>12}{'body':>10}{'/livez':>10}{'stream gap':>12}")
    for route in routes:
        statuses = ", ".join(map(str, sorted(set(route.statuses)))) or "-"
        slowest = max(route.body_seconds, default=0.0) * 1e3
        verdict = "WRONG ANSWER" if route.wrong else "kept" if route.kept else "MISSED"
        lines.append(
            f"{route.name:<18}{statuses:>12}{slowest:>10.0f}{route.longest_probe * 1e3:>10.1f}"
            f"{route.longest_gap * 1e3:>12.1f}   {verdict}"
        )
    lines.append(f"wanted: /livez within {PROBE_BAR * 1e3:g} ms, gaps of the stream under {GAP_BAR * 1e3:g} ms")
    return "\n".join(lines)
