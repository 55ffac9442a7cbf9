"""Servers with several front processes, and connections to a chosen one of them."""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import anyio
import psutil

from troupellm.tests.support.clients.sockets import RawSocket, raw_socket
from troupellm.tests.support.servers.processes import ServerProcess, ready_process
from troupellm.tests.support.servers.serving import http_request


async def until(read: Callable[[], Awaitable[object]], timeout: float = 20.0) -> None:
    """Until another process's state is as wanted; fails with TimeoutError."""
    with anyio.fail_after(timeout):
        while not await read():  # noqa: ASYNC110 - plain numbers without change events
            await anyio.sleep(0.01)


class Fronts:
    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.key = ""
        """For `get` and `metric`."""

    @property
    def pids(self) -> list[int]:
        return sorted(child.pid for child in psutil.Process(self.server.pid).children() if _is_front(child))

    @contextmanager
    def only(self, pid: int) -> Iterator[None]:
        """New connections are served by this front meanwhile: the others are stopped."""
        others = [other for other in self.pids if other != pid]
        for other in others:
            os.kill(other, signal.SIGSTOP)
        try:
            yield
        finally:
            for other in others:
                os.kill(other, signal.SIGCONT)

    async def connect(self, pid: int, request: bytes, receive_buffer: int | None = None) -> RawSocket:
        """A connection to this front, which has begun to answer."""
        with self.only(pid):
            connection = await raw_socket(self.server.port, request, receive_buffer=receive_buffer)
            await connection.read_until(b"\r\n\r\n")
        return connection

    async def get(self, pid: int, path: str) -> tuple[int, str]:
        """Status and body of what this front answers."""
        key = f"authorization: Bearer {self.key}\r\n" if self.key else ""
        request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{key}connection: close\r\n\r\n".encode()
        with await self.connect(pid, request) as connection:
            whole = await connection.read_all()
        head, _, body = whole.partition(b"\r\n\r\n")
        return int(head.split()[1]), body.decode()

    async def metric(self, pid: int, name: str, *labels: str) -> float:
        """Sum of the samples of one metric with these labels, as one front tells it."""
        _, text = await self.get(pid, "/metrics")
        return sum(
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith((f"{name} ", f"{name}{{")) and all(label in line for label in labels)
        )

    async def stream(self, pid: int, receive_buffer: int | None = None, **fields: object) -> RawSocket:
        """A completion that streams from this front; it has begun."""
        body = {"model": "tiny", "prompt": "Once", "temperature": 0, "ignore_eos": True, "stream": True} | fields
        return await self.connect(pid, http_request("/v1/completions", body, connection="close"), receive_buffer)

    async def back(self, number: int, without: int, timeout: float = 20.0) -> None:
        """Until so many fronts answer, none of which is `without`."""

        async def all_there() -> bool:
            pids = self.pids
            return len(pids) == number and without not in pids

        await until(all_there, timeout)
        for pid in self.pids:
            await until(partial(self._ready, pid), timeout)

    async def _ready(self, pid: int) -> bool:
        return (await self.get(pid, "/readyz"))[0] == 200


def _is_front(process: psutil.Process) -> bool:
    try:
        return any("api_processes.main" in word for word in process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return False


@asynccontextmanager
async def fronts_process(model: object, *flags: str, count: int = 2, **options: object) -> AsyncIterator[Fronts]:
    async with ready_process(model, "--api-server-count", str(count), *flags, **options) as server:
        yield Fronts(server)
