"""The port for processes: started with one end of a socket pair, heard of through callbacks, and never left behind.

The child must be started by a thread that lives as long as it is wanted: the kernel kills it with that thread. So it
is the event loop's own that starts it, which takes a few milliseconds.
"""

import asyncio  # noqa: TID251 - a port
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import anyio

from troupellm.models.processes.module_path import child_environment

MOST_LINE_BYTES = 8192
"""Longer lines of a child are cut in pieces."""
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.05
_LAST_WORDS_SECONDS = 0.5
"""Seconds for which the remaining output of an ended process is read."""


class ChildProcess(Protocol):
    """A process of ours at the other end of a socket."""

    @property
    def pid(self) -> int: ...

    def send(self, data: bytes) -> None:
        """Never waits: what the socket does not take is kept. Nothing happens when the process has gone."""

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""

    @property
    def cpu_seconds(self) -> float | None:
        """Processor time that all its threads have had; None where the system does not say, or it has gone."""

    def kill(self) -> None:
        """Kill the process at once. Idempotent."""

    async def ended(self, timeout: float) -> int | None:
        """Wait until nothing is left of it; the exit code, negative for a signal's number, or None in time."""


class ProcessEvents(Protocol):
    """Notifications about a child, on the event loop."""

    def received(self, data: bytes) -> None: ...

    def closed(self) -> None:
        """It has closed its end of the socket; usually it has died. Nothing is received after it."""

    def said(self, line: str) -> None:
        """A line that it wrote to its standard output or error."""


class Processes(Protocol):
    async def start(self, module: str, events: ProcessEvents) -> ChildProcess:
        """Run a module of ours with one end of a socket pair; it must not outlive this process.

        Raises:
            OSError: there can be no more processes.
        """

    def oom_kills(self) -> int | None:
        """How many processes like ours the kernel has killed for want of memory; None where it does not say."""


class SystemProcesses:
    """Implements `Processes` on asyncio."""

    async def start(self, module: str, events: ProcessEvents) -> "SystemChild":
        with ExitStack() as stack:
            near, far = map(stack.enter_context, socket.socketpair())
            heard, spoken = map(stack.enter_context, socket.socketpair())  # no pipe: uvloop closes those twice
            spoken.setblocking(True)  # independent of the host's default
            process = subprocess.Popen(  # noqa: ASYNC220 - see the module
                [sys.executable, "-P", "-m", module, str(far.fileno()), str(os.getpid())],
                pass_fds=(far.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=spoken.fileno(),
                stderr=subprocess.STDOUT,
                env=child_environment() | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # what a terminal tells everybody in front of it is our own business
            )
            far.close()
            spoken.close()
            child = SystemChild(process)
            connect = asyncio.get_running_loop().create_unix_connection
            try:
                for end in (near, heard):
                    end.setblocking(False)
                with anyio.CancelScope(shield=True):  # the child runs already: a cancellation must not leave it behind
                    child.link, child.link_end = await connect(lambda: _Link(events), sock=near)
                    child.output, child.lines = await connect(lambda: _Lines(events.said), sock=heard)
            except BaseException:
                child.kill()
                process.wait()
                for end in (near, heard):
                    with suppress(OSError):  # uvloop before 0.23 has closed what it was cancelled over
                        end.close()
                raise
            stack.pop_all()
        return child

    def oom_kills(self) -> int | None:
        return count_oom_kills()


class SystemChild:
    """Implements `ChildProcess`."""

    link: Any = None
    link_end: "_Link"
    output: Any = None
    lines: "_Lines"

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, data: bytes) -> None:
        if not self.link.is_closing():
            self.link.write(data)

    @property
    def stopped(self) -> bool:
        try:
            status = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return status is not None and status.si_code == os.CLD_STOPPED

    @property
    def cpu_seconds(self) -> float | None:
        if sys.platform != "linux" or self._process.returncode is not None:
            return None
        with suppress(OSError):
            return time.clock_gettime(~self.pid << 3 | 2)  # as clock_getcpuclockid(3) makes it
        return None

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)  # which does nothing once it was waited for
        if self.link is not None:
            self.link.abort()

    async def ended(self, timeout: float) -> int | None:
        """Asks again and again for a moment: a process that was killed is gone within milliseconds."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + timeout, _FIRST_PAUSE_SECONDS
        while self._process.poll() is None and loop.time() < deadline:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self.link.abort()
        if self._process.returncode is not None:
            deadline = min(deadline, loop.time() + _LAST_WORDS_SECONDS)
            while not (self.link_end.over and self.lines.over):
                if loop.time() > deadline:  # another process holds its output open
                    self.output.close()
                    break
                await asyncio.sleep(_FIRST_PAUSE_SECONDS)
        return self._process.returncode


class _Link(asyncio.Protocol):
    def __init__(self, events: ProcessEvents) -> None:
        self._events = events
        self.over = False

    def data_received(self, data: bytes) -> None:
        self._events.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.over = True
        self._events.closed()


class _Lines(asyncio.Protocol):
    """Cuts bytes into lines."""

    def __init__(self, said: Callable[[str], None]) -> None:
        self._said = said
        self._held = b""
        self.over = False

    def data_received(self, data: bytes) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        while len(self._held) > MOST_LINE_BYTES:
            lines.append(self._held[:MOST_LINE_BYTES])
            self._held = self._held[MOST_LINE_BYTES:]
        for line in lines:
            self._said(line.decode(errors="replace").rstrip())

    def connection_lost(self, exc: Exception | None) -> None:
        self.over = True
        if self._held:
            self._said(self._held.decode(errors="replace").rstrip())


def count_oom_kills(root: Path = Path("/")) -> int | None:
    """Counted for our control group where that can be read, else for the machine; before the victim hears of it."""
    for path in (*_group_counts(root), root / "proc/vmstat"):
        try:
            lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.isdecimal():
                return int(number)
    return None


def _group_counts(root: Path) -> list[Path]:
    """Files of our control group, in either version of them, that may hold the count."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    groups, found = root / "sys/fs/cgroup", []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            found.append(groups / group.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(groups / "memory" / group.lstrip("/") / "memory.oom_control")
    return found
