"""Says how much an installation is about to download, and warns before it fetches gigabytes of CUDA for no GPU.

Run by the Makefile with the environment's Python before anything is installed: standard library and pip only.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any
from urllib.parse import unquote

from pip._vendor.packaging.requirements import Requirement

CUDA_PARTS = ("nvidia-", "cuda-")
"""How the packages begin that torch asks for when it was built for CUDA."""


def is_cuda(install: dict[str, Any], environment: dict[str, str]) -> bool:
    """Whether a torch that pip would install is a build for CUDA.

    A name may say it (`+cpu`, `+cu130`) and need not: wheels for macOS, and those of many an index, are plainly named.
    The requirements of the wheel on this machine do.
    """
    name = unquote(install["download_info"]["url"]).rpartition("/")[2]
    if "cpu" in name:
        return False
    if re.search(r"\+cu\d", name):
        return True
    wanted = map(Requirement, install["metadata"].get("requires_dist", ()))
    return any(
        requirement.name.startswith(CUDA_PARTS)
        and (requirement.marker is None or requirement.marker.evaluate({**environment, "extra": ""}))
        for requirement in wanted
    )


def main(constraints: str, *pip_arguments: str) -> int:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", "--report", "-"]
    done = subprocess.run(
        [*command, *pip_arguments, "-c", constraints, "torch"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        print("torch was not found in the package index; set TORCH_INDEX to an index that has it", file=sys.stderr)
        print(done.stderr.strip()[-400:], file=sys.stderr)
        return 1
    report = json.loads(done.stdout)
    if not report["install"]:
        print("torch is installed; the other packages are about 60 MB")
        return 0
    install = report["install"][0]
    if install["download_info"]["url"].startswith("file:"):
        print("torch comes from a wheel on this machine; the other packages are about 60 MB to download")
    elif not is_cuda(install, report["environment"]):
        print("about 250 MB to download (torch for a CPU is up to 190 MB of it)")
    elif shutil.which("nvidia-smi"):
        print("about 3 GB to download (torch with CUDA is nearly all of it)")
    else:
        print("This index has torch for CUDA only (about 3 GB to download), and there is no NVIDIA GPU here.")
        print("Give an index with CPU builds, about 250 MB: make ... TORCH_INDEX=<address>")
        print("or a folder with a wheel: make ... WHEELS=<folder>; to take the CUDA build: make ... ALLOW_CUDA=1")
        return 0 if os.environ.get("ALLOW_CUDA") else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
