"""Processes of ours, for real."""

import os
import sys
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from troupellm.actors.runtime.processes import SystemProcesses, count_oom_kills

pytestmark = pytest.mark.anyio


class Listener:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def received(self, data: bytes) -> None: ...

    def closed(self) -> None: ...

    def said(self, line: str) -> None:
        self.lines.append(line)


async def test_an_interrupt_at_the_terminal_is_not_for_children() -> None:
    """It goes to all of a session's foreground, also to a child that is not ready to ignore it."""
    listener = Listener()
    child = await SystemProcesses().start("platform", listener)
    session = os.getsid(child.pid)
    assert await child.ended(60) == 0
    assert session == child.pid != os.getsid(0)
    assert listener.lines


async def test_being_cancelled_over_a_start_is_no_failed_start() -> None:
    """The cancelled task has a child, and ends it."""
    listener = Listener()
    with anyio.CancelScope() as scope:
        scope.cancel()
        child = await SystemProcesses().start("platform", listener)
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert await child.ended(60) == 0
    assert listener.lines


async def test_the_output_of_a_child_comes_through_a_socket() -> None:
    """uvloop closes a pipe twice, and the second time its number may be that of a file of another thread."""
    listener = Listener()
    child = await SystemProcesses().start("platform", listener)
    assert child.output.get_extra_info("pipe") is None
    assert await child.ended(60) == 0
    assert listener.lines


@pytest.mark.skipif(sys.platform != "linux", reason="counted on Linux")
async def test_the_processor_time_of_a_child_is_its_own() -> None:
    child = await SystemProcesses().start("this", Listener())  # which prints a poem
    used = [child.cpu_seconds]
    while (now := child.cpu_seconds) is not None and child._process.poll() is None:
        used.append(now)
        await anyio.lowlevel.checkpoint()
    assert await child.ended(60) == 0
    assert used == sorted(used)
    assert 0.0 < used[-1] < 60.0
    assert child.cpu_seconds is None


EVENTS = "low 0\nhigh 4\nmax 9\noom 3\noom_kill {}\noom_group_kill 0\n"


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_kills_for_want_of_memory_are_those_of_our_control_group(tmp_path: Path) -> None:
    put(tmp_path, "proc/vmstat", "nr_free_pages 1\noom_kill 7\n")
    assert count_oom_kills(tmp_path) == 7
    put(tmp_path, "proc/self/cgroup", "0::/pod/ours\n")
    assert count_oom_kills(tmp_path) == 7
    put(tmp_path, "sys/fs/cgroup/pod/ours/memory.events", EVENTS.format(2))
    assert count_oom_kills(tmp_path) == 2


def test_older_control_groups_count_elsewhere(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "9:cpu,cpuacct:/\n5:memory:/pod/ours\n0::/\n")
    put(tmp_path, "sys/fs/cgroup/memory/pod/ours/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert count_oom_kills(tmp_path) == 5


def test_a_system_that_does_not_count_says_nothing(tmp_path: Path) -> None:
    assert count_oom_kills(tmp_path) is None
    put(tmp_path, "proc/vmstat", "nr_free_pages 1\n")
    assert count_oom_kills(tmp_path) is None
