"""The server of `bench sse`, a process of its own: our app over an instant worker, or a bare app beside it.

Both run behind the same hypercorn, with the same counter around them. A line on standard input makes it print what was
sent and what that took, as JSON; the end of standard input ends it.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from hypercorn.asyncio import serve
from hypercorn.config import Config

from troupellm.load_tests.workers.fake import BLOCK_SIZE, FIRST_TOKEN, FakeWorker, reply
from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.messages.worker import LaunchedStep, StepPlan, StepResult
from troupellm.server.api_processes.processes import ApiProcesses
from troupellm.server.base.exchange import CHUNKS
from troupellm.server.http.listener import bind
from troupellm.server.http.server import HypercornServer

if TYPE_CHECKING:
    from troupellm.actors.engine.engine import Engine

ANSWER_TOKENS = 1 << 17
"""Longer than any measurement."""
DISTINCT_TOKENS = 64

Send = Callable[[Any], Awaitable[None]]
Made = Callable[[], dict[str, int]]
"""The engine's work until now."""


class Counted:
    """An app, and how many pieces of bodies it has sent."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.sends = 0
        self.sent_bytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        async def counted(message: Any) -> None:
            body = message.get("body")
            if body:
                self._count(body)
            await send(message)

        pieces = (scope.get("extensions") or {}).get(CHUNKS)
        if pieces is not None:
            write = pieces.write

            def write_counted(data: bytes) -> None:
                self._count(data)
                write(data)

            pieces.write = write_counted
        await self._app(scope, receive, counted)

    def _count(self, body: bytes) -> None:
        self.sends += 1
        self.sent_bytes += len(body)


class PacedWorker(FakeWorker):
    """Answers at once, but not more often than once per `pace` seconds."""

    def __init__(self, readers: int, pace: float) -> None:
        super().__init__(
            "instant", num_blocks=(readers + 1) * (2 + ANSWER_TOKENS // BLOCK_SIZE), context=2 * ANSWER_TOKENS
        )
        self._pace = pace
        self._next = 0.0
        self._tokens = [FIRST_TOKEN + number for number in range(DISTINCT_TOKENS)]
        self.tokens = 0

    def launch(self, plan: StepPlan) -> LaunchedStep:
        now = time.perf_counter()
        if now < self._next:
            time.sleep(self._next - now)
        self._next = max(now, self._next) + self._pace
        result = super().launch(plan)
        assert isinstance(result, StepResult)
        self.tokens += len(result.tokens)
        token = self._tokens[plan.step % DISTINCT_TOKENS]
        return reply(plan, result.token_counts, (token,) * len(result.tokens))


async def _bare(scope: Any, receive: Any, send: Send, *, chunk: bytes, interval: float) -> None:
    """The least work of a streaming app: constant chunks, one per interval."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    due = time.monotonic()
    while True:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        due = max(due + interval, time.monotonic())
        await asyncio.sleep(due - time.monotonic())


async def _serve(args: argparse.Namespace) -> None:
    config = ServerConfig(port=0, disable_access_log=True, api_server_count=args.fronts)
    listener, url = bind(config)
    if args.chunk_bytes:
        chunk = b"data: " + b"x" * max(1, args.chunk_bytes - 8) + b"\n\n"

        async def bare(scope: Any, receive: Any, send: Send) -> None:
            await _bare(scope, receive, send, chunk=chunk, interval=args.flush_ms / 1000)

        if args.stock:
            await _run_stock(Counted(bare), listener, url)
        else:
            await _run(Counted(bare), config, listener, url, lambda: {"tokens": 0})
        return
    from troupellm.actors.engine.engine import Engine
    from troupellm.load_tests.random_model import SHAPES, write_random_model
    from troupellm.server.app.app import asgi

    worker = PacedWorker(args.readers, args.step_ms / 1000)
    engine = Engine(
        write_random_model(Path(args.model_folder), SHAPES["tiny"]),
        worker=lambda _: worker,
        served_model_name=("tiny",),
        max_num_seqs=args.readers,
        max_num_batched_tokens=max(2048, args.readers),
        max_num_queued_reqs=args.readers,
        flush_interval=args.flush_ms / 1000,
        stall_timeout=0,
    )
    async with engine:

        def made() -> dict[str, int]:
            return {"tokens": worker.tokens, "paused": engine.snapshot().scheduler.paused}

        if args.fronts:
            await _run_fronts(engine, config, listener, url, made)
        else:
            await _run(Counted(asgi(engine, config=config)), config, listener, url, made)


async def _run(app: Counted, config: ServerConfig, listener: Any, url: str, made: Made) -> None:
    front = HypercornServer(app, config, listener)
    async with anyio.create_task_group() as group:
        group.start_soon(front.run)
        await _answer(url, lambda: {"sends": app.sends, "bytes": app.sent_bytes, **made()})
        await front.stop(0.0)
        group.cancel_scope.cancel()


async def _run_stock(app: Counted, listener: Any, url: str) -> None:
    """Behind hypercorn as it comes."""
    settings = Config()
    settings.bind = [f"fd://{listener.detach()}"]
    settings.accesslog = settings.errorlog = None
    over = asyncio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(partial(serve, app, settings, shutdown_trigger=over.wait))
        await _answer(url, lambda: {"sends": app.sends, "bytes": app.sent_bytes, "tokens": 0})
        over.set()


async def _run_fronts(engine: "Engine", config: ServerConfig, listener: Any, url: str, made: Made) -> None:
    """HTTP in processes of its own, whose sends their readers count."""
    fleet = ApiProcesses(config, listener)
    async with anyio.create_task_group() as group:
        await group.start(fleet.run)
        await fleet.open(engine)
        await _answer(url, lambda: {"sends": 0, "bytes": 0, **made()})
        await fleet.stop(0.0)
        group.cancel_scope.cancel()


async def _answer(url: str, counts: Callable[[], dict[str, int]]) -> None:
    import psutil  # comes with the test tools; the command that reads this file's constants tells if it is missing

    process = psutil.Process()
    print(json.dumps({"url": url}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        children = process.children()
        fronts = [child.cpu_times() for child in children]
        seen = {
            **counts(),
            "cpu": time.process_time(),
            "fronts_cpu": sum(times.user + times.system for times in fronts),
            "wall": time.monotonic(),
            "rss": sum(one.memory_info().rss for one in (process, *children)),
        }
        print(json.dumps(seen), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-folder", required=True, help="where to write the model; whoever made it removes it")
    parser.add_argument("--readers", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--flush-ms", type=float, required=True)
    parser.add_argument("--fronts", type=int, default=0, help="HTTP in so many processes of its own")
    parser.add_argument("--stock", action="store_true", help="the bare app behind hypercorn as it comes")
    parser.add_argument("--chunk-bytes", type=int, default=0, help="a bare app that sends chunks of so many bytes")
    anyio.run(_serve, parser.parse_args(), backend_options={"use_uvloop": find_spec("uvloop") is not None})


if __name__ == "__main__":
    main()
