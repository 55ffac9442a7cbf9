"""Seconds spent in each actor, taken from outside: their methods are wrapped for the length of a measurement."""

import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any


class Meter:
    """Wall seconds by name, all spent on the event loop's thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that adds the time of each call."""

        @wraps(function)
        def timed(*args: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                self.add(name, time.perf_counter() - start)

        return timed

    def task(self, name: str, function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        """A coroutine function that adds the time in which its coroutine really ran, waits left out."""

        @wraps(function)
        async def timed(*args: Any, **keywords: Any) -> Any:
            return await _Steps(function(*args, **keywords), self, name)

        return timed


class _Steps(Awaitable[Any]):
    """Awaits a coroutine by hand, one step at a time, with a clock around each step."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], meter: Meter, name: str) -> None:
        self._coroutine = coroutine
        self._meter = meter
        self._name = name

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[], Any] = lambda: self._coroutine.send(None)  # noqa: E731
        while True:
            start = time.perf_counter()
            try:
                waited_for = resume()
            except StopIteration as end:
                return end.value
            finally:
                self._meter.add(self._name, time.perf_counter() - start)
            try:
                yield waited_for
            except BaseException as thrown:
                error = thrown
                resume = lambda: self._coroutine.throw(error)  # noqa: E731, B023
            else:
                resume = lambda: self._coroutine.send(None)  # noqa: E731


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Wrap the actors' loops and the scheduler's core until the block ends."""
    from troupellm.actors.output.actor import Output
    from troupellm.actors.scheduler.actor import Scheduler
    from troupellm.actors.scheduler.core import SchedulerCore
    from troupellm.actors.worker.actor import WorkerActor

    wrapped: list[tuple[type, str, Any]] = [
        (Scheduler, "run", meter.task("scheduler", Scheduler.run)),
        (SchedulerCore, "plan", meter.call("plan", SchedulerCore.plan)),
        (SchedulerCore, "update", meter.call("update", SchedulerCore.update)),
        (Output, "run", meter.task("output", Output.run)),
        (WorkerActor, "_pass_plans", meter.task("worker", WorkerActor._pass_plans)),
        (WorkerActor, "_pass_results", meter.task("worker", WorkerActor._pass_results)),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in wrapped]
    for owner, name, replacement in wrapped:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
