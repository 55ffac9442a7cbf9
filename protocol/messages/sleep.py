"""Pausing, sleeping and looking inside: what is asked of an engine's scheduler and worker beside requests."""

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import msgspec

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.worker import ProgressSink, RestartWorker, Worker, WorkerReady

PauseMode = Literal["abort", "wait", "keep"]
"""The fate of the open requests. abort: they end with an error; wait: they finish first, and new ones
wait; keep: they freeze and continue afterwards."""
WakeTag = Literal["weights", "kv_cache", "scheduling"]

PAUSED, WITHOUT_CACHE, EMPTY = 0, 1, 2
"""Levels of sleep: nothing is planned; the KV cache is given back too; and the weights as well."""

# To the worker, between steps.


class SleepWorker(msgspec.Struct, frozen=True, tag=True):
    """Give memory back: at level 1 the KV cache, at level 2 the weights too. Rows are forgotten."""

    level: int


class WakeWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take what was given back again: weights are read anew, the cache is empty."""

    weights: bool = True
    kv_cache: bool = True


class StartProfile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Record the operations of the next steps."""

    folder: str
    name: str
    """Of the file; the worker adds the suffix."""
    max_steps: int


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """Write what was recorded."""


WorkerCommand = SleepWorker | WakeWorker | StartProfile | StopProfile


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a command."""

    rss_before: int = 0
    """Bytes of memory that the worker's process held before; 0 where that cannot be measured."""
    rss_after: int = 0
    seconds: float = 0.0
    ready: WorkerReady | None = None
    """After `WakeWorker`, once nothing is missing any more."""
    renewed: bool = False
    """It is another worker than the one that fell asleep: nothing is left of that one's memory."""
    file: str = ""
    """That was written."""
    steps: int = 0
    """That were recorded."""


@runtime_checkable
class ExecutesCommands(Protocol):
    """A `protocol.worker.Worker` that takes commands, between steps and on the thread of its steps."""

    def command(self, command: WorkerCommand, progress: ProgressSink) -> WorkerReport: ...


def execute(worker: Worker, command: WorkerCommand, progress: ProgressSink) -> WorkerReport:
    """Have a worker execute a command.

    Raises:
        InvalidRequest: the worker is of a kind that knows no commands.
    """
    if not isinstance(worker, ExecutesCommands):
        raise InvalidRequest("this engine's worker can neither sleep nor be profiled", code="unsupported_parameter")
    return worker.command(command, progress)


# To the caller of the command.


class SleepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a sleep freed or a wake-up took again."""

    level: int | None
    """That the engine sleeps at now; None is awake."""
    rss_before: int
    """Bytes of memory that the worker's process held before and after, as the system counts them."""
    rss_after: int
    seconds: float
    """The time that the worker took for it."""

    @property
    def freed(self) -> int:
        return self.rss_before - self.rss_after


class ProfileReport(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    steps: int


# To the worker actor.


class CommandWorker(msgspec.Struct, frozen=True):
    """Have the worker execute a command; no plan may be in flight, and none is sent before `done` was called.

    `done` hears the report, or why there is none. The worker is still there after a refusal.
    """

    command: WorkerCommand
    done: Callable[[WorkerReport | None, Exception | None], None]


WorkerControl = RestartWorker | CommandWorker
