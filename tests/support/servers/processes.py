"""`troupellm serve` as a process of its own, with its log and its children, and what it may have left behind."""

import itertools
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc
import httpx
import psutil
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from troupellm.tests.support.clients.plain_http import NO_TLS

START_SECONDS = 60.0
SMALL = ("--kv-cache-memory-bytes", "4MiB", "--num-threads", "1", "--max-num-prefill-tokens", "512")
"""Flags that keep a server of the tiny model small and quick to start."""
NO_SPARE = ("--no-spare-worker",)
"""A spare process takes seconds of a core to import torch, for tests that do not kill its elder."""
ON_A_THREAD = ("--no-worker-process",)
MODES = [
    pytest.param((), id="default"),
    pytest.param(ON_A_THREAD, id="thread", marks=pytest.mark.slow),
    pytest.param(("--api-server-count", "2"), id="fronts", marks=pytest.mark.slow),
]
"""Flags of every arrangement of processes that a server can have."""
FIRST_PORT, FIRST_CLIENT_PORT = 10_000, 32_768
"""Ports of servers end where Linux begins to give ports to clients."""
_ports = itertools.count(97 * os.getpid())
_URL = re.compile(r"http://\S+?:(\d+)")


class ServerProcess:
    """A server that listens, and is perhaps still loading."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self.process = process
        self.pid = process.pid
        self.log: list[str] = []
        self.url = ""
        self.children: set[int] = set()
        """Every child seen so far; see `watch_children`."""
        self._ready = anyio.Event()
        self._reading = anyio.CancelScope()
        self._listening = anyio.Event()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def listening(self) -> None:
        with anyio.fail_after(START_SECONDS):
            await self._listening.wait()

    async def ready(self, seconds: float = START_SECONDS) -> None:
        with anyio.fail_after(seconds):
            await self._ready.wait()
        self.note_children()

    def client(self, *, timeout: float = 60.0, key: str | None = None) -> httpx.AsyncClient:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        options = {"base_url": self.url, "headers": headers, "timeout": timeout}
        return httpx.AsyncClient(**options, trust_env=False, verify=NO_TLS)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def exit_code(self, seconds: float) -> int:
        """Wait for the end; TimeoutError after `seconds`."""
        with anyio.fail_after(seconds):
            return await self.process.wait()

    def note_children(self) -> set[int]:
        """Remember the children that live now, so that they are found when their parent is gone."""
        try:
            self.children |= {child.pid for child in psutil.Process(self.pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            return self.children
        return self.children

    async def metric(self, name: str) -> float:
        """Sum of the samples of one metric; 0 when there is none."""
        async with self.client() as client:
            lines = (await client.get("/metrics")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    async def held(self, client: httpx.AsyncClient) -> list[str]:
        """Requests, blocks and messages that the server holds, as its metrics have them; none when it is idle."""
        text = (await client.get("/metrics")).text
        idle_at_zero = ("requests_running{", "requests_waiting{", "requests_open{", "actor_mailbox_depth{")
        prefixes = tuple(f"troupellm_{name}" for name in idle_at_zero)
        found = [line for line in text.splitlines() if line.startswith(prefixes) or 'state="used"' in line]
        held = [line for line in found if line.startswith("troupellm_") and float(line.split()[-1])]
        load = (await client.get("/load")).json()["server_load"]
        return [*held, f"server_load {load}"] if load else held

    async def until_idle(self, timeout: float = 20.0) -> None:
        with anyio.fail_after(timeout):
            async with self.client() as client:
                while await self.held(client):  # noqa: ASYNC110 - another process's state
                    await anyio.sleep(0.02)

    async def in_flight(self) -> float:
        """Requests that the server works on."""
        async with self.client() as client:
            return float((await client.get("/load")).json()["server_load"])

    async def until(self, read: Callable[[], Awaitable[float]], at_least: float, timeout: float = 20.0) -> None:
        """Until a number has been reached; fails with TimeoutError."""
        with anyio.fail_after(timeout):
            while await read() < at_least:  # noqa: ASYNC110 - another process's state
                await anyio.sleep(0.02)

    def workers(self) -> list[int]:
        """Processes that run the model, spares too; the one that computes comes first, since it is the oldest."""
        found = []
        for child in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.Error):  # it ends just now
                if any("worker.main" in word for word in child.cmdline()):
                    found.append((child.create_time(), child.pid))
        return [pid for _, pid in sorted(found)]

    async def with_spare(self) -> int:
        """Until a spare process stands beside the worker; its id."""
        with anyio.fail_after(START_SECONDS):
            while len(found := self.workers()) < 2:  # noqa: ASYNC110 - another process's state
                await anyio.sleep(0.05)
        return found[1]

    async def read_log(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        assert self.process.stderr is not None
        lines = BufferedByteReceiveStream(self.process.stderr)
        with self._reading:
            while True:
                try:
                    line = (await lines.receive_until(b"\n", 2**20)).decode(errors="replace")
                except (anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
                    return
                self.log.append(line)
                if "listening at" in line and (found := _URL.search(line)):
                    self.url = found.group(0)
                    self._listening.set()
                if "ready: " in line:
                    self._ready.set()

    def stop_reading_log(self) -> None:
        self._reading.cancel()

    def logged(self, text: str) -> list[str]:
        return [line for line in self.log if text in line]


@asynccontextmanager
async def serving_process(
    model: object,
    *flags: str,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    small: bool = True,
    spare: bool = False,
) -> AsyncIterator[ServerProcess]:
    """A server process, killed at the end if it still runs. Wait for `listening` or `ready` yourself.

    Args:
        prefix: a command that runs the server, such as an interpreter that sets limits first.
        spare: let it keep a spare worker process, as it does by itself.
    """
    module = [*prefix] or [sys.executable, "-m", "troupellm.server.cli.main"]
    own = (*(SMALL if small else ()), *(() if spare else NO_SPARE))
    command = [*module, "serve", str(model), "--port", str(port), *own, *flags]
    async with await anyio.open_process(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **(environment or {})}
    ) as process:
        server = ServerProcess(process)
        async with anyio.create_task_group() as group:
            await group.start(server.read_log)
            try:
                yield server
            finally:
                if process.returncode is None:
                    process.kill()
                with anyio.CancelScope(shield=True):
                    await process.wait()
                print("".join(["end of the server's log:\n", *server.log[-20:]]))
                group.cancel_scope.cancel()


@asynccontextmanager
async def ready_process(model: object, *flags: str, **options: object) -> AsyncIterator[ServerProcess]:
    """The same, once it answers requests."""
    async with serving_process(model, *flags, **options) as server:  # type: ignore[arg-type]
        await server.ready()
        yield server


def every_other(attempt: int) -> tuple[str, ...]:
    """Flags for one of many attempts: the even ones have the worker in a process, as servers do by themselves, the odd
    ones on a thread."""
    return ON_A_THREAD if attempt % 2 else ()


def free_port() -> int:
    """A port for a server that starts later. The kernel gives it to no client meanwhile, and this process only once."""
    for number in _ports:
        port = FIRST_PORT + number % (FIRST_CLIENT_PORT - FIRST_PORT)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable")


class Leftovers:
    """Things that a server may leave on the machine: shared memory and files in the folder for temporary ones."""

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._before = self._now()

    def new(self) -> set[str]:
        """New leftovers, without shared memory that another test uses or has just given up."""
        new = self._now() - self._before
        unused = {name for name in new if not (name.startswith("shm/") and _is_used(f"/dev/{name}"))}
        return unused & self._now()

    def _now(self) -> set[str]:
        shared = {f"shm/{name}" for name in os.listdir("/dev/shm")} if os.path.isdir("/dev/shm") else set()
        return shared | {str(path.relative_to(self._temporary)) for path in self._temporary.rglob("*")}


def _is_used(path: str) -> bool:
    for process in psutil.process_iter():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
            opened = [os.readlink(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:
            continue
        if path in maps or path in opened:
            return True
    return False


def alive(pids: set[int]) -> set[int]:
    """Those that still run; zombies have ended."""
    running = set()
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.add(pid)
        except psutil.NoSuchProcess:
            continue
    return running
