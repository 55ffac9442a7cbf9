"""How a line is asked until it has its answer: patiently where the server has no room, a few times where it fails."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from troupellm.protocol.api.batches import BatchResult
from troupellm.protocol.api.caller import NOBODY, Caller
from troupellm.server.batches.lines import Good, answered
from troupellm.server.host.internal_requests import Inside

MOST_ATTEMPTS = 5
"""Of a line that the server could not answer; being told to come later is no attempt."""


class Room(Protocol):
    """Lets so many lines in at once."""

    async def enter(self) -> None: ...

    def leave(self) -> None: ...

    async def pause(self, seconds: float) -> None:
        """A line that has left was told to come again after so long; it enters next."""

    def ended(self) -> None:
        """A line has an answer that stays."""


async def ask(
    inside: Inside,
    line: Good,
    room: Room,
    keep: Callable[[int, BatchResult], Awaitable[None]],
    *,
    caller: Caller = NOBODY,
) -> None:
    """Ask for a line that has room, which is given back when `keep` has its result.

    Args:
        caller: the owner of the batch.
    """
    has_room, attempts = True, 0
    try:
        while True:
            answer = await inside.post(line.url, line.body, caller=caller)
            attempts += answer.status != 429
            if answer.retry_after is None or attempts >= MOST_ATTEMPTS:
                break
            room.leave()
            has_room = False
            await room.pause(answer.retry_after)
            await room.enter()
            has_room = True
        if answer.retry_after is None:
            room.ended()
        await keep(line.number, answered(line, answer))
    finally:
        if has_room:
            room.leave()
