"""Threads off the event loop: a pool behind one queue, and the one thread that makes a worker's steps in order."""

import asyncio  # noqa: TID251 - as in ports.py
import inspect
import threading  # noqa: TID251
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar, TypeVarTuple, Unpack, cast

from troupellm.actors.runtime.ports import post_to
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.models.runner.steps_in_flight import Waits
from troupellm.protocol.messages.worker_abilities import QUIET_SECONDS

T = TypeVar("T")
ArgsT = TypeVarTuple("ArgsT")

_IDLE_CHECK_SECONDS = 1.0
_MAY_WAIT = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class _Call(Generic[T]):
    __slots__ = ("_call", "dropped", "posted", "settle")

    def __init__(
        self, call: Callable[[], T], settle: Callable[[T | None, BaseException | None], None], *, posted: bool = False
    ) -> None:
        self.posted = posted
        """By `post`: a call that tells when an outcome that is held may go."""
        self._call: Callable[[], T] | None = call
        self.settle = settle
        self.dropped = False

    def take(self) -> Callable[[], T]:
        """The call, which is made once: its arguments do not outlive it here."""
        call, self._call = self._call, None
        if call is None:
            raise RuntimeError("a call is made once")
        return call


def _settling(future: "asyncio.Future[T]") -> Callable[[T | None, BaseException | None], None]:
    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(cast(T, result))
        elif isinstance(error, StopIteration):  # a future refuses it
            future.set_exception(RuntimeError(f"the call raised {error!r}"))
        else:
            future.set_exception(error)

    return settle


class ThreadPool:
    """Up to `size` threads behind one queue, started by the first calls. Implements `Threads`.

    `close` joins the threads, and an idle one ends on its own with its event loop. They are daemons, so that a call
    that never ends does not keep the program from ending.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._queue: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._alive = 0
        self._closing: Waiter | None = None
        self._quiet = _IDLE_CHECK_SECONDS
        """After a call, how long none may come before `_rest`."""

    async def run(self, function: Callable[[Unpack[ArgsT]], T], *args: *ArgsT) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call: _Call[T] = _Call(partial(function, *args), _settling(future))
        try:
            self._hand_over(call)
            return await future
        finally:
            call.dropped = True
            del call, future  # a raised error holds this frame, which would hold the error and all arguments

    async def close(self, timeout: float = 30.0) -> bool:
        """End the threads after the calls that run now; False when one is still busy after `timeout` seconds."""
        if self._closing is None:
            self._closing = new_waiter()
            for _ in self._threads:
                self._queue.put(None)
            if self._alive and not await self._closing.wait(timeout):
                return False
            for thread in self._threads:  # each has said that it does nothing more
                thread.join()
        return self._alive == 0

    def _hand_over(self, call: _Call[Any]) -> None:
        if self._closing is not None:
            raise RuntimeError(f"the threads {self._name} are closed")
        self._queue.put(call)
        if len(self._threads) < self._size:
            self._start_thread(asyncio.get_running_loop())

    def _start_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        name = f"{self._name}-{len(self._threads)}" if self._size > 1 else self._name
        thread = threading.Thread(target=self._work, args=(loop,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the machine gives no more; those that run take the call, if there are any
            if not self._alive:
                raise
            return
        self._threads.append(thread)
        self._alive += 1

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        patience = _IDLE_CHECK_SECONDS
        while True:
            try:
                call = self._queue.get(timeout=patience)
            except Empty:
                if loop.is_closed():
                    break
                patience = self._rest()
                continue
            if call is None:
                break
            self._make(call, loop)
            del call  # an idle thread keeps nothing alive
            patience = self._quiet
        self._end()
        post_to(loop, self._thread_ended)

    def _rest(self) -> float:
        """No call came for a while; how many seconds to wait for one before that is said again."""
        return _IDLE_CHECK_SECONDS

    def _end(self) -> None:
        """No call comes any more."""

    def _make(self, call: _Call[Any], loop: asyncio.AbstractEventLoop) -> None:
        if not call.dropped:
            post_to(loop, call.settle, *_outcome(call))
        del call  # see `_outcome`

    def _thread_ended(self) -> None:
        self._alive -= 1
        if self._alive == 0 and self._closing is not None:
            self._closing.wake()


class StepThread(ThreadPool):
    """The one thread that every call to a worker is made from, in order. Implements `Line`."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 1)
        self._waits = Waits(f"{name}-waits")
        self._holds = False
        self._held: Callable[[], None] | None = None
        self._idle: Callable[[], bool] | None = None
        self._restless = False

    def when_idle(self, work: Callable[[], bool]) -> None:
        """Have `work` called on this thread when there was no call for a moment; again at once while it returns True
        and no call comes, and after the next call. It may not raise."""
        self._idle, self._quiet, self._restless = work, QUIET_SECONDS, True

    def _rest(self) -> float:
        self._restless = self._restless and self._idle is not None and self._idle()
        return 0.0 if self._restless else _IDLE_CHECK_SECONDS

    def post(self, call: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        self._hand_over(_Call(call, done, posted=True))

    def post_behind(
        self, wait: Callable[[], None], call: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        self._waits.add(wait, partial(self._queue.put, _Call(call, done, posted=True)))

    def hold(self) -> Callable[[], None]:
        """From now on the outcome of a posted call waits for a good moment in the next one, if that is there already.

        The event loop takes the interpreter's lock to look at an outcome, and this thread then stands still. That costs
        nothing while the next call computes without the lock.

        Returns:
            the function that the calls call, on this thread, at the good moment.
        """
        self._holds = True
        return self._tell

    def _tell(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            held()

    def _make(self, call: _Call[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._restless = True
        if not call.posted:
            self._tell()
        if call.dropped:
            return
        result, error = _outcome(call)
        self._tell()  # the calls' order is that of their outcomes
        if call.posted and result is None and error is None:
            return
        told = partial(post_to, loop, call.settle, result, error)
        if self._holds and call.posted and not self._queue.empty():
            self._held = told
        else:
            told()
        del call, error, told  # see `_outcome`

    def _end(self) -> None:
        self._tell()
        self._waits.end()


def _outcome(call: _Call[Any]) -> tuple[Any, BaseException | None]:
    """The call's result, or the error that it raised.

    An error's traceback holds the frames of the call and those below, so these may hold neither the call's arguments
    nor the error: a refused prompt would stay until the next garbage collection.
    """
    try:
        return call.take()(), None
    except BaseException as raised:  # it belongs to the caller
        clear_functions(raised)
        return None, raised


def clear_functions(error: BaseException) -> None:
    """Clear the locals of the functions in an error's traceback. Coroutines stay: an error that was raised before may
    have some there that still wait."""
    entry = error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_code.co_flags & _MAY_WAIT:
            with suppress(RuntimeError):  # it runs
                entry.tb_frame.clear()
        entry = entry.tb_next
