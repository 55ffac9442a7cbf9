"""One seed's universe: the real actors, a simulated outside, and everything that is watched."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import anyio
import trio

from simulator.clients import Client
from simulator.faults import MAILBOXES, Injected, Injector
from simulator.history import Record, Verdict
from simulator.invariants import Turns, check_baseline, check_core, check_mailbox, check_outbox
from simulator.model import Language, chat_template, oracle_language
from simulator.oracle_worker import OracleWorker, worker_ready
from simulator.ports import FaultyWorker, SimClock, SimPool, SimRandomness, SimThread
from simulator.taps import tapped
from simulator.workload import Scenario
from troupellm.actors.mailbox import Mailbox, MailboxClosed
from troupellm.actors.scheduler.block_pool import BlockPool
from troupellm.actors.supervise import ActorLeft
from troupellm.actors.system import Company, System
from troupellm.protocol.errors import EngineStopped, WorkerCrashed
from troupellm.protocol.sampling import Limits
from troupellm.protocol.scheduler import (
    AbortRequest,
    ReaderPaused,
    ReaderResumed,
    StepFinished,
    StopStringMet,
    SubmitRequest,
)
from troupellm.protocol.worker import StepPlan

CHAOS_SECONDS = 30.0
CALM_SECONDS = 60.0
"""Virtual seconds within which everybody is served once the faults are over."""
SETTLE_SECONDS = 10.0
STOP_SECONDS = 20.0
DRAIN_SECONDS = 1.0
MOST_MESSAGES = 50_000
_SMALL = ("intake", "output", "metrics")
_DELAYED_CONTROLS = (AbortRequest, StopStringMet, ReaderPaused, ReaderResumed)
_SILENT = ("stalls",)
"""Actors that take no messages: their waits are the occasions."""
_EXPECTED = (Injected, WorkerCrashed, ActorLeft)
"""Crashes that the simulation itself brings about; everything else is a bug."""
_MOST_RECOMPUTED = 40
"""Computed positions per wanted one, at most."""


class World:
    """Implements `taps.Watcher`. `failures` is what was found to be wrong."""

    def __init__(self, scenario: Scenario, *, tracing: bool) -> None:
        self.scenario = scenario
        self.random = Random(scenario.seed ^ 0x5EED)
        self.injector = Injector(scenario.faults)
        self.failures: list[str] = []
        self.trace: list[tuple[object, ...]] | None = [] if tracing else None
        self.language = _language(scenario)
        self.clock = SimClock()
        self.records = [Record(ask) for ask in scenario.asks]
        self.calm = anyio.Event()
        self.blamed: set[int] = set()
        self.row_owner: dict[int, int] = {}
        self._actors: dict[str, Any] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._dying: set[str] = set()
        self._turns = Turns(scenario.config.scheduler.scheduling_policy)
        self._lanes: dict[tuple[object, str], deque[tuple[Callable[[], object], float]]] = {}
        self._contents: dict[bytes, tuple[Any, ...]] = {}
        self._messages = 0
        self._wanted = 0
        self._steps = 0
        self._group: Any = None
        self._scope = anyio.CancelScope()
        pressure = scenario.pressure
        self.ready = worker_ready(
            self.language.width, pressure.num_blocks, pressure.block_size, pressure.max_model_len, pressure.groups
        )
        self.worker: Any = self._build_worker()

    async def run(self) -> Verdict:
        self._begin = self.clock.now()
        with self._scope:
            async with anyio.create_task_group() as self._group:
                with tapped(self):
                    await self._live()
                self._group.cancel_scope.cancel()
        return self._verdict()

    def fail(self, what: str) -> None:
        """Note a failure; the first one ends the run, what follows it is noise."""
        self.failures.append(what)
        self.note("failure", what)
        self._scope.cancel()

    def note(self, *event: object) -> None:
        if self.trace is not None:
            self.trace.append((round(anyio.current_time() - self._begin, 6), *event))

    async def _live(self) -> None:
        self.system = System(self._company())
        await self._group.start(self.system.run)
        clients = [Client(self, record) for record in self.records]
        if self.injector.strike("engine", "drain"):
            self._group.start_soon(self._drain)
        if self.injector.strike("engine", "wall_jump"):
            self.clock.offset += self.random.choice((-3600.0, 3600.0))
        with anyio.move_on_after(CHAOS_SECONDS):
            await self._all([client.run for client in clients if not client.ask.calm])
        self.injector.calm = True
        self.calm.set()
        self.note("calm")
        with anyio.move_on_after(CALM_SECONDS):
            await self._all([client.run for client in clients if not client.record.over])
        self._check_histories()
        await self._settle()
        await self._stop()

    async def _all(self, calls: list[Callable[[], Any]]) -> None:
        async with anyio.create_task_group() as group:
            for call in calls:
                group.start_soon(call)

    async def _drain(self) -> None:
        await anyio.sleep(self.random.uniform(0.0, 1.0))
        self.note("drain")
        self.system.admission.close()
        if not await self.system.requests.wait_empty(DRAIN_SECONDS):
            self.system.requests.end_all(lambda: EngineStopped("the engine is shutting down"))

    def _check_histories(self) -> None:
        for record in self.records:
            for wrong in record.check(self.language, self.scenario, self.injector, self.blamed):
                self.fail(f"client {record.ask.number}: {wrong}")
        failure = self.system.failure
        if failure is not None and not isinstance(failure, _EXPECTED):
            self.fail(f"the engine failed: {failure!r}")

    async def _settle(self) -> None:
        """9: what plans in flight still held comes back."""
        core = self._core
        if core is None or self.system.failure is not None:
            return
        with anyio.move_on_after(SETTLE_SECONDS):
            while check_baseline(core.snapshot()):  # noqa: ASYNC110 - nobody tells
                await anyio.sleep(0.1)
        if self.system.failure is not None:
            return
        for wrong in check_baseline(core.snapshot()):
            self.fail(wrong)
        if len(self.system.requests):
            self.fail(f"9: {len(self.system.requests)} requests are open, and nobody waits for them")
        useful = self._wanted + 1
        if self.worker.num_computed > _MOST_RECOMPUTED * useful:
            self.fail(f"7: {self.worker.num_computed} positions were computed for {useful} wanted ones")

    async def _stop(self) -> None:
        with anyio.move_on_after(STOP_SECONDS) as scope:
            await self.system.stop()
        if scope.cancelled_caught:
            self.fail("the system did not stop")
        if len(self.system.requests):
            self.fail("requests are open after the stop")

    def _company(self) -> Company:
        pressure, injector, random = self.scenario.pressure, self.injector, self.random
        return Company(
            config=self.scenario.config,
            ready=self.ready,
            limits=Limits(vocab_width=self.language.width, max_model_len=self.ready.max_model_len),
            worker=FaultyWorker(self.worker, random, injector, self._blame_row),
            tokenizer=self.language.tokenizer,
            tables=self.language.tables,
            chat_template=chat_template(),
            thread=SimThread(random, injector, pressure.step_seconds),
            pool=SimPool(random, injector),
            clock=self.clock,
            randomness=SimRandomness(random),
            hash_key=b"a secret of the simulation",
        )

    def _build_worker(self) -> Any:
        if self.scenario.pressure.torch:
            from simulator.torch_worker import TinyTorchWorker

            return TinyTorchWorker(self.ready)
        return OracleWorker(self.ready, self.fail)

    def _verdict(self) -> Verdict:
        return Verdict(
            seed=self.scenario.seed,
            failures=tuple(self.failures),
            hits=dict(self.injector.hits),
            trace=tuple(self.trace or ()),
            virtual_seconds=self.clock.now() - self._begin,
            steps=self._steps,
            finished=sum(record.whole for record in self.records),
            preemptions=self._core.snapshot().preemptions if self._core else 0,
        )

    def _blame_row(self, row: int) -> None:
        if row in self.row_owner:
            self.blamed.add(self.row_owner[row])

    @property
    def _core(self) -> Any:
        return getattr(self._actors.get("scheduler"), "_core", None)

    # What the taps tell.

    def capacity(self, name: str, capacity: int) -> int:
        return 1 if self.scenario.pressure.smallest_mailboxes and name in _SMALL else capacity

    def delay(self, box: Mailbox[Any, Any], message: Any, *, control: bool) -> float:
        """Seconds that a message takes. Results of steps are held up by the worker itself."""
        held_up = isinstance(message, _DELAYED_CONTROLS) if control else not isinstance(message, StepFinished)
        fault = self.injector.strike(box.name, "delay") if held_up and box.name in MAILBOXES else None
        return 0.0 if fault is None else fault.seconds * self.random.choice((0.1, 1.0))

    def send_later(self, box: Mailbox[Any, Any], call: Callable[[], object], seconds: float) -> bool:
        """Deliver after a while, in the order of the sender. False: there is no reason to wait."""
        sender = (trio.lowlevel.current_task(), box.name)
        lane = self._lanes.get(sender)
        if lane is not None:
            lane.append((call, seconds))
            return True
        if not seconds:
            return False
        self._lanes[sender] = deque([(call, seconds)])
        self._group.start_soon(self._carry, sender)
        return True

    async def _carry(self, sender: tuple[object, str]) -> None:
        lane = self._lanes[sender]
        while lane:
            call, seconds = lane[0]
            await anyio.sleep(seconds)
            lane.popleft()
            with suppress(MailboxClosed):
                call()
        del self._lanes[sender]

    def sent(self, box: Mailbox[Any, Any], message: Any) -> None:
        if isinstance(message, SubmitRequest):
            rows = [spec.row for spec in message.sequences]
            self.row_owner.update((row, message.request) for row in rows)
            self._wanted += len(rows) * (len(message.prompt) // 4 + message.max_tokens)
        elif isinstance(message, StepPlan) and self._core is not None:
            wrong = self._turns.planned(message, self.row_owner, self._core)
            if wrong is not None:
                self.fail(wrong)
        if self.trace is not None:
            self.note("sent", box.name, _brief(message))
        wrong = check_mailbox(box)
        if wrong is not None:
            self.fail(wrong)

    def before_next(self, box: Mailbox[Any, Any]) -> None:
        if box.name in self._dying:
            self._dying.discard(box.name)
            raise Injected(f"{box.name} broke after a message")

    def taken(self, box: Mailbox[Any, Any], message: Any) -> None:
        name = box.name
        if self.trace is not None:
            self.note("taken", name, _brief(message))
        self._messages += 1
        if self._messages > MOST_MESSAGES:
            self.fail("the engine runs in circles")
        if isinstance(message, StepPlan):
            self._steps += 1
        elif isinstance(message, SubmitRequest):
            self._turns.arrived(message)
        self._strike_actor(name)

    def idle(self, box: Mailbox[Any, Any]) -> None:
        if box.name in _SILENT and not box.closed:
            self._strike_actor(box.name)
        if box.name == "scheduler":
            self._check_step()

    def _strike_actor(self, name: str) -> None:
        strike = self.injector.strike
        if strike(name, "cancel"):
            self.note("cancel", name)
            self._scopes[name].cancel()
        if strike(name, "exception_after"):
            self._dying.add(name)
        if strike(name, "exception"):
            raise Injected(f"{name} broke at a message")

    def _check_step(self) -> None:
        core = self._core
        if core is None:
            return
        for wrong in check_core(core):
            self.fail(wrong)
        stream = self.scenario.config.stream
        slack = 4 * (1 + self.scenario.config.scheduler.max_plans_in_flight) * 4
        for outbox in self.system.requests:
            late = check_outbox(outbox, stream.stream_budget_tokens, slack)
            if late is not None:
                self.fail(late)

    def born(self, name: str, actor: Any, scope: anyio.CancelScope) -> None:
        self._actors[name] = actor
        self._scopes[name] = scope
        self.note("born", name)

    def crashed(self, name: str, error: Exception) -> None:
        self.note("crashed", name, repr(error))
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if not isinstance(error, _EXPECTED):
            self.fail(f"{name} crashed: {error!r}")

    def left(self, name: str) -> None:
        self.note("left", name)

    def labelled(self, pool: BlockPool, block: int, key: bytes) -> None:
        """8: equal keys mean equal content, and all of it is computed."""
        if self.scenario.pressure.torch:
            return
        group = next((index for index, own in enumerate(self._core._tables.pools) if own is pool), None)
        if group is None:
            return
        held = self.worker.held(group, block)
        if None in held:
            self.fail(f"8: block {block} is found by its key before it is full: {held}")
        elif self._contents.setdefault(key, held) != held:
            self.fail(f"8: one key names {held} and {self._contents[key]}")


def _language(scenario: Scenario) -> Language:
    if scenario.pressure.torch:
        from simulator.torch_worker import torch_language

        return torch_language()
    return oracle_language()


def _brief(message: Any) -> str:
    """A message in a few words that are the same in every run."""
    kind = type(message).__name__
    for field in ("request", "row", "step"):
        value = getattr(message, field, None)
        if value is not None:
            return f"{kind} {field} {value}"
    result = getattr(message, "result", None)
    return kind if result is None else f"{kind} step {result.step} tokens {result.tokens}"
