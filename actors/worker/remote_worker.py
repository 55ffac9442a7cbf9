"""One worker process: frames in, frames out, and the reason why it ended."""

import logging
import signal
from collections import deque
from itertools import count

from troupellm.actors.runtime.processes import ChildProcess, Processes
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.protocol.messages.adapters import ADAPTERS_GONE, ADAPTERS_LATE, PREPARE_SECONDS, AdapterPreparation
from troupellm.protocol.params.guide import BuildOutcome, GuideProgram
from troupellm.protocol.wire.frames import Assembler, Codec, FrameError, Hello
from troupellm.protocol.wire.worker import (
    HELLO,
    AdapterPrepared,
    FromWorker,
    GuidePrepared,
    Load,
    PrepareAdapter,
    PrepareGuide,
    ToWorker,
)

logger = logging.getLogger("troupellm.worker")

MODULE = "troupellm.models.worker.main"
KILL_SECONDS = 5.0
"""How long the system may take to remove a process that was killed."""
GUIDE_SECONDS = 30.0
"""A guide that the worker has not built by then is given up. The guide process has built it within its own limit, so a
healthy worker does too."""
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)


class RemoteWorker:
    """One worker process: frames in, frames out. Implements `ProcessEvents`."""

    def __init__(self) -> None:
        self.child: ChildProcess | None = None
        self._closed = False
        self._codec: Codec[ToWorker | Hello] = Codec()
        self._assembler: Assembler[FromWorker] = Assembler(FromWorker, HELLO)
        self._messages: deque[FromWorker] = deque()
        self._broken: FrameError | None = None
        self._killed = False
        self._processes: Processes | None = None
        self._oom_kills: int | None = None
        """Of the kernel, when this process started or began to load."""
        self._waiter: Waiter | None = None
        self._preparing: dict[int, Waiter] = {}
        """Waiters for a guide or an adapter to be prepared, by its number."""
        self._prepared: dict[int, AdapterPreparation] = {}
        """Answers about adapters that are still to be read by their waiters."""
        self._numbers = count()

    async def open(self, processes: Processes) -> None:
        """Raises WorkerGone when there can be no process."""
        try:
            self.child = await processes.start(MODULE, self)
        except OSError as error:
            raise WorkerGone(f"a worker process cannot be started: {error.strerror}", fault=False) from error
        self._processes = processes
        self._oom_kills = processes.oom_kills()
        self._write(HELLO)

    def send(self, message: ToWorker) -> None:
        if isinstance(message, Load) and self._processes is not None:  # earlier kills do not count
            self._oom_kills = self._processes.oom_kills()
        self._write(message)

    async def next(self) -> FromWorker:
        """The next message. Raises WorkerGone; being cancelled loses nothing."""
        while not self._messages:
            if self._lost:
                raise await self.obituary()
            await self._told()
        return self._messages.popleft()

    async def _told(self, seconds: float | None = None) -> bool:
        """Until there is a message, or the process is gone; False after so long."""
        waiter = self._waiter = new_waiter()
        return await waiter.wait(seconds)

    async def prepare_guide(self, program: GuideProgram) -> BuildOutcome:
        """Until the worker has built it, or is gone, or has been at it for too long."""
        number = next(self._numbers)
        if await self._answered(PrepareGuide(number, program), number, GUIDE_SECONDS):
            return "built"
        return "gone" if self._lost else "late"

    async def prepare_adapter(self, digest: str, folder: str) -> AdapterPreparation:
        """As `prepare_guide`."""
        number = next(self._numbers)
        if await self._answered(PrepareAdapter(number, digest, folder), number, PREPARE_SECONDS):
            return self._prepared.pop(number)
        return ADAPTERS_GONE if self._lost else ADAPTERS_LATE

    @property
    def gone(self) -> bool:
        """True if the process has closed its connection."""
        return self._closed

    @property
    def _lost(self) -> bool:
        return self.gone or self._broken is not None

    async def _answered(self, ask: PrepareGuide | PrepareAdapter, number: int, seconds: float) -> bool:
        """Ask the worker, and wait for its answer with that number; False if none comes."""
        if self._lost:
            return False
        waiter = self._preparing[number] = new_waiter()
        try:
            self._write(ask)
            await waiter.wait(seconds)
            return number not in self._preparing
        finally:
            self._preparing.pop(number, None)

    @property
    def stopped(self) -> bool:
        """True if a signal has stopped the process."""
        return self.child is not None and self.child.stopped

    def kill(self) -> None:
        self._killed = True
        if self.child is not None:
            self.child.kill()

    async def end(self) -> bool:
        """Kill it and wait until it is gone; False if it does not go."""
        self.kill()
        if self.child is None:
            return True
        return await self.child.ended(KILL_SECONDS) is not None

    def received(self, data: bytes) -> None:
        if self._broken is not None:
            return
        try:
            for message in self._assembler.feed(data):
                if isinstance(message, GuidePrepared | AdapterPrepared):
                    self._answer(message)
                else:
                    self._messages.append(message)
        except FrameError as error:
            self._broken = error
        self._wake()

    def _answer(self, message: GuidePrepared | AdapterPrepared) -> None:
        waiter = self._preparing.pop(message.number, None)
        if waiter is not None:
            if isinstance(message, AdapterPrepared):
                self._prepared[message.number] = message.preparation
            waiter.wake()

    def closed(self) -> None:
        self._closed = True
        for waiter in self._preparing.values():
            waiter.wake()
        self._wake()

    def said(self, line: str) -> None:
        logger.warning("[%s] %s", "worker" if self.child is None else self.child.pid, line)

    def _write(self, message: ToWorker | Hello) -> None:
        assert self.child is not None
        self.child.send(self._codec.encode(message))

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.wake()
            self._waiter = None

    async def obituary(self) -> WorkerGone:
        """Why the process is of no more use."""
        assert self.child is not None
        if self._broken is not None:
            return WorkerGone(f"the worker process does not keep to the protocol: {self._broken}")
        code = await self.child.ended(KILL_SECONDS)
        if code is None:
            return WorkerGone("the worker process has closed its connection")
        if code == -signal.SIGKILL and not self._killed and self._memory_ran_out():
            return WorkerGone("the worker process was killed by the kernel for want of memory", exhausted=True)
        if code < 0:
            outside = -code in _FROM_OUTSIDE and not self._killed
            return WorkerGone(f"the worker process was killed by {_signal_name(-code)}", fault=not outside)
        return WorkerGone(f"the worker process ended with exit code {code}")

    def _memory_ran_out(self) -> bool:
        """Whether the kernel has killed anybody for want of memory meanwhile: most likely this process."""
        now = None if self._processes is None else self._processes.oom_kills()
        return now is not None and self._oom_kills is not None and now > self._oom_kills


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
