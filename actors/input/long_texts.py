"""Turns of prompts that are rendered or tokenized on threads: a few at once, and the keys one after another.

Long texts have turns of their own, so that shorter ones overtake them.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar, TypeVarTuple, Unpack

import anyio
import msgspec

from troupellm.actors.guide.fair_queue import TooManyWaiting, Turns
from troupellm.actors.runtime.mailbox import KeyTurns
from troupellm.actors.runtime.ports import Clock, Threads
from troupellm.models.chat_template.template import SlowTemplate
from troupellm.protocol.errors import EngineOverloaded, RateLimited

T = TypeVar("T")
ArgsT = TypeVarTuple("ArgsT")

LONG_LETTERS = 65_536
"""Longer texts take turns; this many take some 30 ms."""
PARALLEL = 2
"""Of them at once. The threads are more, so that shorter texts overtake."""
PARALLEL_SHORT = 4
"""Shorter texts at once. A chat is short, too, and its template may take a third of a second."""

MOST_SHORT = 65_536
"""Short texts that wait. Admission lets fewer requests in."""


class _Place(msgspec.Struct, eq=False):
    tenant: str
    turn: anyio.Event


class PlainTurns:
    """A few turns at once for work of about one size. The caller bounds how many wait."""

    def __init__(self, parallel: int) -> None:
        self._free = parallel
        self._waiting = KeyTurns[_Place](lambda place: place.tenant)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it.

        Args:
            tenant: the key whose turn it is; "" where keys are not told apart.
        """
        place = _Place(tenant, anyio.Event())
        self._waiting.append(place)
        self._grant()
        try:
            await place.turn.wait()
            yield
        finally:
            if place.turn.is_set():
                self._free += 1
                self._grant()
            else:
                self._waiting.remove(place)

    def _grant(self) -> None:
        while self._free and len(self._waiting):
            self._free -= 1
            self._waiting.popleft().turn.set()


class LongTexts:
    """Of one process. A call that its caller leaves keeps its turn until it ends, since its thread goes on."""

    def __init__(self, threads: Threads, clock: Clock) -> None:
        self._threads = threads
        self._turns = Turns(PARALLEL, clock)
        self._short = PlainTurns(PARALLEL_SHORT)

    async def run(self, tenant: str, letters: int, function: Callable[[Unpack[ArgsT]], T], *args: *ArgsT) -> T:
        """Call on a thread, when its turn has come.

        Args:
            tenant: whose text it is; "" where keys are not told apart.
            letters: characters of the text.

        Raises:
            RateLimited: too many of the tenant's long texts wait already.
            EngineOverloaded: too many short texts wait already.
        """
        if letters > LONG_LETTERS:
            turn = self._long_turn(tenant, letters)
        elif len(self._short) < MOST_SHORT:
            turn = self._short.turn(tenant)
        else:
            raise EngineOverloaded("too many texts wait to be tokenized; try again later")
        async with turn:
            with anyio.CancelScope(shield=True):
                result = await self._threads.run(function, *args)
        return result

    def _long_turn(self, tenant: str, letters: int) -> AbstractAsyncContextManager[None]:
        try:
            return self._turns.turn(self._turns.queue(tenant, letters))
        except TooManyWaiting:
            raise RateLimited("too many long texts of this key wait to be tokenized; try again later") from None

    async def run_twice(self, tenant: str, letters: int, quick: Callable[[], T], patient: Callable[[], T]) -> T:
        """Call `quick`; where its template turns out to be slow, `patient` when the turn of the key has come.

        Raises:
            RateLimited: as `run`.
        """
        try:
            return await self.run(tenant, letters, quick)
        except SlowTemplate:
            return await self.run(tenant, LONG_LETTERS + 1, patient)
