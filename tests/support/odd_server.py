"""`troupellm`, with a fault inside that its environment describes. Run as a script, like the command itself.

The flags are the command's own: the worker is in a process of its own if they do not put it on a thread. What is said
of loading and of steps is for it, wherever it is; see `odd_worker`.

ODD_LOAD_UNTIL     file; the weights are not loaded before it exists
ODD_HANG_WHEN      file; once it exists, the next step never ends
ODD_FAIL_WHEN      file; once it exists, every step fails
ODD_STEP_SECONDS   what every step takes at least
ODD_LOSSES         how many losses of the worker in an hour, without a step between them, are not yet too many
ODD_NO_THREADS     file; once it exists, no more threads can be started in the server's process
ODD_WALL_OFFSET    file; the seconds in it are added to the server's wall clock
ODD_BREAK_WHEN     file; once it exists, the actor that ODD_BREAK names breaks over its next message
ODD_LOSE_WHEN      file; once it exists, the worker's mailbox wakes no task, until the watchdog looks after it
ODD_LOG_LINES      log lines that may wait for the reader
ODD_WORKER         import path of another worker, for which nothing of the above is true of loading and steps
"""

import os
import sys
import threading
import time
from functools import partialmethod
from pathlib import Path

WORKER = "odd_worker:OddWorker"


def main() -> int:
    set_the_clock()
    break_actors()
    narrow_the_log()
    bound_the_threads()
    bound_the_losses()
    install_worker(os.environ.get("ODD_WORKER", WORKER))
    from troupellm.server.cli.main import main as command

    return command(sys.argv[1:])


def install_worker(factory: str) -> None:
    """The seat of a model worker, in every arrangement."""
    from troupellm.actors.engine import start as engine_start
    from troupellm.models.processes.preload_torch import import_beside
    from troupellm.protocol.wire.worker import resolve

    def make(machinery, folder):
        _, machinery._frozen = import_beside("troupellm.models.worker.worker")
        return resolve(factory)(folder)

    assert callable(engine_start.Machinery._model_worker)
    engine_start.MODEL_WORKER, engine_start.Machinery._model_worker = factory, make


def bound_the_threads() -> None:
    start, no_threads = threading.Thread.start, os.environ.get("ODD_NO_THREADS")

    def start_if_there_are_threads(thread):
        if no_threads and Path(no_threads).exists():
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = start_if_there_are_threads


def bound_the_losses() -> None:
    if losses := os.environ.get("ODD_LOSSES"):
        import msgspec

        from troupellm.actors.engine.edges import SUPERVISION
        from troupellm.actors.runtime.restart_intensity import Intensity

        intensity = Intensity(restarts=int(losses), seconds=3600.0)
        SUPERVISION["worker"] = msgspec.structs.replace(SUPERVISION["worker"], intensity=intensity)


def set_the_clock() -> None:
    wall, offset = time.time, os.environ.get("ODD_WALL_OFFSET")
    if offset:
        time.time = lambda: wall() + float(Path(offset).read_text())


def narrow_the_log() -> None:
    if lines := os.environ.get("ODD_LOG_LINES"):
        from troupellm.server.observe.log_writer import LogWriter

        LogWriter.__init__ = partialmethod(LogWriter.__init__, capacity=int(lines))


def break_actors() -> None:
    broken, name, lost = (os.environ.get(f"ODD_{name}") for name in ("BREAK_WHEN", "BREAK", "LOSE_WHEN"))
    if not broken and not lost:
        return
    from troupellm.actors.runtime.mailbox import Mailbox

    take, wake, nudge = Mailbox.take, Mailbox._wake_consumer, Mailbox.nudge

    def take_or_break(box):
        message = take(box)
        if message is not None and broken and box.name == name and Path(broken).exists():
            raise RuntimeError(f"odd: {name} broke")
        return message

    def wake_or_lose(box):
        if not (lost and box.name == "worker" and Path(lost).exists()):
            wake(box)

    def nudge_and_find(box):
        if lost and box.name == "worker":
            Path(lost).unlink(missing_ok=True)
        nudge(box)

    Mailbox.take, Mailbox._wake_consumer, Mailbox.nudge = take_or_break, wake_or_lose, nudge_and_find


if __name__ == "__main__":
    sys.exit(main())
