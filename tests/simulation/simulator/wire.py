"""One direction between a front process and the engine's: messages go in, frames cross as bytes, messages come out."""

from collections.abc import Callable
from random import Random
from typing import Any

import anyio

from simulator.faults import Injector
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.wire.api_process import Chunks
from troupellm.protocol.wire.frames import Assembler, Codec, Hello

HIGH_WATER_BYTES = 200
"""Bytes that may wait before `drained` does: two frames or three."""
_HELLO = Hello(link="front", version="simulated")
_LATENCIES = (0.0, 0.0, 0.001)
_GARBAGE = (b"these are no frames", b"\x01\x00\x00\x00\xc1")
"""An impossible length; a frame that holds no message."""


class Wire:
    """A stand-in for `server.fronts.link` between its two ends. It is slow, is cut, or carries garbage when a fault
    goes off."""

    def __init__(self, messages: Any, random: Random, injector: Injector, fail: Callable[[str], None]) -> None:
        """messages: union of those that may come out."""
        self._codec: Codec[Any] = Codec()
        self._assembler: Assembler[Any] = Assembler(messages, _HELLO)
        self._random = random
        self._injector = injector
        self._fail = fail
        self._waiting = bytearray(self._codec.encode(_HELLO))
        self._open = True
        self._reader: Waiter | None = None
        self._writer: Waiter | None = None

    def post(self, message: Any) -> None:
        """Never waits; a wire that was hung up forgets it."""
        if not self._open:
            return
        if isinstance(message, Chunks) and len(self._waiting) > HIGH_WATER_BYTES:
            self._fail("4: pieces were sent to a front that has not taken those before them")
        if self._injector.strike("front", "garbage"):
            self._waiting += self._random.choice(_GARBAGE)
        self._waiting += self._codec.encode(message)
        self._wake_reader()

    async def drained(self) -> None:
        """For ever once it was hung up."""
        while not self._open or len(self._waiting) > HIGH_WATER_BYTES:
            self._writer = new_waiter()
            await self._writer.wait()

    def hang_up(self) -> None:
        """The sender is gone; waiting bytes still arrive, up to some byte."""
        if self._open:
            self._open = False
            del self._waiting[self._random.randint(0, len(self._waiting)) :]
            self._wake_reader()

    async def carry(self, handle: Callable[[Any], None]) -> None:
        """For as long as there is sense in what arrives.

        Raises:
            FrameError: there is none, or nothing follows.
        """
        while True:
            while not self._waiting:
                if not self._open:
                    raise self._assembler.end()
                self._reader = new_waiter()
                await self._reader.wait()
            slow = self._injector.strike("front", "slow")
            await anyio.sleep(self._random.choice(_LATENCIES) if slow is None else slow.seconds)
            if self._injector.strike("front", "cut"):
                self._open = False
                del self._waiting[-1:]  # inside a frame
            for message in self._assembler.feed(self._next_piece()):
                handle(message)

    def _next_piece(self) -> bytes:
        """All that waits, or half of it."""
        size = -(-len(self._waiting) // self._random.choice((1, 1, 2)))
        piece = bytes(self._waiting[:size])
        del self._waiting[:size]
        if self._writer is not None:
            self._writer.wake()
        return piece

    def _wake_reader(self) -> None:
        if self._reader is not None:
            self._reader.wake()
