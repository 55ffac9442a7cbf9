"""Worker processes that are tasks: they speak the real frames through the real process seat, and die of everything.

Each computes with the simulation's one worker, which starts empty when a process loads it.
"""

import signal
from collections import deque
from collections.abc import Callable
from random import Random

import anyio
import anyio.lowlevel

from simulator.faults import Injector
from simulator.ports import FaultyWorker, Pace
from troupellm.actors.runtime.processes import ProcessEvents
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.models.runner.steps_in_flight import Steps
from troupellm.protocol.messages.worker import StepPlan, WorkerReady
from troupellm.protocol.messages.worker_abilities import Wait
from troupellm.protocol.wire.frames import Assembler, Codec, Hello
from troupellm.protocol.wire.worker import (
    HELLO,
    AdapterPrepared,
    Failed,
    Finished,
    FromWorker,
    GuidePrepared,
    Launch,
    Load,
    Loaded,
    PrepareAdapter,
    PrepareGuide,
    ReleaseAdapter,
    ToWorker,
)

_IMPORT_SECONDS = (0.0, 0.01, 0.3)
_LOAD_SECONDS = (0.0, 0.05)
_EXIT_FAILED = 1


class SimProcesses:
    """Implements `Processes`. `alive` are the children that have not been killed."""

    def __init__(
        self,
        worker: FaultyWorker,
        ready: WorkerReady,
        random: Random,
        injector: Injector,
        pace: Pace,
        start_soon: Callable[..., object],
    ) -> None:
        self.worker = worker
        self.ready = ready
        self.random = random
        self.injector = injector
        self.pace = pace
        self.alive: set[SimChild] = set()
        self._start_soon = start_soon
        self._pids = 0

    async def start(self, module: str, events: ProcessEvents) -> "SimChild":
        await anyio.lowlevel.checkpoint()
        if self.injector.strike("process", "no_start"):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self._pids += 1
        child = SimChild(self, self._pids, events)
        self.alive.add(child)
        self._start_soon(child.run)
        return child

    def oom_kills(self) -> int | None:
        return 0


class _Death(Exception):
    """The process ends with this code."""

    def __init__(self, code: int) -> None:
        self.code = code


class SimChild:
    """Implements `ChildProcess`."""

    def __init__(self, world: SimProcesses, pid: int, events: ProcessEvents) -> None:
        self.pid = pid
        self.stopped = False
        self._world = world
        self._events = events
        self._codec: Codec[FromWorker | Hello] = Codec()
        self._assembler: Assembler[ToWorker] = Assembler(ToWorker, HELLO)
        self._inbox: deque[ToWorker] = deque()
        self._steps: Steps | None = None
        self._scope = anyio.CancelScope()
        self._code: int | None = None
        self._linked = True
        self._waiter: Waiter | None = None
        self._buried = anyio.Event()

    def send(self, data: bytes) -> None:
        if self._code is None and self._linked:
            self._inbox.extend(self._assembler.feed(data))
            self._wake()

    def kill(self) -> None:
        if self._code is None:
            self._die(-signal.SIGKILL)
            self._scope.cancel()

    async def ended(self, timeout: float) -> int | None:
        with anyio.move_on_after(timeout):
            await self._buried.wait()
        return self._code

    async def run(self) -> None:
        with self._scope:
            try:
                await self._live()
            except _Death as death:
                self._die(death.code)
            except WorkerGone:  # from outside
                self._die(-signal.SIGKILL)
            except Exception as error:
                kind = "MemoryError" if isinstance(error, MemoryError) else type(error).__name__
                self._say(Failed(kind=kind, message=str(error)))
                self._die(_EXIT_FAILED)

    async def _live(self) -> None:
        world = self._world
        self._say(HELLO)
        await anyio.sleep(world.random.choice(_IMPORT_SECONDS))
        while True:
            message = await self._next()
            if message is None:
                await self._give()
            elif isinstance(message, Load):
                await self._load()
            elif isinstance(message, Launch):
                await self._step(message.plan)
            elif isinstance(message, PrepareGuide):
                self._say(GuidePrepared(message.number))
            elif isinstance(message, PrepareAdapter):
                prepared = world.worker.prepare_adapter(message.digest, message.folder)
                self._say(AdapterPrepared(message.number, prepared))
            elif isinstance(message, ReleaseAdapter):
                world.worker.release_adapter(message.digest)
            else:
                raise RuntimeError("commands are not simulated")

    async def _next(self) -> ToWorker | None:
        """The next message; None if there is none and a result is due."""
        while not self._inbox:
            if self._steps is not None and self._steps.due:
                return None
            self._waiter = new_waiter()
            await self._waiter.wait()
        return self._inbox.popleft()

    async def _load(self) -> None:
        world = self._world
        await anyio.sleep(world.random.choice(_LOAD_SECONDS))
        if world.injector.strike("process", "load_failure"):
            raise RuntimeError("the model could not be loaded")
        world.worker.reset()
        self._steps = Steps(world.worker, self._wait)
        self._say(Loaded(world.ready))

    async def _step(self, plan: StepPlan) -> None:
        assert self._steps is not None
        while self._steps.due:
            await self._give()
        self._steps.launch(plan)

    async def _give(self) -> None:
        assert self._steps is not None
        await self._suffer()
        self._say(Finished(self._steps.collect()))

    def _wait(self, wait: Wait) -> None:
        raise AssertionError("the device of a worker process is not simulated")

    async def _suffer(self) -> None:
        """A step takes time, and much can happen in it."""
        strike = self._world.injector.strike
        if strike("process", "stop"):
            self.stopped = True
            await anyio.sleep_forever()
        if strike("process", "spin"):
            await anyio.sleep_forever()
        await self._world.pace.take_time()
        if strike("process", "signal"):
            raise _Death(-signal.SIGSEGV)
        if strike("process", "exit"):
            raise _Death(_EXIT_FAILED)
        if strike("process", "garbage"):
            self._events.received(b"these are no frames")
            await anyio.sleep_forever()
        if strike("process", "hang_up"):
            self._hang_up()
            await anyio.sleep_forever()

    def _say(self, message: FromWorker | Hello) -> None:
        """In one piece or in two, as sockets do."""
        data = self._codec.encode(message)
        cut = self._world.random.choice((0, 1, len(data) // 2))
        for piece in (data[:cut], data[cut:]):
            if piece:
                self._events.received(piece)

    def _die(self, code: int) -> None:
        self._code = code
        self._world.alive.discard(self)
        self._hang_up()
        self._buried.set()

    def _hang_up(self) -> None:
        if self._linked:
            self._linked = False
            self._events.closed()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.wake()
            self._waiter = None
