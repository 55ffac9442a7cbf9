"""Every operation's cases on the device, each operation in a process of its own: kernels are compiled on all cores at
once, which is most of what the cases take, and what breaks one operation's context leaves the others theirs. Beside
them the models of the first goals run some steps, so that their kernels are compiled by then, too, and are counted
where a profile disturbs no measure.

`python -m troupellm.load_tests.gpu.checking TASK DEVICE` is one of these processes; a task is an operation, or a model
behind `model:`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from troupellm.load_tests.gpu.attention import real_checks
from troupellm.load_tests.gpu.models import write_model
from troupellm.load_tests.kernels.checks import Check, check
from troupellm.load_tests.peers.environments import TROUPE, environment_of, link_package

LARGEST = 1e9
"""The number written instead of infinity."""
MODEL = "model:"
BATCHES = (1, 32)
"""That models run at; other sizes have the kernels of one of these."""
ALONE = {"OMP_NUM_THREADS": "1", "TROUPE_NATIVE": "0"}
"""A process for each core: none has more threads, or begins to compile what the host would compute with."""
READ_SECONDS = 10.0
"""For what a process has written that is over."""

Processes = Mapping[str, subprocess.Popen[str]]


class Unfinished(msgspec.Struct, frozen=True):
    """Why a task has no cases to show."""

    why: str
    late: bool = False
    """It was still at it; else it broke."""


def begin(tasks: Iterable[str], device: torch.device, folder: Path) -> Processes:
    """Start a process for each task.

    Args:
        folder: where the processes find the package and the models, and begin.
    """
    environment = environment_of(TROUPE, Path(sys.executable), link_package(folder / "import"), 1) | ALONE
    return {
        task: subprocess.Popen(
            [sys.executable, "-m", __name__, task, device.type],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )
        for task in tasks
    }


def begin_models(names: Iterable[str], device: torch.device, folder: Path) -> Processes:
    """The same for models, whose folders are written first."""
    for name in (names := tuple(names)):
        write_model(name, folder)
    return begin([MODEL + name for name in names], device, folder)


def answers(module: str, device: torch.device, folder: Path, seconds: float) -> dict[str, Any]:
    """The JSON that a module of this folder prints at its end; {"error": ...} where it broke or was late."""
    environment = environment_of(TROUPE, Path(sys.executable), link_package(folder / "import"), 1) | ALONE
    running = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.{module}", device.type],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
    )
    printed = _printed({module: running}, seconds)[module]
    return {"error": printed.why} if isinstance(printed, Unfinished) else json.loads(printed)


def results(running: Processes, seconds: float) -> dict[str, list[Check] | Unfinished]:
    """By operation its cases, or why there are none. No process is left.

    Args:
        seconds: for all of them together; who is not done by then is ended.
    """
    return {
        task: printed if isinstance(printed, Unfinished) else msgspec.json.decode(printed, type=list[Check])
        for task, printed in _printed(running, seconds).items()
    }


def kernel_counts(running: Processes, seconds: float) -> dict[str, int | Unfinished]:
    """By model the kernels of its step of one sequence; else as `results`."""
    return {
        task.removeprefix(MODEL): printed if isinstance(printed, Unfinished) else int(printed)
        for task, printed in _printed(running, seconds).items()
    }


def _printed(running: Processes, seconds: float) -> dict[str, str | Unfinished]:
    deadline = time.monotonic() + seconds
    try:
        return {task: _last_line(process, deadline) for task, process in running.items()}
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.communicate()


def _last_line(process: subprocess.Popen[str], deadline: float) -> str | Unfinished:
    """The last line of a process; one that has ended is never late."""
    left = READ_SECONDS if process.poll() is not None else max(0.0, deadline - time.monotonic())
    try:
        printed, errors = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        return Unfinished("it was not done in time", late=True)
    if process.returncode:
        return Unfinished((errors.strip() or f"it ended with {process.returncode}").splitlines()[-1])
    return printed.splitlines()[-1]


def _run_model(name: str, device: torch.device) -> int:
    """The kernels of a step, the last thing that is known."""
    from troupellm.load_tests.gpu.engine import Models
    from troupellm.load_tests.kernels.ceilings import Measured

    models = Models(device, Measured(device="not measured", read=0.0, copy=0.0), Path.cwd())
    for batch in BATCHES:
        models.worker_step(name, batch)
    return models.kernels(name, 1)


def main() -> None:
    task, device = sys.argv[1:]
    if task.startswith(MODEL):
        print(_run_model(task.removeprefix(MODEL), torch.device(device)))
        return
    found = check(task, torch.device(device))
    if device == "cuda":
        found += real_checks(task, torch.device(device))
    told = [msgspec.structs.replace(one, error=min(one.error, LARGEST)) for one in found]
    print(msgspec.json.encode(told).decode())


if __name__ == "__main__":
    main()
