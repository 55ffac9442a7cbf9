"""Many prompts through one engine, a bounded number at a time, in the order in which they finish."""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from troupellm.actors.client.stream import Stream
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.errors import TroupeError

AnswerT = TypeVar("AnswerT")


async def map_streams(
    streams: Iterable[Callable[[], Stream]],
    concurrency: Callable[[], int],
    collect: Callable[[Stream], Awaitable[AnswerT]],
) -> AsyncIterator[tuple[int, AnswerT]]:
    """Give (index, answer) as each is done.

    Holds no task group or cancel scope while it is suspended, so it may be left, closed or finalised anywhere; streams
    that still run then are ended.

    Raises:
        TroupeError: the first request that failed, with its index as `entry`; the others are ended.
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
                with _naming(index):
                    await stream.when_terminal(finished(index))
            if not active:
                return
            while not done:
                waiter = new_waiter()
                await waiter.wait()
            index = done.popleft()
            with _naming(index):
                answer = await collect(active.pop(index))
            yield index, answer
    finally:
        for stream in active.values():
            stream.abort()
        for stream in active.values():
            await stream.cancel()


@contextmanager
def _naming(index: int) -> Iterator[None]:
    try:
        yield
    except TroupeError as error:
        error.entry = index
        raise
