"""Facts about a machine that decide if kernels can run there: versions, a compiler, Python's headers, one launch.

`python -m troupellm.load_tests.gpu.machine DEVICE` prints them as a line of JSON. No fact ends the process.
"""

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from troupellm.kernels.common.triton_probe import launch_error
from troupellm.load_tests.gpu.wheels import PACKAGES, THERE

QUERY = "--query-gpu=name,driver_version,power.limit,memory.total,clocks.max.sm"


def facts(device: torch.device) -> dict[str, Any]:
    """Everything that is known before a model runs.

    Returns:
        `device`: a line of nvidia-smi, or why there is none. `versions` by package, `missing` packages. `compiler`: its
        path; `headers`: if Python.h is there; `locked_memory`: the limit in bytes, -1 for none. `launch`: "" if a
        Triton kernel ran on `device`, else the error.
    """
    versions = {name: _version(name) for name in (*THERE, *PACKAGES)}
    return {
        "device": device_text(),
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version},
        "missing": [name for name, version in versions.items() if not version],
        "compiler": shutil.which(os.environ.get("CC", "")) or shutil.which("gcc") or shutil.which("clang"),
        "headers": (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        "cores": os.cpu_count(),
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "launch": launch_error(device),
    }


def device_text() -> str:
    """The device as `nvidia-smi` describes it, or why it does not."""
    try:
        done = subprocess.run(
            ["nvidia-smi", QUERY, "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}"
    return done.stdout.strip().splitlines()[0]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    print(json.dumps(facts(torch.device(sys.argv[-1]))))
