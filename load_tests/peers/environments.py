"""Where the contestants live: each has a Python of its own, in which our files can be imported, too."""

import os
import platform
import sys
from pathlib import Path

import troupellm

TROUPE = "troupellm"
SIDES = {
    TROUPE: "troupe",
    "openvino": "openvino_side",
    "vllm": "vllm_side",
    "llama": "llama_side",
    "transformers": "transformers_side",
}
"""Contestants and their modules."""
NAMES = tuple(SIDES)


def python_of(contestant: str, folder: Path) -> Path | None:
    """The interpreter that runs a contestant, None where it is not installed.

    `transformers` may live in this environment, too: it is a test dependency.
    """
    own = folder / contestant / "bin" / "python"
    if contestant != TROUPE and own.exists() and (folder / contestant / ".installed").exists():
        return own.absolute()
    if contestant == TROUPE or (contestant == "transformers" and _has_transformers()):
        return Path(sys.executable)
    return None


def _has_transformers() -> bool:
    from importlib.util import find_spec

    return find_spec("transformers") is not None


def environment_of(contestant: str, python: Path, link: Path, threads: int) -> dict[str, str]:
    """Variables for a contestant's process.

    Args:
        link: a folder in which `troupellm` leads to our files, for environments that do not have them.
        threads: OpenMP's, for those that start computing before they are told.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    ours = {"PYTHONPATH": str(link), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    tools = f"{python.parent}{os.pathsep}{inherited.get('PATH', '')}"
    if contestant != TROUPE:  # which counts its threads itself, and may have parts of it elsewhere
        ours["OMP_NUM_THREADS"] = str(threads)
    elif elsewhere := os.environ.get("PYTHONPATH"):  # which may be told from here: the process begins in another folder
        parts = [os.path.abspath(part) for part in elsewhere.split(os.pathsep) if part]
        ours["PYTHONPATH"] = os.pathsep.join((str(link), *parts))
    return {**inherited, **ours, "PATH": tools}


def link_package(folder: Path) -> Path:
    """Make `folder` a place to import `troupellm` from: these files, in place of an earlier run's."""
    folder.mkdir(parents=True, exist_ok=True)
    place, files = folder / "troupellm", Path(troupellm.__file__).resolve().parent
    if place.is_symlink() and place.resolve() != files:
        place.unlink()
    if not place.is_symlink():
        place.symlink_to(files)
    return folder


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
