"""Says how much an installation is about to download, and warns before it fetches gigabytes of CUDA for no GPU.

Run by the Makefile with the environment's Python before anything is installed: standard library only.
"""

import json
import os
import shutil
import subprocess
import sys


def main(constraints: str, *pip_arguments: str) -> int:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", "--report", "-"]
    report = subprocess.run(
        [*command, *pip_arguments, "-c", constraints, "torch"], capture_output=True, text=True, check=False
    )
    if report.returncode != 0:
        print("torch was not found in the package index; set TORCH_INDEX to an index that has it", file=sys.stderr)
        print(report.stderr.strip()[-400:], file=sys.stderr)
        return 1
    installs = json.loads(report.stdout)["install"]
    if not installs:
        print("torch is installed; the other packages are about 60 MB")
        return 0
    url = installs[0]["download_info"]["url"]
    if url.startswith("file:"):
        print("torch comes from a wheel on this machine; the other packages are about 60 MB to download")
    elif "cpu" in url.rsplit("/", maxsplit=1)[-1]:
        print("about 250 MB to download (torch for a CPU is 190 MB of it)")
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
