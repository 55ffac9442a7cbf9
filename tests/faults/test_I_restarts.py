"""Rows I6 and I7 of the fault table: many starts and stops, and a rolling restart behind a proxy."""

import signal
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import anyio.abc
import httpx
import openai
import psutil
import pytest

from troupellm.tests.support.clients.plain_http import NO_TLS
from troupellm.tests.support.servers.processes import (
    MODES,
    ON_A_THREAD,
    Leftovers,
    ServerProcess,
    alive,
    free_port,
    ready_process,
)

pytestmark = pytest.mark.anyio

SHORT = {"model": "tiny", "prompt": "Once", "max_tokens": 3, "temperature": 0, "extra_body": {"ignore_eos": True}}
PROBE_SECONDS = 0.05
GONE_SECONDS = 2.0
WITH_SPARE = 0.1
"""Of the cycles, which share ends when a spare process stands by too; it is born a second after a server is ready."""


@pytest.mark.parametrize("flags", MODES)
@pytest.mark.parametrize("cycles", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_I6_a_server_that_starts_and_stops_leaves_nothing_behind(checkpoint, tmp_path, cycles, flags):
    environment = {"TMPDIR": str(tmp_path)}
    port, leftovers, starts = free_port(), Leftovers(tmp_path), []
    for cycle in range(cycles):
        async with ready_process(checkpoint, *flags, port=port, environment=environment, spare=True) as server:
            used = psutil.Process(server.pid).cpu_times()
            starts.append(used.user + used.system)
            if cycle >= cycles - max(1, WITH_SPARE * cycles) and flags != ON_A_THREAD:
                await server.with_spare()
            children = server.note_children()
            hard = cycle % 2 == 0
            server.signal(signal.SIGKILL if hard else signal.SIGTERM)
            assert await server.exit_code(5) == (-signal.SIGKILL if hard else 0)
            with anyio.fail_after(GONE_SECONDS):
                while alive(children):  # noqa: ASYNC110 - other processes' state
                    await anyio.sleep(0.01)
        assert leftovers.new() == set()
    half = len(starts) // 2
    first, second = statistics.median(starts[:half]), statistics.median(starts[half:])
    print(f"processor time of a start: first half {first:.2f} s, second half {second:.2f} s")
    assert second < 3 * first + 1


class Proxy:
    """Hands each new connection to the next instance that calls itself ready, byte by byte, and repairs nothing."""

    def __init__(self) -> None:
        self.url = ""
        self._instances: dict[int, bool] = {}
        self._turn = 0
        self._busy = 0

    def add(self, port: int) -> None:
        self._instances[port] = False

    def ready(self) -> int:
        return sum(self._instances.values())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            self.url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
            async with anyio.create_task_group() as group:
                group.start_soon(self._probe)
                group.start_soon(listener.serve, self._connected)
                yield
                group.cancel_scope.cancel()

    async def _probe(self) -> None:
        async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=2) as client:
            while True:
                for port in list(self._instances):  # others come while a probe is waited for
                    try:
                        answer = await client.get(f"http://127.0.0.1:{port}/readyz")
                        self._instances[port] = answer.status_code == 200
                    except httpx.HTTPError:
                        self._instances[port] = False
                await anyio.sleep(PROBE_SECONDS)

    async def _connected(self, client: anyio.abc.SocketStream) -> None:
        async with client:
            ready = [port for port, is_ready in self._instances.items() if is_ready]
            if not ready:
                return
            self._turn += 1
            try:
                server = await anyio.connect_tcp("127.0.0.1", ready[self._turn % len(ready)])
            except OSError:
                return
            async with server, anyio.create_task_group() as group:
                group.start_soon(_copy, client, server, group.cancel_scope)
                group.start_soon(_copy, server, client, group.cancel_scope)


async def _copy(source: anyio.abc.SocketStream, sink: anyio.abc.SocketStream, over: anyio.CancelScope) -> None:
    try:
        while True:
            await sink.send(await source.receive())
    except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
        over.cancel()


class Clients:
    """The official client with its two retries, in several loops; `ends` counts how each call ended."""

    def __init__(self, url: str) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=2,
            http_client=httpx.AsyncClient(trust_env=False, verify=NO_TLS),
        )
        self.ends: Counter[str] = Counter()
        self.over = False

    async def ask(self) -> None:
        while not self.over:
            answer = await self._client.completions.create(**SHORT)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 3
            self.ends["answer"] += 1
            await anyio.sleep(0.02)

    async def stream(self) -> None:
        while not self.over:
            finished = False
            try:
                async for event in await self._client.completions.create(**SHORT | {"max_tokens": 400}, stream=True):
                    finished = finished or event.choices[0].finish_reason == "length"
                assert finished, "a stream was silently short"
                self.ends["stream"] += 1
            except openai.APIError as error:
                typed = (error.code, error.type) == ("draining", "service_unavailable_error")
                if not typed:
                    raise
                self.ends["typed error"] += 1

    async def close(self) -> None:
        await self._client.close()


class Instance:
    """A server in a task of its own, since instances end in no order."""

    def __init__(self, checkpoint: object, flags: tuple[str, ...], port: int, group: anyio.abc.TaskGroup) -> None:
        self._checkpoint = checkpoint
        self._flags = ("--shutdown-timeout", "1", *flags)
        self._port = port
        self._group = group
        self._server: ServerProcess | None = None

    async def start(self) -> None:
        self._server = await self._group.start(self._run)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.signal(signal.SIGTERM)
        assert await self._server.exit_code(1 + GONE_SECONDS + 1) == 0

    async def _run(self, *, task_status: anyio.abc.TaskStatus[ServerProcess]) -> None:
        async with ready_process(self._checkpoint, *self._flags, port=self._port) as server:
            task_status.started(server)
            await server.process.wait()


@pytest.mark.parametrize(
    ("restarts", "flags"),
    [(1, ON_A_THREAD), pytest.param(6, (), marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
async def test_I7_a_rolling_restart_fails_no_request(checkpoint, restarts, flags):
    """Once with the model on a thread, which starts sooner; many times as servers are by default."""
    proxy, ports = Proxy(), (free_port(), free_port())
    async with proxy.running(), anyio.create_task_group() as servers, AsyncExitStack() as stack:
        stack.callback(servers.cancel_scope.cancel)
        instances = [Instance(checkpoint, flags, port, servers) for port in ports]
        for instance, port in zip(instances, ports, strict=True):
            await instance.start()
            proxy.add(port)
        clients = Clients(proxy.url)
        stack.push_async_callback(clients.close)
        await _until(lambda: proxy.ready() == 2)
        async with anyio.create_task_group() as group:
            for loop in (clients.ask, clients.ask, clients.stream, clients.stream):
                group.start_soon(loop)
            for number in range(restarts):
                asked = clients.ends["answer"]
                await _until(lambda before=asked: clients.ends["answer"] > before + 5)
                await instances[number % 2].stop()
                await instances[number % 2].start()
                await _until(lambda: proxy.ready() == 2)
            clients.over = True
        print(dict(clients.ends))
    assert clients.ends["answer"] > 5 * restarts


async def _until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not condition():  # noqa: ASYNC110 - other processes' state
            await anyio.sleep(0.01)
