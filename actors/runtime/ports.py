"""The outside world as small interfaces: time, randomness, threads. Tests and the simulator pass their own.

The production ports run on asyncio (any event loop of it).
"""

import asyncio  # noqa: TID251 - the ports are the one place that talks to the loop and to threads
import os
import random  # noqa: TID251
import secrets
import threading  # noqa: TID251
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple, Unpack, cast

from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.models.runner.steps_in_flight import Waits
from troupellm.protocol.errors import WrongEventLoop
from troupellm.protocol.messages.worker_abilities import QUIET_SECONDS

with suppress(ImportError):  # else anyio imports it at its first use, and the event loop waits
    import anyio._backends._asyncio  # noqa: F401

T = TypeVar("T")
ArgsT = TypeVarTuple("ArgsT")

_IDLE_CHECK_SECONDS = 1.0
_EXIT_CHECK_SECONDS = 0.2


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def wall(self) -> float:
        """Seconds since 1970, for people."""


class Randomness(Protocol):
    def seed(self) -> int:
        """64 fresh bits."""

    def token(self, nbytes: int) -> str:
        """A fresh name of 2 * nbytes hexadecimal digits."""


class Threads(Protocol):
    async def run(self, function: Callable[[Unpack[ArgsT]], T], *args: *ArgsT) -> T:
        """Call a function off the event loop.

        Cancelling the wait drops a call that has not begun; one that has begun runs on and its result is dropped.
        """


class Line(Threads, Protocol):
    """One thread: its calls are made in the order in which they were handed over."""

    def post(self, call: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """Have `call` called after what was handed over before, without waiting for it.

        `done` hears its result unless that is None, or what it raised, on the event loop; the thread goes on meanwhile.
        """

    def post_behind(
        self, wait: Callable[[], None], call: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        """`post`, once `wait` has returned. It is called on another thread, after those that came before it.

        Called on this thread only.
        """


class SystemClock:
    def now(self) -> float:
        return time.monotonic()  # noqa: TID251

    def wall(self) -> float:
        return time.time()  # noqa: TID251


class SystemRandomness:
    def seed(self) -> int:
        return secrets.randbits(64)

    def token(self, nbytes: int) -> str:
        return secrets.token_hex(nbytes)


class SeededRandomness:
    """The same numbers after every start with the same seed; names stay fresh, since clients meet them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def seed(self) -> int:
        return self._random.getrandbits(64)

    def token(self, nbytes: int) -> str:
        return secrets.token_hex(nbytes)


def require_asyncio() -> asyncio.AbstractEventLoop:
    """The running event loop.

    Raises:
        WrongEventLoop: none of asyncio's runs in this thread.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongEventLoop("an engine runs on an event loop of asyncio, and none runs in this thread") from None


class LoopPort:
    """The running event loop, as other threads and finalisers may use it.

    Raises:
        WrongEventLoop: none of asyncio's runs in this thread.
    """

    def __init__(self) -> None:
        self._loop = require_asyncio()
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one with the loop: threads and children are the parent's."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """
        Raises:
            WrongEventLoop: the caller does not run on this loop.
        """
        if self.forked:
            raise WrongEventLoop("the engine lives in the parent process; after a fork a process needs its own")
        if require_asyncio() is not self._loop:
            raise WrongEventLoop(
                "the engine lives on another event loop; call it there, for example by asyncio.run_coroutine_threadsafe"
            )

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` called on the loop soon; nothing happens when the loop has ended."""
        _post(self._loop, call)


class OwnTask:
    """A coroutine in a task of its own, for a lifetime that spans several tasks of the host (notebook cells)."""

    def __init__(self, main: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(main)

    def cancel(self) -> None:
        self._task.cancel()

    async def join(self) -> None:
        """Wait for its end; raises what it raised, unless it was cancelled. Being cancelled leaves it running."""
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()


class ExitWatch:
    """Calls back, on a thread of its own, when the program's main thread ends before `stop`, or after `fire`.

    Threads that are no daemons would keep such a program from ending, and `atexit` runs only after they have ended.
    """

    def __init__(self, on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._fired = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="troupellm-exit", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def fire(self) -> None:
        """Call back now. Fit for finalisers: only the main thread, which is none of ours, waits for the call's end."""
        self._fired = True
        self._stopped.set()
        if threading.current_thread() is threading.main_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(_EXIT_CHECK_SECONDS):
            if not threading.main_thread().is_alive():
                self._on_exit()
                return
        if self._fired:
            self._on_exit()


class _Call(Generic[T]):
    __slots__ = ("call", "dropped", "posted", "settle")

    def __init__(
        self, call: Callable[[], T], settle: Callable[[T | None, BaseException | None], None], *, posted: bool = False
    ) -> None:
        self.posted = posted
        """By `post`: a call that tells when an outcome that is held may go."""
        self.call = call
        self.settle = settle
        self.dropped = False


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
        call: _Call[T] = _Call(lambda: function(*args), _settling(future))
        try:
            self._hand_over(call)
            return await future
        finally:
            call.dropped = True

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
        _post(loop, self._thread_ended)

    def _rest(self) -> float:
        """No call came for a while; how many seconds to wait for one before that is said again."""
        return _IDLE_CHECK_SECONDS

    def _end(self) -> None:
        """No call comes any more."""

    def _make(self, call: _Call[Any], loop: asyncio.AbstractEventLoop) -> None:
        if not call.dropped:
            _post(loop, call.settle, *_outcome(call))

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
            what the calls call, on this thread, at the good moment.
        """
        self._holds = True
        return self._report

    def _report(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            held()

    def _make(self, call: _Call[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._restless = True
        if not call.posted:
            self._report()
        if call.dropped:
            return
        result, error = _outcome(call)
        self._report()  # the calls' order is that of their outcomes
        if call.posted and result is None and error is None:
            return
        report = partial(_post, loop, call.settle, result, error)
        if self._holds and call.posted and not self._queue.empty():
            self._held = report
        else:
            report()

    def _end(self) -> None:
        self._report()
        self._waits.end()


def _outcome(call: _Call[Any]) -> tuple[Any, BaseException | None]:
    try:
        return call.call(), None
    except BaseException as raised:  # it belongs to the caller
        return None, raised


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return  # the loop has ended, and no task waits
