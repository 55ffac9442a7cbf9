"""How a line is asked until it has its answer: patiently where the server has no room, a few times where it fails."""

import secrets
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio

from troupellm.protocol.batch import BatchResult
from troupellm.server.batches.lines import Good, answered
from troupellm.server.inside import Inside

MOST_ATTEMPTS = 5
"""Of a line that the server could not answer; being told to come later is no attempt."""
LONGEST_PAUSE = 5.0


class Room(Protocol):
    """Lets so many lines in at once."""

    async def enter(self) -> None: ...

    def leave(self) -> None: ...


async def ask(
    inside: Inside, line: Good, room: Room, keep: Callable[[int, BatchResult], Awaitable[None]], *, key: str = ""
) -> None:
    """Ask for a line that has room, which is given back when `keep` has its result.

    Args:
        key: name of the API key for which it is asked.
    """
    has_room, attempts = True, 0
    try:
        while True:
            answer = await inside.post(line.url, line.body, key=key)
            attempts += answer.status != 429
            if answer.retry_after is None or attempts >= MOST_ATTEMPTS:
                break
            room.leave()
            has_room = False
            await anyio.sleep(min(answer.retry_after, LONGEST_PAUSE) * (0.5 + secrets.randbelow(100) / 200))
            await room.enter()
            has_room = True
        await keep(line.number, answered(line, answer))
    finally:
        if has_room:
            room.leave()
