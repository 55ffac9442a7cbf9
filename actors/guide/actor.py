"""Guide actor: turns what a request's output must look like into a program that the worker can run.

Owns:      the cache of compiled guides, and the requests that wait for theirs.
Receives:  GuideRequest; on the control lane AbortRequest, and the scheduler's BuildGuide.
Sends:     OpenRequest to the output actor, then SubmitRequest to the scheduler, as the input processor does for those
           without a guide; a refusal to the request's outbox. GuideBuilt on the scheduler's control lane.
On crash:  restarted with an empty cache; each request that waited is answered, each BuildGuide too.
"""

from collections.abc import Awaitable, Callable
from math import inf
from typing import Final, Never, assert_never

import anyio
import msgspec
from anyio.abc import TaskStatus

from troupellm.actors.guide.cache import GuideCache, GuideKey, key_of
from troupellm.actors.guide.compiler import GuideCompiler, GuideRefused, GuideTooCostly
from troupellm.actors.guide.fair_queue import MOST_WAITING, CompileTicket, TooManyWaiting, Turns
from troupellm.actors.runtime.mailbox import Mailbox, MailboxClosed
from troupellm.actors.runtime.ports import Clock
from troupellm.protocol.config.structured_outputs import GuideConfig
from troupellm.protocol.errors import (
    EngineStopped,
    InvalidRequest,
    RateLimited,
    RequestAborted,
    RequestFailed,
    TroupeError,
)
from troupellm.protocol.messages.guide import BuildGuide, GuideControl, GuideMessage, GuideRequest
from troupellm.protocol.messages.output import OutputMessage
from troupellm.protocol.messages.scheduler import (
    AbortRequest,
    GuideBuilt,
    SchedulerControl,
    SchedulerMessage,
    SubmitRequest,
)
from troupellm.protocol.messages.snapshot import GuideSnapshot
from troupellm.protocol.params.guide import BACKENDS, BuildOutcome, GuideProgram, GuideSpec

DEFAULT_BACKEND: Final = "llguidance"
COSTLY_SECONDS: Final = 60.0
"""How long a guide that took too much processor time, or memory that was not there, is refused at once: memory comes
back, and where the system does not count processor time the machine may have been busy."""
PARALLEL_BUILDS: Final = 2
"""Programs that the worker builds at once: a large one, and a small one that does not wait for it."""
MOST_BUILDS: Final = 4096
"""Programs of one client that wait to be built. Admission lets fewer requests in."""
_MOST_MESSAGE: Final = 480

_Waiting = dict[int, GuideRequest]
"""By request."""


class Guide:
    """The asynchronous shell. Requests of one tenant that ask for the same share one compilation."""

    def __init__(
        self,
        inbox: Mailbox[GuideMessage, GuideControl],
        output: Mailbox[OutputMessage, Never],
        scheduler: Mailbox[SchedulerMessage, SchedulerControl],
        compiler: GuideCompiler,
        prepare: Callable[[GuideProgram], Awaitable[BuildOutcome]],
        config: GuideConfig,
        clock: Clock,
        *,
        warm: bool,
    ) -> None:
        """
        Args:
            prepare: has the worker build a program beside its steps.
            warm: start a process before the first guide comes, and the others when it has.
        """
        self._inbox = inbox
        self._output = output
        self._scheduler = scheduler
        self._compiler = compiler
        self._prepare = prepare
        self._config = config
        self._backend = BACKENDS[config.guide_backend] or DEFAULT_BACKEND
        self._offered = {self._backend, *map(BACKENDS.__getitem__, config.guide_backends)}
        self._clock = clock
        self._warm = warm
        self._cache = GuideCache(config.guide_cache_bytes)
        self._compiling: dict[GuideKey, _Waiting] = {}
        self._turns = Turns(compiler.parallel, clock, for_small=1)
        self._build_turns = Turns(PARALLEL_BUILDS, clock, for_small=1)
        self._building = 0
        self._hits = self._compiles = self._refused = 0
        self._compile_seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a request waits for its guide."""
        return bool(self._compiling)

    def snapshot(self) -> GuideSnapshot:
        return GuideSnapshot(
            hits=self._hits,
            compiles=self._compiles,
            refused=self._refused,
            evicted=self._cache.evicted,
            cached=len(self._cache),
            cached_bytes=self._cache.num_bytes,
            waiting=self._building + sum(map(len, self._compiling.values())),
            compile_seconds=self._compile_seconds,
        )

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until the inbox is closed and empty and everything in it was passed on."""
        task_status.started()
        try:
            async with anyio.create_task_group() as group:
                if self._warm:
                    group.start_soon(self._compiler.warm_up, 1)
                while await self._inbox.wait():
                    while (said := self._inbox.take()) is not None:
                        match said:
                            case GuideRequest():
                                await self._receive(said, group.start_soon)
                            case AbortRequest(request=request):
                                self._drop(request)
                            case BuildGuide():
                                self._building += 1
                                group.start_soon(self._build, said)
                            case _:
                                assert_never(said)
        finally:
            for waiting in self._compiling.values():
                for message in waiting.values():
                    _refuse(message, EngineStopped("the guide actor ended", code="engine_restarting"))

    async def _receive(self, message: GuideRequest, start: Callable[..., object]) -> None:
        key = self._key(message.spec, message.submitted.tenant)
        if key.backend not in self._offered:
            self._refused += 1
            field, offered = message.spec.field, ", ".join(sorted(self._offered))
            text = f"{field}: the backend {key.backend} may not be chosen on this server; use one of {offered}"
            _refuse(message, InvalidRequest(text, param=field, code="unsupported_parameter"))
            return
        refusal = self._cache.refusal(key, self._clock.now())
        if refusal is not None:
            self._hits += 1
            self._refuse_all({message.opened.request: message}, refusal)
            return
        program = self._cache.program(key)
        if program is not None:
            self._hits += 1
            await self._pass_on(message, program)
            return
        waiting = self._compiling.get(key)
        if waiting is not None:
            self._hits += 1
            waiting[message.opened.request] = message
            return
        try:
            ticket = self._turns.queue(message.submitted.tenant, len(key.spec.source))
        except TooManyWaiting:
            self._refused += 1
            text = f"{message.spec.field}: more than {MOST_WAITING} new ones of this client wait to be compiled"
            _refuse(message, RateLimited(text))
            return
        self._compiling[key] = {message.opened.request: message}
        start(self._compile, key, ticket)
        if self._warm:  # where guides are used, a small one must not wait for a process to start
            start(self._compiler.warm_up, self._compiler.parallel)

    def _key(self, spec: GuideSpec, tenant: str) -> GuideKey:
        config = self._config
        spec = msgspec.structs.replace(
            spec,
            any_whitespace=spec.any_whitespace and config.guide_any_whitespace,
            additional_properties=spec.additional_properties and config.guide_additional_properties,
        )
        return key_of(spec, BACKENDS[spec.backend] or self._backend, tenant)

    async def _compile(self, key: GuideKey, ticket: CompileTicket) -> None:
        """Compile once for all who wait, unless they leave before it begins."""
        waiting = self._compiling[key]
        try:
            async with self._turns.turn(ticket):
                if not waiting:
                    return
                self._compiles += 1
                begin = self._clock.now()
                program = await self._compiler.compile(key.spec, key.backend)
                program = msgspec.structs.replace(program, tenant=key.tenant)
                self._compile_seconds += self._clock.now() - begin
                self._cache.keep(key, program)
        except GuideRefused as refusal:
            until = self._clock.now() + COSTLY_SECONDS if isinstance(refusal, GuideTooCostly) else inf
            self._cache.keep_refusal(key, str(refusal), until)
            self._refuse_all(waiting, str(refusal))
            waiting.clear()
        except TroupeError as error:
            for message in waiting.values():
                _refuse(message, _same(error))
            waiting.clear()
        else:
            while waiting:
                _, message = waiting.popitem()
                await self._pass_on(message, program)
        finally:
            if not waiting:
                self._compiling.pop(key, None)

    async def _build(self, ask: BuildGuide) -> None:
        """Have the worker build a program when it is its tenant's turn, and say what came of it."""
        outcome: BuildOutcome = "lost"
        try:
            ticket = self._build_turns.queue(ask.tenant, len(ask.program.text), most=MOST_BUILDS)
            async with self._build_turns.turn(ticket):
                outcome = await self._prepare(ask.program)
        except TooManyWaiting:
            outcome = "late"
        finally:
            self._building -= 1
            self._scheduler.control(GuideBuilt(ask.program, ask.engine_epoch, outcome))

    async def _pass_on(self, message: GuideRequest, program: GuideProgram) -> None:
        try:
            await self._output.put(message.opened)
            await self._scheduler.put(guided(message, program))
        except MailboxClosed:
            self._give_up(message, EngineStopped("the engine was closed"))
        except BaseException:  # cancelled in between: no list holds the request any more, so it is answered here
            self._give_up(message, EngineStopped("the guide actor ended", code="engine_restarting"))
            raise

    def _give_up(self, message: GuideRequest, error: TroupeError) -> None:
        """Refuse a request that the output actor or the scheduler may already know of."""
        _refuse(message, error)
        self._scheduler.control(AbortRequest(message.opened.request))

    def _drop(self, request: int) -> None:
        """Refuse an aborted request that still waits for its guide; no other actor knows of it yet."""
        for waiting in self._compiling.values():
            message = waiting.pop(request, None)
            if message is not None:
                _refuse(message, RequestAborted("the request was aborted"))

    def _refuse_all(self, waiting: _Waiting, reason: str) -> None:
        self._refused += len(waiting)
        for message in waiting.values():
            field = message.spec.field
            text = f"{field}: {reason}"[:_MOST_MESSAGE]
            _refuse(message, InvalidRequest(text, param=field, code="invalid_schema"))


def guided(message: GuideRequest, program: GuideProgram) -> SubmitRequest:
    """The request, its sequences with the program."""
    replace = msgspec.structs.replace
    program = replace(program, field=message.spec.field)
    sequences = tuple(
        replace(spec, sampling=replace(spec.sampling, guide=program)) for spec in message.submitted.sequences
    )
    return replace(message.submitted, sequences=sequences)


def _same(error: TroupeError) -> TroupeError:
    """An error of one's own for each: raising one changes it."""
    kind = EngineStopped if isinstance(error, EngineStopped) else RequestFailed
    copy = kind(error.message, param=error.param, code=error.code)
    copy.__cause__ = error
    return copy


def _refuse(message: GuideRequest, error: TroupeError) -> None:
    message.opened.outbox.fail(error)
    message.opened.outbox.wake()
