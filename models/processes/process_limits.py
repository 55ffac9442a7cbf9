"""The limits of this process on memory: its own and of the control groups it is in."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def available_memory(root: Path = ROOT) -> int:
    """Bytes that can still be taken without swapping: what the machine has, or less where a control group, one above
    it, or `ulimit -v` allows less."""
    return max(0, min([_machine_room(root), *_group_rooms(root), *_address_room(root)]))


def limit(kind: int, most: int) -> None:
    """Limit this process's own memory; a lower hard limit that it was started with stays in force."""
    hard = resource.getrlimit(kind)[1]
    unlimited = hard == resource.RLIM_INFINITY
    resource.setrlimit(kind, (most if unlimited else min(most, hard), hard))


def lift(kind: int) -> None:
    """Take a limit back, as far as the one that this process was started with."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (hard, hard))


def _machine_room(root: Path) -> int:
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _address_room(root: Path) -> Iterator[int]:
    """Bytes of addresses that `ulimit -v` leaves."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return
    try:
        pages = int((root / "proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return
    yield most - pages * resource.getpagesize()


def _group_rooms(root: Path) -> Iterator[int]:
    """Bytes that each control group with a limit leaves, from this process's own up to the top one."""
    groups = root / "sys/fs/cgroup"
    for folder in _chain(groups, _group_of(root, "")):
        yield from _room(folder / "memory.max", folder / "memory.current", "")
    for folder in _chain(groups / "memory", _group_of(root, "memory")):  # the first version: a tree per controller
        yield from _room(folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes", "total_")


def _group_of(root: Path, controller: str) -> str:
    """The path of this process's control group; of the second version for the controller "". The top where that is not
    told: a container sees its own group there."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path.strip("/")
    return ""


def _chain(top: Path, group: str) -> Iterator[Path]:
    """Control groups from one up to the top. A path out of the tree, as seen from another namespace, is skipped."""
    parts = [] if ".." in group.split("/") else [part for part in group.split("/") if part]
    for count in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:count])


def _room(limit: Path, used: Path, prefix: str) -> Iterator[int]:
    try:
        most, taken = int(limit.read_text()), int(used.read_text())
    except (OSError, ValueError):
        return  # no such control group, or no limit; the first version says that by more than any machine has
    yield most - max(0, taken - _kept_files(limit.with_name("memory.stat"), prefix))


def _kept_files(counts: Path, prefix: str) -> int:
    """Bytes of files that a control group counts as used and that the system drops where memory is asked for: a
    model that was downloaded or loaded there before is among them.

    Args:
        prefix: of the names of counts that have the groups below in them, as the use has.
    """
    try:
        fields = dict(line.split() for line in counts.read_text().splitlines())
        return int(fields[f"{prefix}active_file"]) + int(fields[f"{prefix}inactive_file"])
    except (OSError, KeyError, ValueError):
        return 0
