"""Both ends of a front's socket in one process, with every message encoded and decoded on its way."""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from troupellm.actors.engine.engine import Engine
from troupellm.actors.remote.client import RemoteEngine
from troupellm.actors.runtime.ports import LoopPort, SystemClock, SystemRandomness
from troupellm.actors.runtime.thread_pool import ThreadPool
from troupellm.protocol.wire.api_process import AskMetrics, FromApiProcess, MetricsText, Status, ToApiProcess


class Wire:
    """One direction. A closed gate is a reader that takes nothing."""

    def __init__(self, kind: Any) -> None:
        self.open = True
        self.frames: list[Any] = []
        """Everything that crossed."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting: deque[bytes] = deque()
        self._changed = anyio.Event()

    def post(self, message: Any) -> None:
        self._waiting.append(self._encoder.encode(message))
        self._tell()

    def set_open(self, is_open: bool) -> None:
        self.open = is_open
        self._tell()

    async def drained(self) -> None:
        """A kernel buffer of one frame."""
        while self._waiting:
            await self._changed.wait()

    async def pump(self, handle: Any) -> None:
        while True:
            while self.open and self._waiting:
                message = self._decoder.decode(self._waiting.popleft())
                self.frames.append(message)
                handle(message)
                self._tell()
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class AheadClock(SystemClock):
    """The system's clock, and some seconds more."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


class FrontPair:
    def __init__(self, engine: Engine, threads: ThreadPool) -> None:
        self.engine = engine
        self.clock = AheadClock()
        self.to_front, self.from_front = Wire(ToApiProcess), Wire(FromApiProcess)
        self.session = engine.api_process_session(self.to_front.post, self.to_front.drained)
        self.remote = RemoteEngine(
            engine.serving(),
            self.status(),
            tokenizer=engine.tokenizer,
            chat_template=engine.chat_template,
            chat_format=engine.chat_format,
            post=self.from_front.post,
            on_loop=LoopPort().post,
            threads=threads,
            clock=self.clock,
            randomness=SystemRandomness(),
        )

    def status(self) -> Status:
        return Status(snapshot=self.engine.snapshot(), draining=False, in_flight_elsewhere=0)

    def on_message(self, message: Any) -> None:
        """The engine process's side."""
        if isinstance(message, AskMetrics):
            self.to_front.post(MetricsText(message.query, self.engine.metrics_text(compat=message.compat)))
        else:
            self.session.handle(message)


@asynccontextmanager
async def front_pair(engine: Engine) -> AsyncIterator[FrontPair]:
    """A front of an open engine. Leaving the block is the front's death."""
    threads = ThreadPool("front", 1)
    pair = FrontPair(engine, threads)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(pair.session.run)
            group.start_soon(pair.from_front.pump, pair.on_message)
            group.start_soon(pair.to_front.pump, pair.remote.handle)
            yield pair
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await threads.close()
