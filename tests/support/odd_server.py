"""`troupellm`, with a fault inside that its environment describes. Run as a script, like the command itself.

ODD_LOAD_UNTIL     file; the weights are not loaded before it exists
ODD_HANG_WHEN      file; once it exists, the next step never ends
ODD_FAIL_WHEN      file; once it exists, every step fails
ODD_STEP_SECONDS   what every step takes at least
ODD_NO_THREADS     file; once it exists, no more threads can be started
"""

import os
import sys
import threading
import time
from pathlib import Path

POLL_SECONDS = 0.01


def main() -> int:
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


if __name__ == "__main__":
    sys.exit(main())
