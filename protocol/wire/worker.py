"""Messages between an engine and its worker process: one message is one frame."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import msgspec

from troupellm import __version__
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import (
    ConfigError,
    GraphCaptureError,
    InvalidRequest,
    ModelLoadError,
    WeightsChanged,
    WorkerCrashed,
)
from troupellm.protocol.messages.adapters import AdapterPreparation
from troupellm.protocol.messages.sleep import WorkerCommand, WorkerReport
from troupellm.protocol.messages.worker import LoadProgress, StepPlan, StepResult, Worker, WorkerReady
from troupellm.protocol.params.guide import GuideProgram
from troupellm.protocol.wire.frames import Hello

LINK_VERSION = 7
"""Rises with every change of a message, plans and results included."""
HELLO = Hello(link="worker", version=f"{__version__}/{LINK_VERSION}")
RANK_LOST = "RankLost"
"""The kind of failure of a rank that has waited for another one in vain, also while it loads."""
MODEL_WORKER = "troupellm.models.worker.worker:ModelWorker"
"""The worker's factory: a function or class that takes the model's folder, as module:name."""


def resolve(factory: str) -> Callable[[Path], Worker]:
    """The object that an import path names."""
    module, _, name = factory.partition(":")
    made: Callable[[Path], Worker] = getattr(import_module(module), name)
    return made


# To the worker.


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a model a process has."""

    number: int
    """The leader is 0."""
    size: int
    """Ranks of the model."""
    address: str = ""
    """Where the leader is met; empty for the leader itself."""


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make a worker and load the model; answered by `Progress` messages, then `Loaded` or `Failed`.

    The leader of several ranks says `Leading` first. The other ranks never say that they have loaded.
    """

    factory: str
    folder: str
    config: EngineConfig
    first: WorkerReady | None = None
    """The report of the first worker, whose weights this one must have; None: it is the first."""
    place: RankPlace | None = None
    """None: the process has the whole model."""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Compute a step when those before it are done; answered by `Finished` or `Failed`, in order."""

    plan: StepPlan


class Execute(msgspec.Struct, frozen=True, tag=True):
    """Between steps; answered by `Progress` messages, then `Executed` or `Refused`."""

    command: WorkerCommand


class PrepareGuide(msgspec.Struct, frozen=True, tag=True):
    """Build a guide beside the steps; answered by `GuidePrepared`."""

    number: int
    program: GuideProgram


class PrepareAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter beside the steps; answered by `AdapterPrepared`."""

    number: int
    digest: str
    folder: str


class ReleaseAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free an adapter's host memory, after what was asked for before; not answered."""

    digest: str


ToWorker = Load | Launch | Execute | PrepareGuide | PrepareAdapter | ReleaseAdapter

# From the worker.


class Progress(msgspec.Struct, frozen=True, tag=True):
    progress: LoadProgress


class Leading(msgspec.Struct, frozen=True, tag=True):
    """The other ranks meet this one there."""

    address: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    ready: WorkerReady


class Finished(msgspec.Struct, frozen=True, tag=True):
    result: StepResult


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Loading or a step raised. The worker is of no more use."""

    kind: str
    """Name of the exception's type."""
    message: str
    detail: str = ""
    """The traceback, for the log."""
    param: str | None = None
    code: str | None = None
    hint: str | None = None

    def as_error(self) -> Exception:
        """The error to raise for it on this side. Foreign text goes to the log, not to clients."""
        error: Exception
        if self.kind in ("ModelLoadError", "WeightsChanged"):
            load_error = WeightsChanged if self.kind == "WeightsChanged" else ModelLoadError
            error = load_error(self.message, hint=self.hint)
        elif self.kind == "ConfigError":
            error = ConfigError(self.message, param=self.param, code=self.code)
        elif self.kind == "InvalidRequest":
            error = InvalidRequest(self.message, param=self.param, code=self.code)
        elif self.kind == "GraphCaptureError":
            error = GraphCaptureError(self.message)
        elif self.kind in _AS_THEY_ARE:
            error = _AS_THEY_ARE[self.kind](self.message)
        else:
            error = WorkerCrashed(f"a model step failed with {self.kind}")
        if self.detail:
            error.add_note(self.detail)
        return error


_AS_THEY_ARE: dict[str, type[Exception]] = {
    "MemoryError": MemoryError,
    "OutOfMemoryError": MemoryError,
    "RuntimeError": RuntimeError,
    "AcceleratorError": RuntimeError,
}
"""Whose text tells whether memory was missing."""


class Executed(msgspec.Struct, frozen=True, tag=True):
    report: WorkerReport


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A command was not executed; the worker is as it was before."""

    why: Failed


class GuidePrepared(msgspec.Struct, frozen=True, tag=True):
    """It is built, or cannot be, which the row that needs it will tell."""

    number: int


class AdapterPrepared(msgspec.Struct, frozen=True, tag=True):
    number: int
    preparation: AdapterPreparation


FromWorker = Progress | Leading | Loaded | Finished | Failed | Executed | Refused | GuidePrepared | AdapterPrepared
