"""Front processes that are tasks: the real front's half and the real engine's half of each, with bytes between them.

A front falls when it is killed, when its wire is cut, and when one of its ends hears garbage. Its clients get the
typed loss that it tells those who are left; the engine ends its requests; then another one takes its place.
"""

import math
from random import Random
from typing import TYPE_CHECKING, Any

import anyio

from simulator.model import chat_template
from simulator.ports import SimPool, SimRandomness
from simulator.wire import Wire
from troupellm.actors.engine.api_process_session import ApiProcessSession
from troupellm.actors.remote.client import RemoteEngine
from troupellm.protocol.errors import EngineStopped
from troupellm.protocol.messages.snapshot import EngineSnapshot, SchedulerSnapshot
from troupellm.protocol.wire.api_process import (
    AdminAnswer,
    AskAdmin,
    AskMetrics,
    CancelAdmin,
    FromApiProcess,
    MetricsText,
    Serving,
    Status,
    ToApiProcess,
)
from troupellm.protocol.wire.frames import FrameError

if TYPE_CHECKING:
    from simulator.world import World

_START_SECONDS = (0.0, 0.01, 0.3)
_STATUS = Status(
    snapshot=EngineSnapshot(
        state="ready",
        uptime_seconds=0.0,
        model="",
        max_model_len=0,
        open_requests=0,
        scheduler=SchedulerSnapshot(),
        actors=(),
    ),
    draining=False,
    in_flight_elsewhere=0,
)
_NO_CHAT_FORMAT: Any = None
"""No request is a chat here."""
_ECHO = b"what the operator asks"
_METRICS = b"what the scraper reads"


class _Killed(Exception):
    """The process is gone at once, in every state."""


class SimFront:
    """One of them, from its start until nothing of it is left."""

    def __init__(self, world: "World", random: Random) -> None:
        config, injector = world.scenario.config, world.injector
        self._world = world
        self._random = random
        self._to_front = Wire(ToApiProcess, random, injector, world.fail)
        self._to_engine = Wire(FromApiProcess, random, injector, world.fail)
        self.session = ApiProcessSession(
            world.system, world.clock, config.stream, post=self._to_front.post, drained=self._to_front.drained
        )
        self.remote = RemoteEngine(
            Serving(
                config=config, model_names=(), tokenizer_folder="", defaults={}, limits=world.limits, ready=world.ready
            ),
            _STATUS,
            tokenizer=world.language.tokenizer,
            chat_template=chat_template(),
            chat_format=_NO_CHAT_FORMAT,
            post=self._to_engine.post,
            on_loop=lambda call: call(),
            threads=SimPool(random, injector),
            clock=world.clock,
            randomness=SimRandomness(random),
        )

    @property
    def fallen(self) -> bool:
        """Its clients know it."""
        return self.remote.state == "failed"

    @property
    def num_open(self) -> int:
        """Requests and questions that one of its ends has not seen the end of."""
        return len(self.session) + self.remote.num_open

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._serve)
            group.start_soon(self._ask)
            await self._live()

    async def _live(self) -> None:
        """The process, as `server.api_processes.main` has it; a killed one leaves its tasks to their end here."""
        try:
            await self._to_front.carry(self._on_word)
        except (FrameError, _Killed) as error:
            self._world.note("front", "falls", str(error))
        self._to_engine.hang_up()
        self.remote.lost()

    async def _serve(self) -> None:
        """The engine's end, as `server.fronts.member` has it."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.session.run)
            try:
                await self._to_engine.carry(self._on_message)
            except FrameError as error:
                self._world.note("front", "is given up", str(error))
            self._to_front.hang_up()
            group.cancel_scope.cancel()

    def _on_word(self, message: Any) -> None:
        if self._world.injector.strike("front", "death"):
            raise _Killed("it was killed")
        self.remote.handle(message)

    def _on_message(self, message: Any) -> None:
        match message:
            case AskMetrics(query=query):
                self._to_front.post(MetricsText(query, _METRICS))
            case AskAdmin(query=query, arguments=arguments):
                self._to_front.post(AdminAnswer(query=query, body=arguments))
            case CancelAdmin():
                pass  # the answer is on its way already, and is dropped
            case _:
                self.session.handle(message)

    async def _ask(self) -> None:
        """A scraper, and an operator who has no patience at first."""
        for patience in (0.0, math.inf):
            await anyio.sleep(self._random.uniform(0.0, 0.5))
            answers = []
            try:
                with anyio.move_on_after(patience):
                    answers.append(await self.remote.administer("echo", _ECHO))
                answers.append(await self.remote.metrics(compat=True))
            except EngineStopped as error:
                if not self.fallen:
                    self._world.fail(f"nobody answered a question through a front that stands: {error}")
                return
            if answers not in ([_METRICS], [_ECHO, _METRICS]):
                self._world.fail(f"what was asked through a front is answered with {answers}")


class Fronts:
    """All of them; most seeds have none."""

    def __init__(self, world: "World", count: int) -> None:
        self.count = count
        self._world = world
        self._random = Random(world.scenario.seed ^ 0xF207)
        self._there: list[SimFront] = []
        """Those that stand, and those that fell and are being cleared away."""
        self._risen = anyio.Event()

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            for _ in range(self.count):
                group.start_soon(self._keep_one)

    async def accept(self) -> SimFront:
        """The front that takes the next client; waits while there is none."""
        while not (standing := [front for front in self._there if not front.fallen]):
            await self._risen.wait()
        return self._random.choice(standing)

    def check(self) -> list[str]:
        """9: of those that fell nothing is left, and those that stand have nothing to do."""
        left = [front.num_open for front in self._there if not front.fallen]
        wrong = [f"9: a front still has {num_open} things open" for num_open in left if num_open]
        if len(self._there) > len(left):
            wrong.append("9: something is left of a front that fell")
        return wrong

    async def _keep_one(self) -> None:
        while True:
            await anyio.sleep(self._random.choice(_START_SECONDS))
            front = SimFront(self._world, self._random)
            self._there.append(front)
            self._risen.set()
            self._risen = anyio.Event()
            try:
                await front.run()
            except Exception as error:
                self._world.crashed("front", error)
            self._there.remove(front)
