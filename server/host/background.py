"""Work that goes on after the exchange that began it: bounded in number, under one parent, over when that is over."""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from troupellm.protocol.errors import EngineOverloaded, InvalidRequest, RateLimited

logger = logging.getLogger("troupellm.server")


class Background:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._group: TaskGroup | None = None
        self.running = 0
        self._by_key: Counter[str] = Counter()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Work may be started inside the block; leaving it ends what still runs."""
        async with anyio.create_task_group() as group:
            self._group = group
            try:
                yield
            finally:
                self._group = None
                group.cancel_scope.cancel()

    def start(self, work: Callable[[], Awaitable[None]], what: str, key: str = "") -> None:
        """
        Args:
            what: the request field that asks for it.
            key: whose it is. A key gets half of what the others leave, so that there is always some for the next one;
                "", where no keys are checked, gets all.

        Raises:
            InvalidRequest: this app has no parent for such work.
            EngineOverloaded: as much of it runs as may.
            RateLimited: the key has its share.
        """
        if self._group is None:
            message = (
                f"{what}: the application that mounts this app does not run its lifespan, so nothing outlives a request"
            )
            raise InvalidRequest(message, param=what, code="unsupported_parameter")
        if self.running >= self._limit:
            raise EngineOverloaded(f"{what}: {self._limit} of them run already, which is the most")
        mine = self._by_key[key]
        share = max((self._limit - (self.running - mine)) // 2, 1)
        if key and mine >= share:
            raise RateLimited(f"{what}: {mine} of this key run already, which is its share now")
        self.running += 1
        self._by_key[key] += 1
        self._group.start_soon(self._run, work, key)

    async def _run(self, work: Callable[[], Awaitable[None]], key: str) -> None:
        try:
            await work()
        except (Exception, BaseExceptionGroup) as error:
            logger.error("work in the background has failed", exc_info=error)
        finally:
            self.running -= 1
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]
