"""`troupellm serve` as a process of its own on loopback, for benchmarks that start, kill and count it from outside."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

START_SECONDS = 120.0
STOP_SECONDS = 40.0
LINE_BYTES = 16_384
"""Characters kept of a longer line of the log."""
_READY = re.compile(r"ready: (\S+) at (http://\S+)")
_KEPT_LINES = 200
_PIECE_BYTES = 65_536


class OwnServer:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.url = ""
        self.model = ""
        self.log: list[str] = []
        """The last lines."""
        self._ready = asyncio.Event()

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def read_log(self) -> None:
        assert self._process.stderr is not None
        async for line in lines_of(self._process.stderr):
            text = line.decode(errors="replace").rstrip()
            self.log = [*self.log[-_KEPT_LINES:], text]
            if found := _READY.search(text):
                self.model, self.url = found.groups()
                self._ready.set()
        self._ready.set()

    async def ready(self) -> None:
        """
        Raises:
            RuntimeError: it ended or took too long; with the end of its log.
        """
        try:
            await asyncio.wait_for(self._ready.wait(), START_SECONDS)
        except TimeoutError:
            said = "\n".join(self.log)
            raise RuntimeError(f"the server was not ready within {START_SECONDS:g} s:\n{said}") from None
        if not self.url:
            raise RuntimeError("the server did not start:\n" + "\n".join(self.log))

    def workers(self) -> list[int]:
        """Processes below the server's that run the model, and their spares; the eldest first."""
        return [pid for pid in process_tree(self.pid)[1:] if "worker.main" in _command(pid)]

    async def stop(self) -> int:
        """The exit code; -9 where it had to be killed."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()

    async def end(self) -> None:
        """Stop it.

        Raises:
            RuntimeError: it did not end with exit code 0; with the end of its log.
        """
        if code := await self.stop():
            raise RuntimeError(f"the server ended with exit code {code}:\n" + "\n".join(self.log))


@asynccontextmanager
async def starting_server(model: str | None, flags: Sequence[str]) -> AsyncIterator[OwnServer]:
    """A server from the start of its process; callers wait for its readiness themselves."""
    command = [sys.executable, "-m", "troupellm.server.cli.main", "serve", *([model] if model else [])]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--port",
        "0",
        "--disable-access-log",
        *flags,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    server = OwnServer(process)
    reading = asyncio.create_task(server.read_log())
    try:
        yield server
    finally:
        if server.running:
            process.kill()
        await process.wait()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


@asynccontextmanager
async def own_server(model: str | None, flags: Sequence[str]) -> AsyncIterator[OwnServer]:
    """Once it answers requests."""
    async with starting_server(model, flags) as server:
        await server.ready()
        yield server


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a stream, of long ones the beginning: the stream's own iterator fails where a line is too long."""
    held = b""
    while piece := await stream.read(_PIECE_BYTES):
        *ended, held = (held + piece).split(b"\n")
        for line in ended:
            yield line[:LINE_BYTES]
        held = held[:LINE_BYTES]
    if held:
        yield held


def process_tree(root: int) -> list[int]:
    """A process and everything below it."""
    pids = [root]
    for pid in pids:
        for thread in listing(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
                pids += [int(child) for child in children.read().split()]
    return pids


def processor_ticks(pid: int) -> int:
    """Processor time that a process has used; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except OSError:
        return 0


def listing(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return command.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
