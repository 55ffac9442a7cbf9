"""The outside world of a simulated engine: virtual time, seeded randomness, threads that are tasks."""

import struct
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from simulator.faults import Injected, InjectedAllocation, InjectedDeath, Injector
from simulator.workload import STEP_TIMEOUT
from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.adapters import AdapterPreparation
from troupellm.protocol.messages.sleep import (
    EMPTY,
    WITHOUT_CACHE,
    SleepWorker,
    StopProfile,
    WakeWorker,
    WorkerCommand,
    WorkerReport,
)
from troupellm.protocol.messages.worker import (
    LaunchedStep,
    ProgressSink,
    RowError,
    StepPlan,
    StepResult,
    Worker,
    WorkerReady,
)
from troupellm.protocol.messages.worker_abilities import Wait
from troupellm.protocol.params.guide import GuideProgram, GuideSpec

_POOL_SECONDS = 0.01


class SimClock:
    """The wall jumps when `offset` is changed; the other clock does not."""

    def __init__(self) -> None:
        self.offset = 1_700_000_000.0

    def now(self) -> float:
        return anyio.current_time()

    def wall(self) -> float:
        return anyio.current_time() + self.offset


class SimRandomness:
    def __init__(self, random: Random) -> None:
        self._random = random

    def seed(self) -> int:
        return self._random.getrandbits(64)

    def token(self, nbytes: int) -> str:
        return self._random.randbytes(nbytes).hex()


class Pace:
    """How long steps take. A hung one never returns."""

    def __init__(self, random: Random, injector: Injector, step_seconds: float) -> None:
        self._random = random
        self._injector = injector
        self._step_seconds = step_seconds
        self._slow_again = 0.0
        """When the next call may be slow."""

    async def take_time(self) -> None:
        seconds = self._step_seconds * self._random.choice((0.5, 1.0, 2.0))
        if self._injector.strike("worker", "hang"):
            await anyio.sleep_forever()
        now = anyio.current_time()
        if now >= self._slow_again:  # slow calls in a row would add up to one that counts as hung
            if self._injector.strike("worker", "late"):
                seconds += 0.9 * STEP_TIMEOUT
                self._slow_again = now + 2 * STEP_TIMEOUT
            elif self._injector.strike("worker", "stall"):
                seconds += 0.25 * STEP_TIMEOUT
                self._slow_again = now + STEP_TIMEOUT
        await anyio.sleep(seconds)


Done = Callable[[Any, BaseException | None], None]


class SimThread:
    """The thread of the model step. A call takes virtual time; nothing comes after one that hangs.

    Beside a device that computes by itself calls take none, and waits for that do.
    """

    def __init__(self, pace: Pace, start_soon: Callable[..., object], *, ahead: bool = False) -> None:
        self._pace = pace
        self._start_soon = start_soon
        self._ahead = ahead
        self._calls: deque[tuple[Callable[[], Any], Done]] = deque()
        self._waiting: deque[tuple[Callable[[], Any], Done]] = deque()
        self._works = self._waits = False

    def post(self, call: Callable[[], Any], done: Done) -> None:
        self._calls.append((call, done))
        if not self._works:
            self._works = True
            self._start_soon(self._work)

    def post_behind(self, wait: Callable[[], None], call: Callable[[], Any], done: Done) -> None:
        self._waiting.append((call, done))
        if not self._waits:
            self._waits = True
            self._start_soon(self._wait)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        finished = anyio.Event()
        outcome: list[Any] = []

        def done(*settled: Any) -> None:
            outcome.extend(settled)
            finished.set()

        self.post(lambda: function(*args), done)
        await finished.wait()
        result, error = outcome
        if error is not None:
            raise error
        return result

    async def _work(self) -> None:
        while self._calls:
            call, done = self._calls.popleft()
            await (anyio.lowlevel.checkpoint() if self._ahead else self._pace.take_time())
            try:
                result = call()
            except Exception as error:
                done(None, error)
            else:
                done(result, None)
        self._works = False

    async def _wait(self) -> None:
        while self._waiting:
            await self._pace.take_time()
            self.post(*self._waiting.popleft())
        self._waits = False


class SimCompiler:
    """Compiles any guide to itself, in virtual time."""

    parallel = 2

    def __init__(self, random: Random) -> None:
        self._random = random

    async def compile(self, spec: GuideSpec, backend: str) -> GuideProgram:
        await anyio.sleep(_POOL_SECONDS * self._random.choice((0.0, 1.0, 5.0)))
        return GuideProgram(backend=backend, text=spec.source, after=spec.after)

    async def warm_up(self, processes: int) -> None:
        """Nothing is needed."""


class SimPool:
    """The threads for long prompts."""

    def __init__(self, random: Random, injector: Injector) -> None:
        self._random = random
        self._injector = injector

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        await anyio.sleep(_POOL_SECONDS * self._random.choice((0.0, 1.0, 5.0)))
        if self._injector.strike("pool", "exception"):
            raise Injected("a thread of the pool broke")
        return function(*args)


class FaultyWorker:
    """A worker that dies, runs out of memory, fails rows, and answers nonsense, when a fault goes off."""

    def __init__(
        self,
        worker: Worker,
        random: Random,
        injector: Injector,
        blame_row: Callable[[int], frozenset[int]],
        *,
        ahead: bool = False,
    ) -> None:
        """
        Args:
            blame_row: told of a row that is about to fail; all rows of its request.
            ahead: its device computes by itself.
        """
        self._worker = worker
        self._ahead = ahead
        self._launched: list[LaunchedStep] = []
        self._complete: LaunchedStep | None = None
        self._random = random
        self._injector = injector
        self._blame_row = blame_row
        self._last: StepResult | None = None
        self.missing: set[str] = set()
        """Memory that it has given back for a sleep."""
        self._poison: frozenset[int] = frozenset()
        """Rows that kill the worker whenever it computes one of them."""

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        return self._worker.load(config, progress)

    def reset(self) -> None:
        self._last = None
        self._launched.clear()
        self._worker.reset()

    def close(self) -> None:
        self._worker.close()

    def command(self, command: WorkerCommand, progress: ProgressSink) -> WorkerReport:
        """Its memory is gone after a sleep, and it takes no plan in it."""
        worker: Any = self._worker
        if isinstance(command, SleepWorker):
            self._last = None
            worker.fall_asleep(keeps_host=command.level <= WITHOUT_CACHE)
            self.missing |= {"kv_cache"} | ({"weights"} if command.level >= EMPTY else set())
        elif isinstance(command, WakeWorker):
            self.missing -= ({"weights"} if command.weights else set()) | ({"kv_cache"} if command.kv_cache else set())
        elif isinstance(command, StopProfile) and self.missing:
            raise RuntimeError("a sleeping worker was told to do something else")
        return WorkerReport(ready=None if self.missing else worker._ready)

    def prepare_adapter(self, digest: str, folder: str) -> AdapterPreparation:
        if self._injector.strike("adapters", "refused"):
            return AdapterPreparation(outcome="refused", error="a tensor has the wrong shape")
        if self._injector.strike("adapters", "late"):
            return AdapterPreparation(outcome="late", error="it took too long")
        prepared: AdapterPreparation = self._reader.prepare(digest, folder)
        return prepared

    def release_adapter(self, digest: str) -> None:
        self._reader.release(digest)

    @property
    def _reader(self) -> Any:
        """The inner worker's adapters."""
        worker: Any = self._worker
        return worker.adapters

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if self.missing:
            raise RuntimeError("a plan came to a sleeping worker")
        if self._injector.strike("worker", "death"):
            raise InjectedDeath("the worker died")
        if self._injector.strike("worker", "allocation"):
            raise InjectedAllocation("no memory for this step")
        if self._injector.strike("worker", "killed"):
            raise WorkerGone("somebody killed the worker", fault=False)
        if plan.rows and not self._poison and self._injector.strike("worker", "poison"):
            self._injector.hits["worker", "poison"] -= 1  # each death counts, below
            self._poison = self._blame_row(self._random.choice(plan.rows))
        if not self._injector.calm and not self._poison.isdisjoint(plan.rows):
            self._injector.hits["worker", "poison"] += 1
            raise InjectedDeath("the worker was poisoned")
        ticket = self._worker.launch(plan)
        self._launched.append(ticket)
        return ticket

    def under_way(self, ticket: LaunchedStep) -> Wait | None:
        return (lambda: None) if self._ahead else None

    def incomplete(self, ticket: LaunchedStep) -> bool:
        """Every third step is, as those with guided rows may be."""
        return self._ahead and ticket.step % 3 == 0 and ticket is not self._complete

    def complete(self, ticket: LaunchedStep) -> None:
        assert self._launched[0] is ticket, "a step was completed before the result before it was collected"
        self._complete = ticket

    def collect(self, ticket: LaunchedStep) -> StepResult:
        right = self._worker.collect(ticket)
        self._launched.remove(ticket)
        result = right
        if result.rows and self._injector.strike("worker", "row_error"):
            result = self._fail_row(result)
        result = self._garbled(result)
        self._last = right
        return result

    def _fail_row(self, result: StepResult) -> StepResult:
        guilty = self._random.randrange(len(result.rows))
        row = result.rows[guilty]
        self._blame_row(row)
        spans = _spans(result)
        spans[guilty] = ()
        if result.drafted:
            result = _changed(
                result, drafted=_without(result.drafted, guilty), accepted=_without(result.accepted, guilty)
            )
        return _replaced(result, spans, errors=(RowError(row, "the logits are not finite"),))

    def _garbled(self, result: StepResult) -> StepResult:
        strike = self._injector.strike
        if strike("worker", "wrong_shape"):
            return _misdescribed(result) if result.logprobs else _changed(result, tokens=(*result.tokens, 1))
        if strike("worker", "stale_epoch"):
            return _changed(result, engine_epoch=result.engine_epoch - 1)
        if result.tokens and strike("worker", "bad_id"):
            return _with_bad_id(result, self._random.choice((-1, 10**6)))
        if result.rows and strike("worker", "missing_row"):
            return _changed(
                result,
                rows=result.rows[1:],
                epochs=result.epochs[1:],
                token_counts=result.token_counts[1:],
                tokens=result.tokens[result.token_counts[0] :],
                drafted=result.drafted[1:],
                accepted=result.accepted[1:],
            )
        if self._last is not None and strike("worker", "duplicate"):
            return self._last
        return result


def _with_bad_id(result: StepResult, bad: int) -> StepResult:
    """Of a token; of the last alternative, where log-probabilities tell of some."""
    if not result.logprobs:
        return _changed(result, tokens=(bad, *result.tokens[1:]))
    first, *others = result.logprobs
    ids = first.token_ids[:-4] + struct.pack("<i", bad)
    return _changed(result, logprobs=(msgspec.structs.replace(first, token_ids=ids), *others))


def _misdescribed(result: StepResult) -> StepResult:
    """Log-probabilities have columns that do not fit each other; which ones, the step decides."""
    first, *others = result.logprobs
    wrong: tuple[dict[str, Any], ...] = (
        {"width": 0},
        {"token_ids": first.token_ids[4:]},
        {"logprobs": first.logprobs[:-1]},
        {"ranks": first.ranks + bytes(4)},
    )
    return _changed(result, logprobs=(msgspec.structs.replace(first, **wrong[result.step % len(wrong)]), *others))


def _spans(result: StepResult) -> list[tuple[int, ...]]:
    """Tokens by row."""
    spans, position = [], 0
    for count in result.token_counts:
        spans.append(result.tokens[position : position + count])
        position += count
    return spans


def _without(counts: tuple[int, ...], index: int) -> tuple[int, ...]:
    """One of them is zero."""
    return (*counts[:index], 0, *counts[index + 1 :])


def _replaced(result: StepResult, spans: list[tuple[int, ...]], **fields: Any) -> StepResult:
    return _changed(
        result,
        token_counts=tuple([len(span) for span in spans]),
        tokens=tuple([token for span in spans for token in span]),
        **fields,
    )


def _changed(result: StepResult, **fields: Any) -> StepResult:
    values = {name: getattr(result, name) for name in StepResult.__struct_fields__}
    return StepResult(**{**values, **fields})
