"""A worker process: `python -m troupellm.models.worker.main FD PARENT_PID`.

Reads plans from the socket that it inherited, computes them in order, and answers. It never outlives its parent: where
the kernel supports it, the kernel kills it together with the parent. A thread also ends it when the socket's other end
closes, even in the middle of a computation. Terminal and service signals are left to the parent, which ends this
process when it no longer needs it.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from troupellm.models.hub.errors import load_failure
from troupellm.models.processes.preload_torch import preload_torch
from troupellm.models.runner.steps_in_flight import Steps, Waits
from troupellm.protocol.errors import ConfigError, ModelLoadError, TroupeError
from troupellm.protocol.messages.adapters import NO_ADAPTERS
from troupellm.protocol.messages.sleep import WakeWorker, WorkerCommand, execute
from troupellm.protocol.messages.worker import StepPlan, Worker
from troupellm.protocol.messages.worker_abilities import (
    QUIET_SECONDS,
    ExpectsWeights,
    HasIdleWork,
    HasRanks,
    PreparesAdapters,
    PreparesGuides,
    Wait,
)
from troupellm.protocol.wire.frame_socket import Bell, FrameSocket, FrameTimeout
from troupellm.protocol.wire.frames import FrameError
from troupellm.protocol.wire.lifeline import die_with
from troupellm.protocol.wire.worker import (
    HELLO,
    RANK_LOST,
    AdapterPrepared,
    Execute,
    Executed,
    Failed,
    Finished,
    FromWorker,
    GuidePrepared,
    Launch,
    Leading,
    Load,
    Loaded,
    PrepareAdapter,
    PrepareGuide,
    Progress,
    Refused,
    ReleaseAdapter,
    ToWorker,
    resolve,
)

Link = FrameSocket[FromWorker, ToWorker]
Beside = PrepareGuide | PrepareAdapter | ReleaseAdapter
"""Messages that may come while a step is computed."""

_LONGEST_TEXT = 4096
_LONGEST_DETAIL = 32768

PARAM = "tensor_parallel_size"
PARALLEL_BUILDS = 2
"""Guides that are built at once: a small one does not wait for a large one."""
NICE = 5
"""Niceness of the threads that build guides: steps have three times their share of a busy processor."""

EXIT_GONE = 0
"""The other end has closed: the usual end."""
EXIT_FAILED = 1
EXIT_BAD_FRAME = 3


def main() -> int:
    """Serve the parent until it closes the socket."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    if not die_with(parent):
        return EXIT_GONE
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_watch, args=(descriptor,), name="lifeline", daemon=True).start()
    link: Link = FrameSocket(connection, ToWorker, HELLO)
    try:
        link.greet()
        import_everything()
        return Server(link).run()
    except FrameError as error:
        sys.stderr.write(f"worker: {error}\n")
        return EXIT_BAD_FRAME


def import_everything() -> None:
    """Import the slow modules, which are the same for every model."""
    preload_torch()
    import_module("troupellm.models.worker.worker")
    import_module("troupellm.models.families.registry")


def yield_to_steps() -> None:
    """Lower this thread's priority below that of the other threads, where the system supports it per thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class Server:
    """One worker, made by the first `Load`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._worker: Worker | None = None
        self._loading = False
        self._steps: Steps | None = None
        self._idle: Callable[[], bool] | None = None
        self._waits = Waits("troupellm-waits")
        self._bell: Bell | None = None
        """Rung when a wait is over; there is one from the first wait on."""
        self._guides = ThreadPoolExecutor(PARALLEL_BUILDS, "troupellm-build", initializer=yield_to_steps)
        self._sending = threading.Lock()

    def run(self) -> int:
        """Answer messages until one cannot be; the exit code."""
        while True:
            try:
                message = self._next()  # which may launch the rest of a step
                match message:
                    case None:
                        self._give()
                    case Load():
                        self._load(message)
                    case Launch(plan=plan):
                        self._step(plan)
                    case Execute(command=command):
                        self._execute(command)
                    case PrepareGuide():
                        self._guides.submit(self._prepare_guide, message)
                    case PrepareAdapter():
                        self._guides.submit(self._prepare_adapter, message)
                    case ReleaseAdapter(digest=digest):
                        if isinstance(self._worker, PreparesAdapters):
                            self._worker.release_adapter(digest)
            except FrameError:
                raise
            except Exception as error:
                self._send(failed(error, loading=self._loading))
                return EXIT_FAILED

    def _next(self) -> ToWorker | None:
        """The next message; None if there is none at the moment and a result is due."""
        steps, patience = self._steps, None if self._idle is None else QUIET_SECONDS
        while True:
            due, busy = steps is not None and steps.due > 0, steps is not None and steps.busy
            try:
                message = self._link.receive(0.0 if due else None if busy else patience)
            except FrameTimeout:
                if due:
                    return None
                if self._bell is not None and self._bell.rung:  # perhaps for a step that is collected already
                    self._note_landings(self._bell)
                else:
                    patience = 0.0 if self._idle is not None and self._idle() else None
                continue
            if busy and not isinstance(message, Launch | Beside):
                raise FrameError("something else than a plan came while a step is computed")
            return message

    def _note_landings(self, bell: Bell) -> None:
        """The bell was rung."""
        assert self._steps is not None
        for _ in range(bell.rings()):
            self._steps.landed()

    def _load(self, message: Load) -> None:
        self._loading = True
        worker, place = resolve(message.factory)(Path(message.folder)), message.place
        if message.first is not None and isinstance(worker, ExpectsWeights):
            worker.expect_weights(message.first)
        if place is not None:
            if not isinstance(worker, HasRanks):
                raise ConfigError("a custom worker has no ranks; tensor_parallel_size must be 1", param=PARAM)
            if place.number:
                follow = worker.follow(message.config, place.number, place.size, place.address)
                self._loading = False
                follow()
                return
            self._send(Leading(worker.lead(message.config, place.size)))
        ready = worker.load(message.config, lambda progress: self._send(Progress(progress)))
        self._worker, self._steps, self._loading = worker, Steps(worker, self._wait), False
        self._idle = worker.idle if isinstance(worker, HasIdleWork) else None
        gc.collect()
        gc.freeze()
        self._send(Loaded(ready))

    def _execute(self, command: WorkerCommand) -> None:
        answer: Executed | Refused
        try:
            if self._worker is None:
                raise RuntimeError("a command came before a model")
            report = execute(self._worker, command, lambda progress: self._send(Progress(progress)))
            answer = Executed(report)
        except FrameError:
            raise
        except Exception as error:  # the worker still has the memory that it had before
            answer = Refused(failed(error, loading=isinstance(command, WakeWorker)))
        self._send(answer)

    def _step(self, plan: StepPlan) -> None:
        """Launch a plan as soon as it is there; but a launch may take as long as a step, so due results go first."""
        if self._steps is None:
            raise RuntimeError("a plan came before a model")
        while self._steps.due:
            self._give()
        self._steps.launch(plan)

    def _give(self) -> None:
        """The oldest result."""
        assert self._steps is not None
        self._send(Finished(self._steps.collect()))

    def _wait(self, wait: Wait) -> None:
        """On another thread, while this one listens to its messages."""
        if self._bell is None:
            self._bell = Bell()
            self._link.hear(self._bell)
        self._waits.add(wait, self._bell.ring)

    def _prepare_guide(self, message: PrepareGuide) -> None:
        """On a thread of its own, beside the steps. A worker without guides has nothing to prepare."""
        if isinstance(self._worker, PreparesGuides):
            self._worker.prepare_guide(message.program)
        with contextlib.suppress(FrameError):  # the other end has gone, which the main thread hears too
            self._send(GuidePrepared(message.number))

    def _prepare_adapter(self, message: PrepareAdapter) -> None:
        """As `_prepare_guide`."""
        preparation = NO_ADAPTERS
        if isinstance(self._worker, PreparesAdapters):
            preparation = self._worker.prepare_adapter(message.digest, message.folder)
        with contextlib.suppress(FrameError):
            self._send(AdapterPrepared(message.number, preparation))

    def _send(self, message: FromWorker) -> None:
        with self._sending:
            self._link.send(message)


def failed(error: Exception, *, loading: bool) -> Failed:
    """An exception as plain data; an unforeseen one during loading counts as a failure of the model."""
    kind, text = type(error).__name__, str(error)
    if loading and kind != RANK_LOST and not isinstance(error, TroupeError):
        kind, text = "ModelLoadError", load_failure(error).message
    return Failed(
        kind=kind,
        message=(error.message if isinstance(error, TroupeError) else text)[:_LONGEST_TEXT],
        detail="".join(traceback.format_exception(error))[-_LONGEST_DETAIL:],
        param=error.param if isinstance(error, TroupeError) else None,
        code=error.code if isinstance(error, TroupeError) else None,
        hint=error.hint if isinstance(error, ModelLoadError) else None,
    )


def _watch(descriptor: int) -> None:
    """End the process at once when the other end has closed. Sleeps in the kernel until then."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups are always reported
    while True:
        for _, events in poll.poll():
            if events & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                os._exit(EXIT_GONE)


if __name__ == "__main__":
    sys.exit(main())
