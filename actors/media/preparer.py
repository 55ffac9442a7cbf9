"""Preparing images in processes that may be killed: image files of strangers are decoded there and nowhere else.

An image that takes too much time or memory costs its process, which is replaced.
"""

import logging
from contextlib import suppress
from typing import Protocol

import anyio

from troupellm.actors.runtime.compute_child import ChildGone, ComputeChild, TakesTooLong, TooBusy
from troupellm.actors.runtime.processes import Processes
from troupellm.protocol.config.media import MediaConfig
from troupellm.protocol.errors import EngineStopped, RequestFailed, TroupeError
from troupellm.protocol.wire.frames import Assembler, Codec
from troupellm.protocol.wire.media import (
    HELLO,
    MAX_FRAME_BYTES,
    FromMedia,
    ImagePrepared,
    ImageRefused,
    LoadProcessor,
    PrepareImage,
    ProcessorLoaded,
    ToMedia,
)

logger = logging.getLogger("troupellm.media")

MODULE = "troupellm.models.media.prepare_main"
PARALLEL = 2
START_SECONDS = 120.0
"""The libraries take seconds to import, on a busy machine many."""
MEMORY_BYTES = 4 * 2**30
"""Of addresses, beyond those that the libraries take."""
PATIENCE = 10
"""An image that does not get its processor time is waited for up to so many times as long."""
SPARE_SECONDS = 1.0
"""How long an image that is not wanted any more may go on."""


class ImageFault(Exception):
    """The image itself is at fault; the text is fit for clients."""


class MediaPreparer(Protocol):
    """The port through which the media actor has images prepared."""

    @property
    def parallel(self) -> int:
        """How many are prepared at once at most."""

    @property
    def num_killed(self) -> int:
        """Processes that were lost over an image."""

    async def prepare(self, data: bytes) -> ImagePrepared:
        """Decode an image and make of it what the encoder reads. At most `parallel` calls at once.

        Raises:
            ImageFault: it cannot be served.
            TroupeError: images cannot be prepared here, or not now.
        """

    async def warm_up(self) -> None:
        """Have a process ready; never raises."""


class ProcessPreparer:
    """Implements `MediaPreparer`. Processes are started when they are needed, and stay."""

    def __init__(self, folder: str, config: MediaConfig, processes: Processes, *, follow_links: bool = False) -> None:
        """follow_links: also out of the model's folder."""
        self._processes, self._seconds = processes, config.media_timeout
        self._load = LoadProcessor(
            folder=folder,
            follow_links=follow_links,
            settings=config.mm_processor_kwargs,
            max_pixels=config.max_image_pixels,
            memory_bytes=MEMORY_BYTES,
        )
        self._idle: list[_Child] = []
        self._all: list[_Child] = []
        self._starting = anyio.Lock()
        self._closed = False
        self._num_killed = 0

    @property
    def num_killed(self) -> int:
        return self._num_killed

    @property
    def parallel(self) -> int:
        return PARALLEL

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._all if child.process is not None]

    async def prepare(self, data: bytes) -> ImagePrepared:
        child = await self._take()
        healthy = False
        try:
            answer = await self._ask(child, PrepareImage(data))
            healthy = True
        except ChildGone:
            logger.warning("a process that prepared an image is gone")
            if await child.was_killed():  # from outside, or by the kernel for want of memory
                raise _not_now() from None
            raise ImageFault("it takes too much memory to prepare, or its file breaks the decoder") from None
        except anyio.get_cancelled_exc_class():  # its client has left: a new process costs more than most answers
            healthy = await child.soon_done(SPARE_SECONDS)
            raise
        finally:
            if healthy and not self._closed:
                self._idle.append(child)
            else:
                self._num_killed += 1
                with anyio.CancelScope(shield=True):
                    await self._end(child)
        match answer:
            case ImagePrepared():
                return answer
            case ImageRefused(message=message):
                raise ImageFault(message)
            case _:
                raise RequestFailed("the image could not be prepared")

    async def _ask(self, child: "_Child", message: PrepareImage) -> FromMedia:
        """Give a child an image, and as much processor time as it may take, on a busy machine much later."""
        try:
            return await child.ask(message, self._seconds, PATIENCE * self._seconds)
        except TooBusy:
            raise _not_now() from None
        except TakesTooLong:
            raise ImageFault(f"it takes longer than {self._seconds:g} s to prepare") from None

    async def warm_up(self) -> None:
        try:
            async with self._starting:
                if not self._all:
                    self._idle.append(await self._start())
        except TroupeError as error:
            logger.warning("images cannot be prepared: %s", error)

    async def close(self) -> bool:
        """End all processes; False when one does not go."""
        self._closed = True
        return all([await self._end(child) for child in list(self._all)])

    async def _take(self) -> "_Child":
        """An idle process, or a new one."""
        while True:
            while self._idle:
                child = self._idle.pop()
                if not child.gone:
                    return child
                await self._end(child)
            async with self._starting:
                if not self._idle:  # else one has become ready meanwhile
                    return await self._start()

    async def _start(self) -> "_Child":
        if self._closed:
            raise EngineStopped("the engine was closed")
        child = _Child()
        self._all.append(child)
        ready = False
        try:
            await child.open(self._processes, self._load)
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


def _not_now() -> EngineStopped:
    return EngineStopped("images cannot be prepared now", code="engine_restarting")


class _Child(ComputeChild[ToMedia, FromMedia]):
    """One process."""

    def __init__(self) -> None:
        limit = MAX_FRAME_BYTES
        super().__init__(Codec(limit=limit), Assembler(FromMedia, HELLO, limit=limit), _log)

    async def open(self, processes: Processes, load: LoadProcessor) -> None:
        """Raises EngineStopped: there is no process now; RequestFailed: the processor cannot be read."""
        try:
            answer = await self.begin(processes, MODULE, HELLO, load, START_SECONDS)
        except (OSError, ChildGone) as error:
            logger.warning("a process that prepares images cannot be started: %s", error)
            raise _not_now() from None
        if not isinstance(answer, ProcessorLoaded) or answer.error is not None:
            logger.error("images cannot be prepared for this model: %s", getattr(answer, "error", "no answer"))
            raise RequestFailed("the model's image processor cannot be read")

    async def soon_done(self, seconds: float) -> bool:
        """Wait for the answer that is owed, whether or not the caller is cancelled; True if it came."""
        with suppress(ChildGone), anyio.move_on_after(seconds, shield=True):
            await self.next()
            return True
        return False


def _log(line: str) -> None:
    logger.info("[media] %s", line)
