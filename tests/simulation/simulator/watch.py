"""Watches the engine's doors, and injects faults there."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import anyio
import trio

from simulator.faults import MAILBOXES, SILENT, Injected, Injector
from simulator.invariants import Turns, check_core, check_loading, check_mailbox, check_outbox
from simulator.model import start_of
from simulator.workload import Scenario
from troupellm.actors.engine.system import System
from troupellm.actors.kv_cache.block_pool import BlockPool
from troupellm.actors.runtime.mailbox import Mailbox, MailboxClosed
from troupellm.actors.runtime.supervise import ActorLeft
from troupellm.actors.scheduler.kv_offload import MOST_ROUNDS
from troupellm.protocol.errors import WorkerCrashed
from troupellm.protocol.messages.input import PrepareRequest
from troupellm.protocol.messages.output import StepOutput
from troupellm.protocol.messages.scheduler import (
    AbortRequest,
    ReaderPaused,
    ReaderResumed,
    StepFinished,
    StopStringMet,
    SubmitRequest,
    WorkerAsleep,
    WorkerLost,
)
from troupellm.protocol.messages.worker import StepPlan
from troupellm.protocol.params.outputs import Usage
from troupellm.tests.support.engines.inside import block_tables_of, ledger_of

MOST_MESSAGES = 50_000
MOST_PREEMPTIONS = 12
"""Of one row."""
_STARTS_PER_LOSS = 12
"""Halves and quarters of suspects go before it, and make way again."""
_STARTS_PER_ROUND = 2
"""A sequence waits for a fetch and then for a load, and is put back after each of them."""
EXPECTED = (Injected, WorkerCrashed, ActorLeft)
"""Crashes that the simulation itself brings about; everything else is a bug."""
_SMALL = ("intake", "output", "metrics")
_DELAYED_CONTROLS = (AbortRequest, StopStringMet, ReaderPaused, ReaderResumed)


class Watch:
    """Implements `taps.Watcher`. `failures` is what was found to be wrong."""

    system: System
    worker: Any
    """With `held(group, block)`, unless it is the torch model."""

    def __init__(self, scenario: Scenario, *, tracing: bool) -> None:
        self.scenario = scenario
        self.random = Random(scenario.seed ^ 0x5EED)
        self.injector = Injector(scenario.faults, process=scenario.pressure.process)
        self.failures: list[str] = []
        self.trace: list[tuple[object, ...]] | None = [] if tracing else None
        self.scope = anyio.CancelScope()
        """Ends the run."""
        self.group: Any = None
        """For what happens later."""
        self.begin = anyio.current_time()
        self.blamed: set[int] = set()
        """Requests that may fail, because a row of theirs was made to."""
        self.row_owner: dict[int, int] = {}
        self.open: set[int] = set()
        """Requests that the scheduler was told of and has not closed."""
        self.steps = 0
        self.wanted = 0
        """Positions that were requested."""
        self._actors: dict[str, Any] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._dying: set[str] = set()
        scheduler = scenario.config.scheduler
        self._turns = Turns(scheduler.scheduling_policy, {one.name: one.priority for one in scheduler.tenants})
        self.epochs: dict[int, int] = {}
        """By row: how often it was given to the worker anew, and what that may come from."""
        self.numbers: dict[str, int] = {}
        """The engine's numbers of requests that the scheduler was told of, by what their clients call them."""
        self.starts: dict[str, int] = {}
        """By what clients call their requests: `start_of` the adapters that the library has found."""
        self.submitted = 0
        """Requests that the scheduler took in."""
        self.used: dict[int, tuple[str, Usage]] = {}
        """Tenant and usage by request, as the scheduler told them."""
        self._tenants: dict[int, str] = {}
        self._lanes: dict[tuple[object, str], deque[tuple[Callable[[], object], float]]] = {}
        self._contents: dict[tuple[int, bytes], object] = {}
        self._messages = 0
        self._losses = self._naps = 0
        self._reliable = False

    def fail(self, what: str) -> None:
        """Note a failure; the first one ends the run, what follows it is noise."""
        self.failures.append(what)
        self.note("failure", what)
        self.scope.cancel()

    def note(self, *event: object) -> None:
        if self.trace is not None:
            self.trace.append((round(anyio.current_time() - self.begin, 6), *event))

    @property
    def core(self) -> Any:
        """The thinking of the scheduler that runs."""
        return getattr(self._actors.get("scheduler"), "_core", None)

    def blame_row(self, row: int) -> frozenset[int]:
        """A row is made to fail; all rows of its request."""
        guilty = self.row_owner[row]
        self.blamed.add(guilty)
        return frozenset(other for other, owner in self.row_owner.items() if owner == guilty)

    def capacity(self, name: str, capacity: int) -> int:
        return 1 if self.scenario.pressure.smallest_mailboxes and name in _SMALL else capacity

    def delay(self, box: Mailbox[Any, Any], message: Any, *, control: bool) -> float:
        """Seconds that a message takes. Results of steps are held up by the worker itself."""
        if isinstance(message, StepPlan) and self.core is not None:  # here it has just been made
            wrong = self._turns.planned(message, self.row_owner, self.core)
            if wrong is not None:
                self.fail(wrong)
            self._count_starts(message)
        held_up = isinstance(message, _DELAYED_CONTROLS) if control else not isinstance(message, StepFinished)
        fault = (
            self.injector.strike(box.name, "delay")
            if held_up and box.name in (*MAILBOXES, "guide", "adapters")
            else None
        )
        return 0.0 if fault is None else fault.seconds * self.random.choice((0.1, 1.0))

    def send_later(
        self, box: Mailbox[Any, Any], call: Callable[[], object], seconds: float, *, control: bool = False
    ) -> bool:
        """Deliver after a while, in the order of the sender. False: there is no reason to wait.

        Control messages keep their order across all senders: they are plain calls, so that messages of an outbox about
        its
        reader in two tasks cannot change places.
        """
        sender = ("control" if control else trio.lowlevel.current_task(), box.name)
        lane = self._lanes.get(sender)
        if lane is not None:
            lane.append((call, seconds))
            return True
        if not seconds:
            return False
        self._lanes[sender] = deque([(call, seconds)])
        self.group.start_soon(self._carry, sender)
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
            self.open.add(message.request)
            self.numbers[message.request_id] = message.request
            self._tenants[message.request] = message.tenant
            self.wanted += len(rows) * (len(message.prompt) // 4 + message.max_tokens)
        elif isinstance(message, PrepareRequest) and message.adapter is not None:
            self.starts[message.submission.request_id] = start_of(message.adapter.digest)
        elif isinstance(message, StepOutput):
            self._closed(message)
        elif isinstance(message, WorkerLost):
            self._losses += 1
            mended = self.injector.hits["worker", "lost_wakeup"]  # by a restart, to be on the safe side
            if self._losses > self.injector.losses + mended:
                self.fail(f"the worker was lost without a reason: {message.reason}")
        elif isinstance(message, WorkerAsleep):
            self._naps += 1
        if self.trace is not None:
            self.note("sent", box.name, _brief(message))
        wrong = check_mailbox(box)
        if wrong is not None:
            self.fail(wrong)

    def _closed(self, message: StepOutput) -> None:
        for closed in message.closed:
            if closed.request in self.open and closed.scheduled is not None:
                self.used[closed.request] = self._tenants[closed.request], closed.usage
            self.open.discard(closed.request)

    def _count_starts(self, plan: StepPlan) -> None:
        """7: how often a row had to begin again; losses of the worker, its sleeps, trials of suspects, and rounds to
        outer tiers aside: of these each brings blocks, and there are only so many."""
        for new in plan.new_rows:
            self.epochs[new.row] = new.epoch
            rounds = min(ledger_of(self.core).sequences[new.row].tiers.rounds, MOST_ROUNDS)
            spared = self._naps + _STARTS_PER_LOSS * self._losses + _STARTS_PER_ROUND * rounds
            if new.epoch - spared > MOST_PREEMPTIONS:
                self.fail(f"7: row {new.row} has begun {new.epoch} times anew, {self._losses} losses among them")

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
            self.steps += 1
        elif isinstance(message, SubmitRequest):
            self._turns.arrived(message, self.core)
            self.submitted += 1
        self._strike_actor(name)

    def wakes(self, box: Mailbox[Any, Any]) -> bool:
        """Whether a consumer that sleeps hears that there is something to take."""
        lost = not (box.closed or self._reliable) and self.injector.strike(box.name, "lost_wakeup")
        if lost:
            self.note("lost wake-up", box.name)
        return not lost

    @contextmanager
    def reliably(self) -> Iterator[None]:
        """No wake-up is lost inside."""
        self._reliable = True
        try:
            yield
        finally:
            self._reliable = False

    def idle(self, box: Mailbox[Any, Any]) -> None:
        if box.name in SILENT and not box.closed:
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
        core = self.core
        if core is None:
            return
        for wrong in check_core(core):
            self.fail(wrong)
        if self.scenario.pressure.host_slots:
            for wrong in check_loading(core, sorted(self.worker.tiers.loading())):
                self.fail(wrong)
        stream = self.scenario.config.stream
        margin = 4 * (1 + self.scenario.config.scheduler.max_plans_in_flight) * 4
        margin *= 1 + self.scenario.pressure.drafts
        if stream.flush_interval:  # what the output actor keeps until it wakes a reader comes all at once
            margin += int(3 * stream.flush_interval / self.scenario.pressure.step_seconds)
        for outbox in self.system.requests:
            late = check_outbox(outbox, stream.stream_budget_tokens, margin)
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
        if not isinstance(error, EXPECTED):
            self.fail(f"{name} crashed: {error!r}")

    def left(self, name: str) -> None:
        self.note("left", name)

    def labelled(self, pool: BlockPool, block: int, key: bytes) -> None:
        """8: equal keys mean equal content, and all of it is computed."""
        if self.scenario.pressure.torch:
            return
        if block_tables_of(self.core).pool is not pool:
            return
        held = self.worker.held(block)
        if None in held:
            self.fail(f"8: block {block} is found by its key before it is full: {held}")
        elif (known := self._contents.setdefault((pool.group_of(block), key), held)) != held:
            self.fail(f"8: one key names {held} and {known}")


def _brief(message: Any) -> str:
    """A message in a few words that are the same in every run."""
    kind = type(message).__name__
    for field in ("request", "row", "step"):
        value = getattr(message, field, None)
        if value is not None:
            return f"{kind} {field} {value}"
    result = getattr(message, "result", None)
    return kind if result is None else f"{kind} step {result.step} tokens {result.tokens}"
