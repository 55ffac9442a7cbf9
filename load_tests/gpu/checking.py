"""Every operation's cases on the device, each operation in a process of its own: kernels are compiled on all cores at
once, which is most of what the cases take, and what breaks one operation's context leaves the others theirs.

`python -m troupellm.load_tests.gpu.checking OPERATION DEVICE` is one of these processes.
"""

import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch

from troupellm.load_tests.kernels.checks import Check, check
from troupellm.load_tests.peers.environments import TROUPE, environment_of, link_package

SECONDS = 180.0
"""For all of them together; who is not done by then is ended."""
LARGEST = 1e9
"""What is written instead of infinity."""


def check_all(
    operations: Iterable[str], device: torch.device, folder: Path, seconds: float = SECONDS
) -> dict[str, list[Check] | str]:
    """By operation its cases, or in words why there are none.

    Args:
        folder: where the processes find the package, and begin.
    """
    environment = environment_of(TROUPE, Path(sys.executable), link_package(folder / "import"), 1)
    deadline = time.monotonic() + seconds
    running = {
        operation: subprocess.Popen(
            [sys.executable, "-m", __name__, operation, device.type],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder,
        )
        for operation in operations
    }  # fmt: skip
    try:
        return {operation: _found(process, deadline) for operation, process in running.items()}
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.communicate()


def _found(process: subprocess.Popen[str], deadline: float) -> list[Check] | str:
    try:
        printed, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "it was not done in time"
    if process.returncode:
        return (errors.strip() or f"it ended with {process.returncode}").splitlines()[-1]
    return msgspec.json.decode(printed.splitlines()[-1], type=list[Check])


def main() -> None:
    operation, device = sys.argv[1:]
    found = check(operation, torch.device(device))
    told = [msgspec.structs.replace(one, error=min(one.error, LARGEST)) for one in found]
    print(msgspec.json.encode(told).decode())


if __name__ == "__main__":
    main()
