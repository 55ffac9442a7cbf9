"""Many prompts through one engine, a bounded number at a time, in the order in which they finish."""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from troupellm.actors.stream import Stream
from troupellm.actors.waiter import Waiter, new_waiter

AnswerT = TypeVar("AnswerT")


async def map_streams(
    streams: Iterable[Callable[[], Stream]],
    concurrency: Callable[[], int],
    collect: Callable[[Stream], Awaitable[AnswerT]],
) -> AsyncIterator[tuple[int, AnswerT]]:
    """Give (index, answer) as each is done.

    Holds no task group or cancel scope while it is suspended, so it may be left, closed or finalised anywhere; whatever
    still runs then is ended.

    Raises:
        TroupeError: the first request that failed; the others are ended.
    """
    todo = enumerate(streams)
    active: dict[int, Stream] = {}
    done: deque[int] = deque()
    waiter: Waiter | None = None

    def finished(index: int) -> Callable[[], None]:
        def call() -> None:
            done.append(index)
            if waiter is not None:
                waiter.wake()

        return call

    exhausted = False
    try:
        while True:
            while not exhausted and len(active) < max(concurrency(), 1):
                index, make = next(todo, (-1, None))
                if make is None:
                    exhausted = True
                    break
                stream = active[index] = make()
                await stream.when_terminal(finished(index))
            if not active:
                return
            while not done:
                waiter = new_waiter()
                await waiter.wait()
            index = done.popleft()
            yield index, await collect(active.pop(index))
    finally:
        for stream in active.values():
            stream.abort()
        for stream in active.values():
            await stream.cancel()
