"""Adapter library: knows LoRA adapters by their names, and has the worker read them.

Owns:      names that are being looked for, with the requests that wait for them; the registry outlives it.
Receives:  PrepareRequest of requests that name an adapter, AddAdapter, RemoveAdapter, FindAdapter; on the control lane
           AbortRequest, and the scheduler's ServeAdapter and DropAdapter.
Sends:     PrepareRequest to the input processor, with the digest of the adapter; a refusal to the request's outbox.
           WantAdapter and AdapterLoaded on the scheduler's control lane.
On crash:  restarted with the same registry; each request and call that waited is answered, each ServeAdapter too.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Never, assert_never

import anyio
import msgspec
from anyio.abc import TaskStatus

from troupellm.actors.adapters.registry import AdapterRegistry
from troupellm.actors.adapters.resolvers import LoraResolver
from troupellm.actors.runtime.mailbox import Mailbox, MailboxClosed
from troupellm.actors.runtime.ports import Clock, Threads
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.errors import (
    AdapterError,
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
    RequestAborted,
    RequestFailed,
    TroupeError,
)
from troupellm.protocol.messages.adapter_library import (
    AdapterControl,
    AdapterMessage,
    AddAdapter,
    DropAdapter,
    FindAdapter,
    RemoveAdapter,
    ServeAdapter,
)
from troupellm.protocol.messages.adapters import ADAPTERS_LATE, PREPARE_SECONDS, AdapterInfo, AdapterPreparation
from troupellm.protocol.messages.input import IntakeMessage, PrepareRequest
from troupellm.protocol.messages.scheduler import (
    AbortRequest,
    AdapterLoaded,
    SchedulerControl,
    SchedulerMessage,
    WantAdapter,
)

logger = logging.getLogger("troupellm.engine")

PARALLEL_LOADS: Final = 2
"""Adapters that are read at once: a large one, and a small one that does not wait for it."""
RESOLVE_SECONDS: Final = 30.0
"""That a resolver may take for a name."""
_ENDED: Final = "the adapter library ended"

Prepare = Callable[[str, str], Awaitable[AdapterPreparation]]
"""Has the worker read an adapter: digest and folder."""


class Inspected(msgspec.Struct, frozen=True):
    """An adapter's folder, as its files say without their weights."""

    digest: str
    rank: int
    num_bytes: int


class AdapterSources(msgspec.Struct, frozen=True, kw_only=True):
    """Where adapters come from."""

    registry: AdapterRegistry
    """Outlives the library actor."""
    resolvers: Sequence[LoraResolver]
    """Asked in this order for a name that the registry does not have."""
    inspect: Callable[[str], Inspected]
    """Reads a folder's files on a thread; raises AdapterError."""
    parent: str
    """The name of the model, for adapters that resolvers find."""
    most_searches: int
    """Names that are looked for, or loaded, at once."""


class _Turn:
    """Of the calls that load one name: one at a time."""

    __slots__ = ("lock", "num_users")

    def __init__(self) -> None:
        self.lock = anyio.Lock()
        self.num_users = 0


class _Preparing:
    """A call that waits for the worker to read an adapter."""

    __slots__ = ("outcome", "waiter")

    def __init__(self) -> None:
        self.waiter: Waiter = new_waiter()
        self.outcome = ADAPTERS_LATE


@asynccontextmanager
async def _turn(table: dict[str, _Turn], key: str) -> AsyncIterator[None]:
    """Wait for one's turn. A key that is not in use is not in the table."""
    turn = table.setdefault(key, _Turn())
    turn.num_users += 1
    try:
        async with turn.lock:
            yield
    finally:
        turn.num_users -= 1
        if not turn.num_users:
            del table[key]


class AdapterLibrary:
    """The asynchronous shell. All who ask for one unknown name share one search."""

    def __init__(
        self,
        inbox: Mailbox[AdapterMessage, AdapterControl],
        intake: Mailbox[IntakeMessage, Never],
        scheduler: Mailbox[SchedulerMessage, SchedulerControl],
        sources: AdapterSources,
        *,
        prepare: Prepare,
        release: Callable[[str], None],
        engine_epoch: Callable[[], int],
        threads: Threads,
        clock: Clock,
    ) -> None:
        """
        Args:
            prepare: never raises.
            release: has the worker free the host memory of a digest.
            engine_epoch: how often the worker was lost.
        """
        self._inbox = inbox
        self._intake = intake
        self._scheduler = scheduler
        self._sources, self._registry = sources, sources.registry
        self._prepare = prepare
        self._release = release
        self._engine_epoch = engine_epoch
        self._threads = threads
        self._clock = clock
        self._searches: dict[str, list[PrepareRequest | FindAdapter]] = {}
        """By name, those that wait."""
        self._adding: list[AddAdapter] = []
        self._names: dict[str, _Turn] = {}
        """Names that are being loaded."""
        self._serving: set[str] = set()
        """Digests that the scheduler has asked for."""
        self._wanted: dict[str, list[_Preparing]] = {}
        """By digest, the calls that wait for the worker to read it."""
        self._loads = anyio.CapacityLimiter(PARALLEL_LOADS)

    @property
    def busy(self) -> bool:
        """Whether a request waits for its adapter."""
        return bool(self._searches)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until the inbox is closed and empty and everything in it was passed on."""
        task_status.started()
        try:
            async with anyio.create_task_group() as group:
                while await self._inbox.wait():
                    while (message := self._inbox.take()) is not None:
                        await self._handle(message, group.start_soon)
        finally:
            self._answer_all()

    async def _handle(self, message: AdapterMessage | AdapterControl, start: Callable[..., object]) -> None:
        match message:
            case PrepareRequest():
                await self._look_up(message, message.submission.adapter, start)
            case FindAdapter(name=name):
                await self._look_up(message, name, start)
            case AddAdapter():
                self._begin_adding(message, start)
            case RemoveAdapter(name=name, done=done):
                try:
                    done(self._registry.remove(name))
                except TroupeError as error:
                    done(error)
            case AbortRequest(request=request):
                self._drop(request)
            case ServeAdapter():
                self._serving.add(message.digest)
                start(self._serve, message)
            case DropAdapter(digest=digest):
                self._release(digest)
            case _:
                assert_never(message)

    async def _look_up(self, asker: PrepareRequest | FindAdapter, name: str, start: Callable[..., object]) -> None:
        info = self._registry.use(name)
        if info is not None:
            await self._pass_on(asker, info)
        elif name in self._searches:
            self._searches[name].append(asker)
        elif not self._sources.resolvers or self._registry.is_missing(name, self._clock.now()):
            _refuse(asker, self._registry.not_found(name))
        elif len(self._searches) >= self._sources.most_searches:
            _refuse(asker, EngineOverloaded(f"{len(self._searches)} unknown model names are being looked for"))
        else:
            try:
                self._registry.check(name, param="model")
            except InvalidRequest:
                _refuse(asker, self._registry.not_found(name))
                return
            self._searches[name] = [asker]
            start(self._search, name)

    async def _search(self, name: str) -> None:
        """Ask the resolvers for a name, and answer all who wait for it by then."""
        waiting = self._searches[name]
        try:
            info = await self._resolved(name)
            if info is None:
                self._registry.note_missing(name, self._clock.now())
            else:
                self._registry.add(info, resolved=True)
            while waiting:
                asker = waiting.pop()
                if info is None:
                    _refuse(asker, self._registry.not_found(name))
                else:
                    await self._pass_on(asker, info)
        except TroupeError as error:
            for asker in waiting:
                _refuse(asker, _same(error))
            waiting.clear()
        finally:
            if not waiting:
                del self._searches[name]

    async def _resolved(self, name: str) -> AdapterInfo | None:
        """The adapter that the first resolver finds. The choke point for what plug-ins raise."""
        for resolver in self._sources.resolvers:
            folder = None
            try:
                with anyio.fail_after(RESOLVE_SECONDS):
                    folder = await resolver.resolve(name)
            except TimeoutError:
                raise EngineStopped(f"the model {name} was looked for too long", code="engine_restarting") from None
            except TroupeError:
                raise
            except Exception as error:
                logger.error("a LoRA resolver failed", exc_info=error)
                raise RequestFailed(f"a resolver of LoRA adapters failed over the model {name}") from error
            if folder is not None:
                return await self._inspected(name, str(folder), self._sources.parent)
        return None

    async def _inspected(self, name: str, folder: str, parent: str) -> AdapterInfo:
        """The choke point for what reading a folder raises."""
        try:
            async with self._loads:
                found = await self._threads.run(self._sources.inspect, folder)
        except TroupeError:
            raise
        except Exception as error:
            logger.error("the folder of an adapter could not be read", exc_info=error)
            raise RequestFailed(f"the adapter {name} could not be read") from error
        return AdapterInfo(
            name=name, digest=found.digest, folder=folder, parent=parent, rank=found.rank, num_bytes=found.num_bytes
        )

    def _begin_adding(self, message: AddAdapter, start: Callable[..., object]) -> None:
        try:
            self._registry.check(message.name, replace=message.replace)
            if len(self._adding) >= self._sources.most_searches:
                raise EngineOverloaded(f"{len(self._adding)} adapters are being loaded")
        except TroupeError as error:
            message.done(error)
            return
        self._adding.append(message)
        start(self._add, message)

    async def _add(self, message: AddAdapter) -> None:
        """Read an adapter here and in the worker, then serve it."""
        try:
            async with _turn(self._names, message.name):
                self._registry.check(message.name, replace=message.replace)
                info = await self._inspected(message.name, message.folder, message.parent)
                preparation = await self._read_by_worker(info)
                if preparation.outcome == "refused":
                    raise AdapterError(preparation.error)
                if preparation.outcome == "late":
                    raise EngineStopped(preparation.error, code="server_is_overloaded")
                self._registry.check(message.name)  # the last place may be taken meanwhile
                self._registry.add(info)  # where there is no worker now, the next one reads it when a request needs it
            answer: AdapterInfo | TroupeError = info
        except TroupeError as error:
            answer = error
        self._adding.remove(message)
        message.done(answer)

    async def _read_by_worker(self, info: AdapterInfo) -> AdapterPreparation:
        """Have the worker read an adapter when the scheduler has made room for it."""
        preparing = _Preparing()
        waiting = self._wanted.setdefault(info.digest, [])
        waiting.append(preparing)
        self._scheduler.control(WantAdapter(info.digest, info.folder))
        if not await preparing.waiter.wait(PREPARE_SECONDS):
            waiting.remove(preparing)
        return preparing.outcome

    async def _serve(self, ask: ServeAdapter) -> None:
        """Have the worker read an adapter, and tell all who wait for that."""
        async with self._loads:
            epoch = self._engine_epoch()
            preparation = await self._prepare(ask.digest, ask.folder)
        self._serving.discard(ask.digest)
        self._scheduler.control(AdapterLoaded(ask.digest, epoch, preparation))
        for preparing in self._wanted.pop(ask.digest, ()):
            preparing.outcome = preparation
            preparing.waiter.wake()

    async def _pass_on(self, asker: PrepareRequest | FindAdapter, info: AdapterInfo) -> None:
        if isinstance(asker, FindAdapter):
            asker.done(info)
            return
        try:
            await self._intake.put(msgspec.structs.replace(asker, adapter=info.ref))
        except MailboxClosed:
            _refuse(asker, EngineStopped("the engine was closed"))
        except BaseException:  # cancelled: no list holds the request any more, so it is answered here
            _refuse(asker, EngineStopped(_ENDED, code="engine_restarting"))
            raise

    def _drop(self, request: int) -> None:
        """Refuse an aborted request that still waits for its adapter; no other actor knows of it yet."""
        for waiting in self._searches.values():
            for asker in waiting:
                if isinstance(asker, PrepareRequest) and asker.request == request:
                    waiting.remove(asker)
                    _refuse(asker, RequestAborted("the request was aborted"))
                    return

    def _answer_all(self) -> None:
        """This actor ends: all who wait are told."""
        for waiting in self._searches.values():
            for asker in waiting:
                _refuse(asker, EngineStopped(_ENDED, code="engine_restarting"))
        for message in self._adding:
            message.done(EngineStopped(_ENDED, code="engine_restarting"))
        for digest in self._serving:
            late = AdapterPreparation(outcome="late", error=_ENDED)
            self._scheduler.control(AdapterLoaded(digest, self._engine_epoch(), late))


def _same(error: TroupeError) -> TroupeError:
    """An error of one's own for each: raising one changes it."""
    copy: Any = type(error).__new__(type(error))
    Exception.__init__(copy, error.message)
    vars(copy).update(vars(error))
    copy.__cause__ = error
    assert isinstance(copy, TroupeError)
    return copy


def _refuse(asker: PrepareRequest | FindAdapter, error: TroupeError) -> None:
    if isinstance(asker, FindAdapter):
        asker.done(error)
        return
    asker.outbox.fail(error)
    asker.outbox.wake()
