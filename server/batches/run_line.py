"""Lines are asked until they have their answers: patiently where the server has no room, a few times where it fails."""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import anyio

from troupellm.protocol.api.batches import BatchResult
from troupellm.protocol.api.caller import NOBODY, Caller
from troupellm.server.batches.concurrency import Share
from troupellm.server.batches.lines import Bad, Good, answered
from troupellm.server.host.internal_requests import Inside

MOST_ATTEMPTS = 5
"""Of a line that the server could not answer; being told to come later is no attempt."""

Keep = Callable[[int, BatchResult], Awaitable[None]]
"""Stores the result of a line."""


async def answer_lines(
    inside: Inside, lines: AsyncIterator[Good | Bad], share: Share, keep: Keep, *, caller: Caller = NOBODY
) -> None:
    """Answer all lines. No more of them are in memory than the share lets out.

    Args:
        caller: the owner of the lines.
    """
    async with anyio.create_task_group() as group:
        async for line in lines:
            if isinstance(line, Bad):
                await keep(line.number, line.result)
            else:
                await share.claim()
                group.start_soon(partial(ask, inside, line, share, keep, caller=caller))


async def ask(inside: Inside, line: Good, share: Share, keep: Keep, *, caller: Caller = NOBODY) -> None:
    """Ask for a claimed line. It has its room in the engine until `keep` has its result."""
    attempts = 0
    try:
        while True:
            await share.enter()
            try:
                answer = await inside.post(line.url, line.body, caller=caller)
                attempts += answer.status != 429
                wait = answer.retry_after if attempts < MOST_ATTEMPTS else None
                if wait is None:
                    if answer.retry_after is None:
                        share.ended()
                    await keep(line.number, answered(line, answer))
                    return
            finally:
                share.leave()
            share.pause(wait)
    finally:
        share.release()
