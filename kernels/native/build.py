"""Building the library: every source by a compiler of its own at the same time, then one link."""

import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-Wno-psabi", "-fno-math-errno")
COMPILE_SECONDS = 120.0
OPENMP_NAMES = ("libgomp", "libomp", "libiomp5")


def library() -> Path | None:
    """The built library: found where an earlier process left it, else built now. None where that fails."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return None
    name = f"native-{fingerprint(compiler)}.so"
    for folder in folders():
        try:
            if not (folder / name).exists():
                _build(compiler, folder / name)
        except (OSError, subprocess.SubprocessError):
            continue
        return folder / name
    return None


def folders() -> tuple[Path, ...]:
    """Where the library may lie; beside the source it goes where compiled Python goes."""
    beside = FOLDER / "__pycache__"
    try:
        return beside, Path.home() / ".cache" / "troupellm"
    except RuntimeError:  # a user without a home
        return (beside,)


def fingerprint(compiler: str) -> str:
    """Changes with the sources, the compiler, the OpenMP and the processor that `-march=native` means."""
    digest = hashlib.sha256()
    for source in sorted((*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"))):
        digest.update(source.read_bytes())
    words = (compiler, *FLAGS, *openmp(), platform.machine(), platform.libc_ver()[1])
    digest.update(" ".join(words).encode())
    processor = Path("/proc/cpuinfo")
    if processor.exists():
        flags = [line for line in processor.read_text().splitlines() if line.startswith(("flags", "Features", "model"))]
        digest.update("\n".join(sorted(set(flags))).encode())
    return digest.hexdigest()[:16]


@functools.cache
def openmp() -> tuple[str, ...]:
    """What to link for OpenMP: the very file that torch has loaded, so that there is one pool of threads."""
    loaded = loaded_openmp()
    ours = [path for path in loaded if Path(torch.__file__).parent.parent in Path(path).parents]
    return tuple((ours or loaded)[:1]) or ("-fopenmp",)


def loaded_openmp() -> list[str]:
    """The OpenMP libraries of this process, where the system tells."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return [file for file in files if Path(file).name.startswith(OPENMP_NAMES)]


def _build(compiler: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh, objects = Path(folder) / target.name, []
        running: list[tuple[list[str], subprocess.Popen[bytes]]] = []
        try:
            for source in sorted(FOLDER.glob("*.cpp")):
                objects.append(f"{folder}/{source.stem}.o")
                command = [compiler, *FLAGS, "-c", str(source), "-o", objects[-1]]
                running.append(
                    (command, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                )
            for command, process in running:
                if process.wait(timeout=COMPILE_SECONDS):
                    raise subprocess.CalledProcessError(process.returncode, command)
        finally:
            for _, process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        link = [compiler, "-shared", *objects, "-o", str(fresh), *openmp()]
        subprocess.run(link, check=True, capture_output=True, timeout=COMPILE_SECONDS)
        fresh.replace(target)  # atomic: another process may be doing the same
