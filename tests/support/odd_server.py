"""`troupellm`, with a fault inside that its environment describes. Run as a script, like the command itself.

ODD_LOAD_UNTIL     file; the weights are not loaded before it exists
ODD_HANG_WHEN      file; once it exists, the next step never ends
ODD_FAIL_WHEN      file; once it exists, every step fails
ODD_STEP_SECONDS   what every step takes at least
ODD_NO_THREADS     file; once it exists, no more threads can be started
ODD_WALL_OFFSET    file; the seconds in it are added to the wall clock
ODD_BREAK_WHEN     file; once it exists, the actor that ODD_BREAK names breaks over its next message
ODD_LOSE_WHEN      file; once it exists, the worker's mailbox wakes nobody, until somebody looks after it
ODD_LOG_LINES      log lines that may wait for whoever reads them
ODD_WORKER         import path of the worker in a process of its own; what is said above of steps is not for it
"""

import os
import sys
import threading
import time
from functools import partialmethod
from pathlib import Path

POLL_SECONDS = 0.01


def main() -> int:
    set_the_clock()
    break_actors()
    narrow_the_log()
    if factory := os.environ.get("ODD_WORKER"):
        return serve_with(factory)
    from troupellm.models.worker import ModelWorker
    from troupellm.server.cli.main import main as command

    load, launch = ModelWorker.load, ModelWorker.launch
    until, hang, seconds = (os.environ.get(f"ODD_{name}") for name in ("LOAD_UNTIL", "HANG_WHEN", "STEP_SECONDS"))

    def slow_load(worker, config, progress):
        while until and not Path(until).exists():
            time.sleep(POLL_SECONDS)
        return load(worker, config, progress)

    fail = os.environ.get("ODD_FAIL_WHEN")

    def slow_launch(worker, plan):
        if fail and Path(fail).exists():
            raise RuntimeError("odd: every step fails")
        while hang and Path(hang).exists():
            time.sleep(POLL_SECONDS)
        time.sleep(float(seconds or 0.0))
        return launch(worker, plan)

    start, no_threads = threading.Thread.start, os.environ.get("ODD_NO_THREADS")

    def start_if_there_are_threads(thread):
        if no_threads and Path(no_threads).exists():
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = start_if_there_are_threads
    ModelWorker.load, ModelWorker.launch = slow_load, slow_launch
    return command([*sys.argv[1:], "--no-worker-process"])  # the faults are in this process


def serve_with(factory: str) -> int:
    """The default arrangement, with somebody else in the worker's seat."""
    from troupellm.actors import engine_start
    from troupellm.server.cli.main import main as command

    engine_start.MODEL_WORKER = factory
    return command(sys.argv[1:])


def set_the_clock() -> None:
    wall, offset = time.time, os.environ.get("ODD_WALL_OFFSET")
    if offset:
        time.time = lambda: wall() + float(Path(offset).read_text())


def narrow_the_log() -> None:
    if lines := os.environ.get("ODD_LOG_LINES"):
        from troupellm.server.log_writer import LogWriter

        LogWriter.__init__ = partialmethod(LogWriter.__init__, capacity=int(lines))


def break_actors() -> None:
    broken, name, lost = (os.environ.get(f"ODD_{name}") for name in ("BREAK_WHEN", "BREAK", "LOSE_WHEN"))
    if not broken and not lost:
        return
    from troupellm.actors.mailbox import Mailbox

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
