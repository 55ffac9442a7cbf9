"""How much memory there is: the least of what machine, control groups and `ulimit -v` leave."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from troupellm.models.processes.process_limits import available_memory

MIB = 2**20


def write_group(folder: Path, used: int, most: int | None) -> None:
    """The files of a control group of the second version, in MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.current").write_text(f"{used * MIB}\n")
    (folder / "memory.max").write_text("max\n" if most is None else f"{most * MIB}\n")


def test_files_that_a_control_group_keeps_in_memory_can_be_taken(tmp_path: Path) -> None:
    """The weights of an earlier load would leave no room for those of the next one."""
    groups = tmp_path / "sys/fs/cgroup"
    write_group(groups, 7, 9)
    assert available_memory(tmp_path) == 2 * MIB
    (groups / "memory.stat").write_text(f"anon {2 * MIB}\nfile {5 * MIB}\ninactive_file {3 * MIB}\n")
    assert available_memory(tmp_path) == 2 * MIB
    (groups / "memory.stat").write_text(f"anon {2 * MIB}\nactive_file {MIB}\ninactive_file {3 * MIB}\n")
    assert available_memory(tmp_path) == 6 * MIB
    write_group(groups, 7, None)
    assert available_memory(tmp_path) > 6 * MIB


def test_the_limit_of_a_control_group_of_the_first_version_is_kept(tmp_path: Path) -> None:
    """Its counts have the groups below only in their totals, and no limit is a number of pages' worth."""
    group = tmp_path / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.usage_in_bytes").write_text(f"{7 * MIB}\n")
    (group / "memory.limit_in_bytes").write_text(f"{9 * MIB}\n")
    assert available_memory(tmp_path) == 2 * MIB
    (group / "memory.stat").write_text(f"active_file 0\ninactive_file {MIB}\nhierarchical_memory_limit {9 * MIB}\n")
    assert available_memory(tmp_path) == 2 * MIB
    totals = f"total_active_file {MIB}\ntotal_inactive_file {3 * MIB}\n"
    (group / "memory.stat").write_text(f"active_file 0\ninactive_file {MIB}\n{totals}")
    assert available_memory(tmp_path) == 6 * MIB
    (group / "memory.limit_in_bytes").write_text(f"{2 * MIB}\n")
    assert available_memory(tmp_path) == 0
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert 2**26 < available_memory(tmp_path) < 2**50


@pytest.mark.parametrize(
    ("own", "middle", "top", "room"),
    [
        ((10, 90), (20, 30), (30, 100), 10),  # (used, most) in MiB
        ((10, 15), (20, 90), (30, 100), 5),
        ((10, None), (20, None), (30, 37), 7),
        ((10, None), (20, 19), (30, 37), 0),
    ],
)
def test_the_smallest_limit_of_nested_control_groups_counts(
    tmp_path: Path, own: tuple[int, int | None], middle: tuple[int, int | None], top: tuple[int, int | None], room: int
) -> None:
    groups, told = tmp_path / "sys/fs/cgroup", tmp_path / "proc/self/cgroup"
    for folder, group in (("", top), ("kubepods", middle), ("kubepods/pod", own)):
        write_group(groups / folder, *group)
    told.parent.mkdir(parents=True)
    told.write_text("1:name=systemd:/x\n0::/kubepods/pod\n")
    assert available_memory(tmp_path) == room * MIB


def test_nested_control_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    groups, told = tmp_path / "sys/fs/cgroup/memory", tmp_path / "proc/self/cgroup"
    (groups / "docker/one").mkdir(parents=True)
    (groups / "docker/one/memory.usage_in_bytes").write_text(f"{MIB}\n")
    (groups / "docker/one/memory.limit_in_bytes").write_text(f"{4 * MIB}\n")
    told.parent.mkdir(parents=True)
    told.write_text("5:cpu,cpuacct:/other\n4:hugetlb,memory:/docker/one\n")
    assert available_memory(tmp_path) == 3 * MIB


@pytest.mark.parametrize("path", ["/../../elsewhere", "/not/mounted/here"])
def test_a_control_group_of_another_namespace_is_looked_for_at_the_top(tmp_path: Path, path: str) -> None:
    write_group(tmp_path / "sys/fs/cgroup", 1, 4)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"0::{path}\n")
    assert available_memory(tmp_path) == 3 * MIB


_LIMITED = """
import resource, sys
from troupellm.models.processes import process_limits
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 2 << 30))
print(process_limits.available_memory())
for most in (3 << 30, 1 << 29):
    process_limits.limit(resource.RLIMIT_AS, most)
    print(*resource.getrlimit(resource.RLIMIT_AS))
process_limits.lift(resource.RLIMIT_AS)
print(*resource.getrlimit(resource.RLIMIT_AS))
"""


def test_a_limit_on_addresses_counts_and_is_never_exceeded() -> None:
    done = subprocess.run([sys.executable, "-c", _LIMITED], check=True, capture_output=True, text=True)
    room, *limits = done.stdout.splitlines()
    assert 0 < int(room) < 1 << 30
    assert limits == [f"{2 << 30} {2 << 30}", f"{1 << 29} {2 << 30}", f"{2 << 30} {2 << 30}"]


def test_available_memory_is_plausible() -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert 2**26 < available_memory() < 2**50
