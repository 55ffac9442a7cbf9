"""Shared state of processes by which one could make another one wait."""

from collections.abc import Iterable
from pathlib import Path

Segment = tuple[str, str]
"""Device and inode."""


def shared_segments(pid: int) -> set[Segment]:
    """Memory that a process shares and may write, where a lock of several processes would lie.

    The kernel's own mappings for a process have no file, and one inode for all of them: they do not count.
    """
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, mode, _, device, inode, *name = line.split(maxsplit=5)
        if "w" in mode and mode.endswith("s") and not "".join(name).startswith("anon_inode:"):
            found.add((device, inode))
    return found


def lock_files(pids: Iterable[int]) -> list[str]:
    """Locks on files that these processes hold or wait for, as the kernel tells of them."""
    wanted = {str(pid) for pid in pids}
    lines = Path("/proc/locks").read_text().splitlines()
    return [line for line in lines if line.replace("-> ", "").split()[4] in wanted]
