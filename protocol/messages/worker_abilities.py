"""Optional abilities of workers, beside those of `protocol.worker.Worker`."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.adapters import AdapterPreparation
from troupellm.protocol.messages.worker import LaunchedStep, WorkerReady
from troupellm.protocol.params.guide import GuideProgram

Wait = Callable[[], None]
"""Sleeps until a device is done with something."""


@runtime_checkable
class WorksAhead(Protocol):
    """A worker whose device computes by itself what was launched."""

    def under_way(self, ticket: LaunchedStep, /) -> Wait | None:
        """The wait for a launched plan before it is collected: callable on any thread, beside all calls of the worker.
        None: its result is there, or `collect` computes it."""

    def incomplete(self, ticket: LaunchedStep, /) -> bool:
        """Whether a part of a launched plan follows from the result before it, and is still to be launched. Nothing is
        to be waited for until then."""

    def complete(self, ticket: LaunchedStep, /) -> None:
        """Launch what is left of the oldest plan, if something is: the result before it was collected, and told."""


QUIET_SECONDS = 0.1
"""Without a call, before a worker does what it has put off: requests that follow each other do not wait for it."""


@runtime_checkable
class HasIdleWork(Protocol):
    """A worker that puts off what can wait until nothing else is to be done."""

    def idle(self) -> bool:
        """Do a part of it, on the thread of all calls: the next call waits for that part. Never raises.

        Returns:
            whether it did anything, so that more may be left. False: there is nothing to do before the next call.
        """


@runtime_checkable
class ExpectsWeights(Protocol):
    """A worker that refuses to load other weights than another worker before it."""

    def expect_weights(self, first: WorkerReady) -> None:
        """Called before `load`, which then raises WeightsChanged if the weights are others than those of `first`."""


@runtime_checkable
class HasMeanwhile(Protocol):
    """A worker on a thread that knows a good moment in each step to let others have the interpreter's lock."""

    def meanwhile(self, call: Callable[[], None]) -> None:
        """Have `call` called in every step, on its thread: before a stretch that needs no lock, and never late in a
        long step. May be called before `load`."""


@runtime_checkable
class PreparesGuides(Protocol):
    """A worker that can build guides before they are needed."""

    def prepare_guide(self, program: GuideProgram) -> None:
        """Build a guide, on any thread and beside the steps. Never raises."""


@runtime_checkable
class PreparesAdapters(Protocol):
    """A worker that serves adapters. Both calls come on any thread, beside the steps, and never raise."""

    def prepare_adapter(self, digest: str, folder: str) -> AdapterPreparation:
        """Read an adapter into host memory; one that is prepared already is answered at once.

        Args:
            digest: the files must have it, or the adapter is refused.
            folder: PEFT's format.
        """

    def release_adapter(self, digest: str) -> None:
        """Free the host memory of an adapter. Slots keep their content."""


@runtime_checkable
class HasRanks(Protocol):
    """A worker that can have one of several parts of a model."""

    def lead(self, config: EngineConfig, size: int) -> str:
        """Before `load`: this is the first of so many ranks, which takes plans; the address for the others."""

    def follow(self, config: EngineConfig, number: int, size: int, address: str) -> Callable[[], None]:
        """Instead of `load`: read a part of the model.

        Returns:
            computes with it what the leader tells, until the leader needs this rank no longer; raises when another
            rank has ended.
        """
