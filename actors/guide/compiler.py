"""Compiling guides in processes that may be killed: what strangers send is read and compiled there first.

A grammar that takes too much time or memory costs its process, which is replaced. Other waiting guides go to another
process, or to the replacement.
"""

import logging
from contextlib import suppress
from typing import Protocol

import anyio
import msgspec

from troupellm.actors.runtime.compute_child import ChildGone, ComputeChild, TakesTooLong, TooBusy
from troupellm.actors.runtime.processes import Processes
from troupellm.protocol.errors import EngineStopped, RequestFailed, TroupeError
from troupellm.protocol.params.guide import GuideProgram, GuideSpec
from troupellm.protocol.wire.frames import Assembler, Codec
from troupellm.protocol.wire.guide_compiler import (
    HELLO,
    MAX_FRAME_BYTES,
    Compile,
    Compiled,
    FromCompiler,
    LoadBackend,
    Prepare,
    Prepared,
    Refused,
    ToCompiler,
)

logger = logging.getLogger("troupellm.guide")

MODULE = "troupellm.models.structured_outputs.compile_main"
START_SECONDS = 60.0
"""Reading the tokenizer of a large vocabulary takes seconds, on a busy machine many."""
PATIENCE = 10
"""A guide that does not get its processor time is waited for up to so many times as long."""
MOST_PATIENCE_SECONDS = 10.0
"""Most seconds that are added for that, or its own limit if that is longer: a waiting guide holds one of few
processes."""


class GuideRefused(Exception):
    """The guide itself is at fault: it would be refused again. The text is fit for clients."""


class GuideTooCostly(GuideRefused):
    """It had the time that a guide may take, or there was no memory left for it: another try may fare better."""


class _NoBackend(GuideRefused):
    """A backend that is not there."""


class GuideCompiler(Protocol):
    """The port through which the guide actor has guides compiled."""

    @property
    def parallel(self) -> int:
        """How many are compiled at once at most."""

    async def compile(self, spec: GuideSpec, backend: str) -> GuideProgram:
        """Check a guide and translate it for the worker. At most `parallel` calls at once.

        Raises:
            GuideRefused: it cannot be served.
            TroupeError: guides cannot be compiled here, or not now.
        """

    async def warm_up(self, processes: int) -> None:
        """Have so many processes ready or at work, but no more than `parallel`; never raises."""


class CompilerSettings(msgspec.Struct, frozen=True, kw_only=True):
    tokenizer_folder: str
    follow_links: bool = False
    """Also out of the folder."""
    vocab_width: int
    timeout: float
    """Seconds of processor time that one guide may take; of any time where the system does not count those."""
    memory_bytes: int
    depth: int
    parallel: int = 2


class ProcessCompiler:
    """Implements `GuideCompiler`. Processes are started when they are needed, and stay."""

    def __init__(self, settings: CompilerSettings, processes: Processes) -> None:
        self._settings = settings
        self._processes = processes
        self._idle: list[_Child] = []
        self._all: list[_Child] = []
        self._warming: anyio.Event | None = None
        """Set when the process that `warm_up` starts is ready, or has failed."""
        self._closed = False
        self.num_killed = 0
        """Processes that were killed over a guide."""

    @property
    def parallel(self) -> int:
        return self._settings.parallel

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._all if child.process is not None]

    async def compile(self, spec: GuideSpec, backend: str) -> GuideProgram:
        for _ in range(2):
            with suppress(_Killed):
                return await self._compile(spec, backend)
        raise _not_now()

    async def _compile(self, spec: GuideSpec, backend: str) -> GuideProgram:
        """Raises _Killed beside what `compile` does."""
        child = await self._take()
        oom_kills = self._processes.oom_kills()
        begun = healthy = False
        try:
            if backend not in child.backends:
                await child.load(backend)
            begun = True
            answer = await self._ask(child, Compile(spec=spec, backend=backend, depth=self._settings.depth))
            healthy = True
        except _NoBackend:
            healthy = True
            raise
        except ChildGone as gone:
            logger.warning("a process that compiled a guide is gone: %s", gone)
            if not begun:
                raise _not_now() from None
            if await child.was_killed():
                if oom_kills != self._processes.oom_kills():  # the next one would run out of memory too
                    raise GuideTooCostly("it takes more memory to compile than there is now") from None
                raise _Killed from None
            raise GuideRefused("it takes too much memory to compile") from None
        finally:
            if healthy and not self._closed:
                self._idle.append(child)
            else:
                self.num_killed += 1
                with anyio.CancelScope(shield=True):
                    await self._end(child)
        match answer:
            case Compiled(text=text):
                return GuideProgram(backend=backend, text=text, after=spec.after, early_end=spec.early_end)
            case Refused(message=message):
                raise GuideRefused(message)
            case _:
                raise RequestFailed("the guide could not be compiled")

    async def _ask(self, child: "_Child", message: Compile) -> FromCompiler:
        """Give a child a guide. A busy machine may leave it little of the time that a guide may take."""
        timeout = self._settings.timeout
        patience = min(PATIENCE * timeout, timeout + max(MOST_PATIENCE_SECONDS, timeout))
        try:
            return await child.ask(message, timeout, patience)
        except TooBusy:
            raise _not_now() from None
        except TakesTooLong:
            raise GuideTooCostly(f"it takes longer than {timeout:g} s to compile") from None

    async def warm_up(self, processes: int) -> None:
        if self._warming is not None:
            return
        with suppress(TroupeError):
            while len(self._all) < min(processes, self._settings.parallel):
                warming = self._warming = anyio.Event()
                try:
                    self._idle.append(await self._start())
                finally:
                    self._warming = None
                    warming.set()

    async def close(self) -> bool:
        """End all processes; False when one does not go."""
        self._closed = True
        return all([await self._end(child) for child in list(self._all)])

    async def _take(self) -> "_Child":
        """An idle process, or a new one that has read the tokenizer. One that is being started is ready sooner."""
        while self._idle or self._warming is not None:
            if not self._idle:
                assert self._warming is not None
                await self._warming.wait()
                continue
            child = self._idle.pop()
            if not child.gone:
                return child
            await self._end(child)
        return await self._start()

    async def _start(self) -> "_Child":
        if self._closed:
            raise RequestFailed("guides are not compiled any more")
        child = _Child()
        self._all.append(child)
        ready = False
        try:
            await child.open(self._processes, self._settings)
            ready = True
        finally:
            if not ready:
                with anyio.CancelScope(shield=True):
                    await self._end(child)
        return child

    async def _end(self, child: "_Child") -> bool:
        if child in self._all:
            self._all.remove(child)
        return await child.end()


class _Killed(Exception):
    """A process outside the engine killed the compiler; the guide is not to blame."""


def _not_now() -> EngineStopped:
    return EngineStopped("guides cannot be compiled now", code="engine_restarting")


class _Child(ComputeChild[ToCompiler, FromCompiler]):
    """One process."""

    def __init__(self) -> None:
        limit = MAX_FRAME_BYTES
        super().__init__(Codec(limit=limit), Assembler(FromCompiler, HELLO, limit=limit), _log)
        self.backends = {"llguidance"}
        """Those that it has ready."""

    async def open(self, processes: Processes, settings: CompilerSettings) -> None:
        """Raises EngineStopped: there is no process now; RequestFailed: it cannot read the tokenizer."""
        first = Prepare(
            tokenizer_folder=settings.tokenizer_folder,
            follow_links=settings.follow_links,
            vocab_width=settings.vocab_width,
            memory_bytes=settings.memory_bytes,
        )
        try:
            answer = await self.begin(processes, MODULE, HELLO, first, START_SECONDS)
        except (OSError, ChildGone) as error:
            logger.warning("a process that compiles guides cannot be started: %s", error)
            raise _not_now() from None
        if not isinstance(answer, Prepared) or answer.error is not None:
            logger.error("guides cannot be compiled for this model: %s", getattr(answer, "error", "no answer"))
            raise RequestFailed("structured outputs are not possible with this model's tokenizer")

    async def load(self, backend: str) -> None:
        """Raises _NoBackend when there is none of this name here, ChildGone when it did not survive."""
        self.send(LoadBackend(backend))
        with anyio.move_on_after(START_SECONDS):
            answer = await self.next()
            if isinstance(answer, Prepared) and answer.error is None:
                self.backends.add(backend)
                return
            raise _NoBackend(getattr(answer, "error", None) or "the backend cannot be loaded")
        raise ChildGone("it takes too long to load a backend")


def _log(line: str) -> None:
    logger.info("[guide] %s", line)
