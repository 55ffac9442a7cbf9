"""A process that computes one answer at a time for untrusted input, and may be killed over it.

A message gets processor time, not wall time: a busy machine may leave the process little of the time that an answer may
take.
"""

import signal
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from troupellm.actors.runtime.processes import ChildProcess, Processes
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.wire.frames import Assembler, Codec, FrameError, Hello

KILL_SECONDS = 5.0
SHORTEST_WAIT_SECONDS = 0.01
"""Shortest wait between two looks at the processor time that an answer has left."""

SentT = TypeVar("SentT")
ReceivedT = TypeVar("ReceivedT")


class ChildGone(Exception):
    """The process has died, or its frames cannot be read."""


class TakesTooLong(Exception):
    """The answer has had its processor time."""


class TooBusy(Exception):
    """The machine gave the process less processor time than an answer may take."""


class ComputeChild(Generic[SentT, ReceivedT]):
    """One process. Implements `ProcessEvents`."""

    def __init__(self, sends: Codec[SentT | Hello], receives: Assembler[ReceivedT], say: Callable[[str], None]) -> None:
        """say: logs a line that the process prints."""
        self.process: ChildProcess | None = None
        self.gone = False
        self._died = False
        """True if the process ended by itself or was ended from outside."""
        self._codec = sends
        self._assembler = receives
        self._say = say
        self._messages: deque[ReceivedT] = deque()
        self._waiter: Waiter | None = None

    async def begin(self, processes: Processes, module: str, hello: Hello, first: SentT, seconds: float) -> ReceivedT:
        """Start the process. Returns its answer to the first message.

        Raises:
            OSError: there is no process now; TimeoutError is one.
            ChildGone: it died.
        """
        self.process = await processes.start(module, self)
        self.process.send(self._codec.encode(hello))
        self.send(first)
        with anyio.fail_after(seconds):
            return await self.next()

    @property
    def cpu_seconds(self) -> float | None:
        return None if self.process is None else self.process.cpu_seconds

    def send(self, message: SentT) -> None:
        assert self.process is not None
        self.process.send(self._codec.encode(message))

    async def next(self) -> ReceivedT:
        """The next message. Raises ChildGone."""
        while (message := self.take()) is None:
            if self.gone:
                raise ChildGone("it has closed its connection")
            waiter = self._waiter = new_waiter()
            await waiter.wait()
        return message

    def take(self) -> ReceivedT | None:
        """The next message, if it has come."""
        return self._messages.popleft() if self._messages else None

    async def ask(self, message: SentT, timeout: float, patience: float) -> ReceivedT:
        """The answer to a message. An answer that comes as the wait ends is taken all the same.

        Args:
            timeout: seconds of processor time; of any time where the system does not count those.
            patience: most seconds of any time.

        Raises:
            TakesTooLong: the time is over.
            TooBusy: the patience is over.
            ChildGone: the process died.
        """
        left, before = timeout, self.cpu_seconds
        self.send(message)
        with anyio.move_on_after(patience):
            while left > 0.0:
                with anyio.move_on_after(max(left, SHORTEST_WAIT_SECONDS)):
                    return await self.next()
                now = self.cpu_seconds
                left = 0.0 if before is None or now is None else timeout - (now - before)
        answer = self.take()
        if answer is not None:
            return answer
        raise TooBusy if left > 0.0 else TakesTooLong

    async def was_killed(self) -> bool:
        """True if the process was killed from outside, perhaps by the kernel; no limit of its own kills it."""
        if not self._died or self.process is None:
            return False
        return await self.process.ended(KILL_SECONDS) == -signal.SIGKILL

    async def end(self) -> bool:
        """Kill it and wait until it is gone; False if it does not go."""
        self.gone = True
        if self.process is None:
            return True
        self.process.kill()
        return await self.process.ended(KILL_SECONDS) is not None

    def received(self, data: bytes) -> None:
        if self.gone:
            return
        try:
            self._messages.extend(self._assembler.feed(data))
        except FrameError:
            self.gone = True
        self._wake()

    def closed(self) -> None:
        self._died = not self.gone
        self.gone = True
        self._wake()

    def said(self, line: str) -> None:
        self._say(line)

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.wake()
            self._waiter = None
