"""Builds the library: one compiler process per source, all at the same time, then one link."""

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

import torch

logger = logging.getLogger("troupellm.kernels")

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-Wno-psabi", "-fno-math-errno")
SANITIZER_FLAGS = ("-O2", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
"""Further flags of the build that reports each access outside of memory and ends the process."""
COMPILE_SECONDS = 240.0
"""Limit for all sources and the link together."""
SANITIZED_SECONDS = 1200.0
"""The same for the build with sanitizers, which only tests use."""
RETRY_SECONDS = 3600.0
"""A build that failed, took too long, or gave what cannot be loaded, is not tried again before: every process of the
machine would wait for it anew."""
LAST_LINES = 5
"""Limit of the compiler's error output."""
SWITCH = "TROUPE_NATIVE"
"""A variable of the environment: 0 leaves everything to torch, as on a machine without a compiler; asan is the build
with AddressSanitizer and UBSan, whose runtime the process must have loaded first (`make asan`)."""
OPENMP_NAMES = ("libgomp", "libomp", "libiomp5")
_ELF_HEADER = struct.Struct("<4s4B 32x Q 10x 2H 2x")
"""Magic, class, order of bytes, and two more; where the table of sections lies, its entries' size and number."""


def library(broken: Collection[Path] = ()) -> tuple[Path, bool] | None:
    """The built library: found where an earlier process left it, else built now. None where that fails.

    Args:
        broken: those that cannot be loaded, and are built anew.

    Returns:
        its file, and whether it was built now.
    """
    compiler = _compiler()
    if compiler is None:
        return None
    name, said = file_name(compiler), ""
    for folder in folders():
        target = folder / name
        try:
            built = target in broken or not _is_there(target)
            if built:
                with _alone(target):
                    if _given_up(target):
                        return None
                    if target not in broken and _is_there(target):  # another process has built it meanwhile
                        return target, False
                    _build(compiler, target)
        except subprocess.TimeoutExpired:
            give_up(target)
            return None  # another folder makes it no faster
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or b"").decode(errors="replace").strip().splitlines()
            said = "\n".join(lines[-LAST_LINES:]) or str(error)
            give_up(target)
            continue  # the disk may be full there
        except (OSError, subprocess.SubprocessError) as error:
            said = said or str(error)  # the folder may not be writable, for example
            continue
        return target, built
    if said:
        logger.warning("compiled code cannot be built, torch computes instead: %s: %s", compiler, said)
    return None


def to_be_built() -> bool:
    """True if `library` would compile, which takes up to `COMPILE_SECONDS` on a busy machine."""
    compiler = _compiler()
    if compiler is None:
        return False
    targets = [folder / file_name(compiler) for folder in folders()]
    return not any(_is_there(target) or _given_up(target) for target in targets)


def compiler_is_missing() -> bool:
    """True if compiled code is wanted and there is no compiler for it."""
    return not _switched_off() and _compiler() is None


def sanitized() -> bool:
    """True if the environment asks for the build with sanitizers."""
    return os.environ.get(SWITCH, "").lower() == "asan"


def file_name(compiler: str) -> str:
    """File name of the library."""
    return f"native-{'asan-' if sanitized() else ''}{fingerprint(compiler)}.so"


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *SANITIZER_FLAGS) if sanitized() else FLAGS


def _compiler() -> str | None:
    if _switched_off():
        return None
    return shutil.which("g++") or shutil.which("c++")


def _switched_off() -> bool:
    return os.environ.get(SWITCH, "").lower() in ("0", "false", "no", "off")


def _is_there(target: Path) -> bool:
    """True if the whole file is there: loading a truncated library kills the process without an error.

    False if access is denied: HOME may name another user's folder, as in many containers.
    """
    try:
        with target.open("rb") as file:
            head, size = file.read(_ELF_HEADER.size), os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(head) < _ELF_HEADER.size or not head.startswith(b"\x7fELF"):
        return sys.platform != "linux"
    _, bits, order, _, _, sections, entry, count = _ELF_HEADER.unpack(head)
    return (bits, order) != (2, 1) or sections + entry * count <= size  # linkers put that table last


def _given_up(target: Path) -> bool:
    """True if a build was given up recently."""
    try:
        return time.time() - target.with_suffix(".slow").stat().st_mtime < RETRY_SECONDS
    except OSError:
        return False


def give_up(target: Path) -> None:
    """Remember that building it leads to nothing."""
    with contextlib.suppress(OSError):
        target.with_suffix(".slow").touch()


def folders() -> tuple[Path, ...]:
    """Candidate folders of the library; beside the source it is in the folder of compiled Python files."""
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
    words = (compiler, *_flags(), *openmp(), platform.machine(), platform.libc_ver()[1])
    digest.update(" ".join(words).encode())
    processor = Path("/proc/cpuinfo")
    if processor.exists():
        flags = [line for line in processor.read_text().splitlines() if line.startswith(("flags", "Features", "model"))]
        digest.update("\n".join(sorted(set(flags))).encode())
    return digest.hexdigest()[:16]


@functools.cache
def openmp() -> tuple[str, ...]:
    """The argument that links OpenMP: the very file that torch has loaded, so that there is one pool of threads."""
    loaded = loaded_openmp()
    ours = [path for path in loaded if Path(torch.__file__).parent.parent in Path(path).parents]
    return tuple((ours or loaded)[:1]) or ("-fopenmp",)


def loaded_openmp() -> list[str]:
    """The OpenMP libraries of this process, if the system lists them."""
    return _loaded(OPENMP_NAMES)


def sanitizer_is_missing() -> bool:
    """True if the build with sanitizers is requested in a process without their runtime, which would end it."""
    return sanitized() and not _loaded(("libasan",))


def _loaded(names: tuple[str, ...]) -> list[str]:
    """Shared libraries of this process whose names begin so, if the system lists them."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return [file for file in files if Path(file).name.startswith(names)]


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """One process builds a library at a time, and the others wait for it: each would slow down all of them.

    Raises:
        OSError: the folder is not writable.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("wb") as lock:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(compiler: str, target: Path) -> None:
    """
    Raises:
        subprocess.TimeoutExpired: `COMPILE_SECONDS` were not enough.
        subprocess.CalledProcessError: the compiler refused.
    """
    until = time.monotonic() + (SANITIZED_SECONDS if sanitized() else COMPILE_SECONDS)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh, objects = Path(folder) / target.name, []
        running: list[tuple[list[str], subprocess.Popen[bytes]]] = []
        try:
            for source in sorted(FOLDER.glob("*.cpp")):
                objects.append(f"{folder}/{source.stem}.o")
                command = [compiler, *_flags(), "-c", str(source), "-o", objects[-1]]
                with Path(objects[-1]).with_suffix(".err").open("wb") as errors:
                    running.append((command, _compiling(command, errors)))
            for number, (command, process) in enumerate(running):
                if process.wait(timeout=max(0.0, until - time.monotonic())):
                    text = Path(objects[number]).with_suffix(".err").read_bytes()
                    raise subprocess.CalledProcessError(process.returncode, command, stderr=text)
        finally:
            for _, process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        link = [compiler, *(SANITIZER_FLAGS if sanitized() else ()), "-shared", *objects, "-o", str(fresh), *openmp()]
        left = max(0.0, until - time.monotonic())
        subprocess.run(link, check=True, capture_output=True, timeout=left)
        fresh.replace(target)  # atomic: another process may be doing the same


def _compiling(command: list[str], errors: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a compiler in a process group of its own: g++ starts processes that must end with it."""
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, process_group=0)
