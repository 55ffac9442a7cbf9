"""`bench hostile`: one key floods a real server, and the figures say how long the other keys wait.

schemas: many clients send large new schemas at once. A running stream must go on, and a small new schema of another key
must be answered. lists: one key sends lists of many prompts. chats: one key sends many short chats. bodies: one key
sends more bytes at once than the server has room for. Each client must get its answer, and the server's memory must
not grow with their number.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from troupellm.load_tests.random_model import Shape, write_model_of_texts
from troupellm.load_tests.traffic.held import own_mebibytes
from troupellm.load_tests.traffic.hostile import Traffic, key_file, percentile_95, response_format, schema
from troupellm.load_tests.traffic.own_server import OwnServer, own_server

GAP_BAR = 3.0
"""Times the longest gap beside as many plain requests."""
SMALL_BAR = 1.0
"""Seconds to the answer of another key's new small schema."""
LIST_BAR = 2.5
"""Times the p95 of first tokens beside one request with as many sequences."""
BODY_BAR = 60.0
"""Seconds to the last answer: bodies wait for room during the server's body timeout."""
MEMORY_BAR = 200.0
"""MiB by which the server's process may grow while bodies come ..."""
KEPT_BAR = 50.0
"""... and that may be left of it after `REST_SECONDS`."""
REST_SECONDS = 10.0
SAMPLE_SECONDS = 0.02
"""Between two looks at the memory of the server's process."""
ANSWER_TOKENS = 16
SMALL_AFTER = 0.3
"""Seconds after the large schemas."""
WARM_SECONDS = 2.0
"""After the first guide, with which the server gets ready to compile two at once."""
SIBLINGS = 64
CHATS = 32
SHAPE = Shape(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=2048,
    max_position_embeddings=4096,
)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A wait beside a flood in seconds, or memory in MiB."""

    flood: str
    measured: str
    value: float
    bar: float
    unit: Literal["s", "MiB"] = "s"
    beside_plain: float | None = None
    """The same beside plain requests, from which the bar follows."""
    failed: str = ""
    """The first error of the flood, or of the waiting request."""

    @property
    def kept(self) -> bool:
        return not self.failed and self.value <= self.bar


def run(args: argparse.Namespace) -> int:
    """1 when a figure is over its bar, a request failed, or the worker was replaced.

    Raises:
        RuntimeError: the server did not start or stop as it should, or the watched stream failed.
    """
    figures = asyncio.run(_measure(args))
    print(table(figures))
    if args.result_json:
        Path(args.result_json).write_bytes(msgspec.json.encode(figures))
    return 0 if all(figure.kept for figure in figures) else 1


async def _measure(args: argparse.Namespace) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="troupe-hostile-") as name:
        folder = Path(name)
        keys = folder / "keys.toml"
        keys.write_text(key_file(), encoding="utf-8")
        model = args.model or str(write_model_of_texts(folder / "model", SHAPE))
        async with own_server(model, ["--api-key-file", str(keys), *args.serve_arg]) as server:
            before = server.workers()[:1]
            traffic = Traffic(server)
            figures: list[Figure] = []
            if "schemas" in args.parts:
                for clients in args.clients:
                    figures += await _schemas(traffic, clients, args.schema_bytes)
            if "lists" in args.parts:
                figures += await _lists(traffic, args.prompts, args.rounds)
            if "chats" in args.parts:
                figures += await _chats(traffic, args.rounds)
            if "bodies" in args.parts:
                figures += await _bodies(traffic, server, args.bodies, args.body_bytes)
            if server.workers()[:1] != before:
                raise RuntimeError("the worker was replaced:\n" + "\n".join(server.log))
            await server.end()
    return figures


async def _schemas(traffic: Traffic, clients: int, num_bytes: int) -> list[Figure]:
    source = random.Random(clients)
    schemas = [schema(num_bytes, source) for _ in range(clients)]
    async with traffic.stream():
        begin = time.perf_counter()
        prompts = [f"Item {number}:" for number in range(clients)]
        await asyncio.gather(*[traffic.ask("loud", prompt, ANSWER_TOKENS) for prompt in prompts])
        plain = traffic.longest_gap(begin)
        await traffic.ask("polite", "A:", ANSWER_TOKENS, response_format=response_format(schema(1, source)))
        await asyncio.sleep(WARM_SECONDS)
        begin = time.perf_counter()
        asked = [
            asyncio.ensure_future(traffic.ask("loud", prompt, ANSWER_TOKENS, response_format=response_format(wanted)))
            for prompt, wanted in zip(prompts, schemas, strict=True)
        ]
        await asyncio.sleep(SMALL_AFTER)
        small = await traffic.ask("polite", "A:", ANSWER_TOKENS, response_format=response_format(schema(1, source)))
        large = await asyncio.gather(*asked)
        guided = traffic.longest_gap(begin)
    flood = f"{clients} schemas of {num_bytes // 1000} kB"
    failed = next((record.error for record in large if record.error), "")
    return [
        Figure(
            flood=flood,
            measured="gap of a stream",
            value=guided,
            bar=GAP_BAR * plain,
            beside_plain=plain,
            failed=failed,
        ),
        Figure(
            flood=flood,
            measured="small schema of another key",
            value=small.ended - small.sent,
            bar=SMALL_BAR,
            failed=small.error,
        ),
    ]


async def _lists(traffic: Traffic, prompts: int, rounds: int) -> list[Figure]:
    """A list's prompts together are as long as those of the request with many sequences."""
    siblings = await _beside(traffic, rounds, "Go " * 200, n=SIBLINGS)
    figures = []
    for kind, wanted in (
        ("texts", [f"{number} word " * 80 for number in range(prompts)]),
        ("token ids", [[5 + number % 1000] * 1000 for number in range(prompts)]),
    ):
        seconds = await _beside(traffic, rounds, wanted)
        figures.append(
            Figure(
                flood=f"lists of {prompts} {kind}",
                measured="first token of another key",
                value=seconds,
                bar=LIST_BAR * siblings,
                beside_plain=siblings,
            )
        )
    return figures


async def _beside(traffic: Traffic, rounds: int, prompt: Any, **fields: Any) -> float:
    """The p95 of another key's first tokens while one key sends this again and again."""

    async def flood() -> None:
        while True:
            await traffic.ask("loud", prompt, ANSWER_TOKENS, ignore_eos=True, **fields)

    flooding = [asyncio.ensure_future(flood()) for _ in range(2)]
    try:
        seconds = []
        for number in range(rounds):
            await asyncio.sleep(0.1)
            record = await traffic.ask("polite", f"Word {number}", 4, ignore_eos=True)
            if record.error:
                raise RuntimeError(f"a short request failed: {record.error}")
            seconds.append(record.chunk_times[0] - record.sent)
    finally:
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    return percentile_95(seconds)


async def _chats(traffic: Traffic, rounds: int) -> list[Figure]:
    async def flood(number: int) -> None:
        while True:
            await traffic.ask("loud", f"Chat {number}", 4, chat=True)

    alone = [await traffic.ask("polite", "Hello", 4, chat=True) for _ in range(rounds)]
    flooding = [asyncio.ensure_future(flood(number)) for number in range(CHATS)]
    try:
        beside = []
        for _ in range(rounds):
            await asyncio.sleep(0.1)
            beside.append(await traffic.ask("polite", "Hello", 4, chat=True))
    finally:
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    failed = next((record.error for record in beside if record.error), "")
    return [
        Figure(
            flood=f"{CHATS} short chats",
            measured="chat of another key",
            value=percentile_95(record.ended - record.sent for record in beside),
            bar=1.0,
            beside_plain=percentile_95(record.ended - record.sent for record in alone),
            failed=failed,
        )
    ]


async def _bodies(traffic: Traffic, server: OwnServer, clients: int, num_bytes: int) -> list[Figure]:
    request = traffic.large_request("loud", num_bytes)
    before, peak = own_mebibytes(server), 0.0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, own_mebibytes(server))
            await asyncio.sleep(SAMPLE_SECONDS)

    watching = asyncio.create_task(watch())
    begin = time.perf_counter()
    statuses = await asyncio.gather(*[traffic.send_then_read(request) for _ in range(clients)])
    seconds = time.perf_counter() - begin
    watching.cancel()
    await asyncio.sleep(REST_SECONDS)
    lost = statuses.count(0)
    flood = f"{clients} bodies of {num_bytes / 2**20:.3g} MiB"
    failed = f"{lost} clients lost their answer" if lost else ""
    kept = own_mebibytes(server) - before
    return [
        Figure(flood=flood, measured="last answer", value=seconds, bar=BODY_BAR, failed=failed),
        Figure(flood=flood, measured="growth of the server", value=peak - before, bar=MEMORY_BAR, unit="MiB"),
        Figure(flood=flood, measured="growth that is left", value=kept, bar=KEPT_BAR, unit="MiB"),
    ]


def table(figures: list[Figure]) -> str:
    """One line per figure; times in milliseconds."""
    lines = [f"{'flood':<28} {'measured':<28} {'ms, MiB':>8} {'plain':>8} {'bar':>8}"]
    for figure in figures:
        scale = 1000 if figure.unit == "s" else 1
        plain = "" if figure.beside_plain is None else f"{scale * figure.beside_plain:.0f}"
        verdict = "" if figure.kept else f"  over{': ' + figure.failed if figure.failed else ''}"
        lines.append(
            f"{figure.flood:<28} {figure.measured:<28} {scale * figure.value:>8.0f} {plain:>8} "
            f"{scale * figure.bar:>8.0f}{verdict}"
        )
    return "\n".join(lines)
