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
from typing import Any, Protocol, TypeVar, TypeVarTuple, Unpack

from troupellm.protocol.errors import WrongEventLoop

with suppress(ImportError):  # else anyio imports it at its first use, and the event loop waits
    import anyio._backends._asyncio  # noqa: F401

T = TypeVar("T")
ArgsT = TypeVarTuple("ArgsT")

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
        post_to(self._loop, call)


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


def post_to(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return  # the loop has ended, and no task waits
