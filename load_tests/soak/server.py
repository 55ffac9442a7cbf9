"""The server under the soak: a process of its own, and what can be seen of it from outside."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import msgspec

START_SECONDS = 120.0
STOP_SECONDS = 40.0
IDLE_SECONDS = 60.0
SETTLED_SECONDS = 3.0
"""Tasks of connections end a little after their last byte: they are counted when their number has stayed so long."""
MEBIBYTE = 2**20
_READY = re.compile(r"ready: (\S+) at (http://\S+)")
_KEPT_LINES = 200


class Held(msgspec.Struct, frozen=True):
    """What an idle server holds."""

    descriptors: int
    tasks: int
    threads: int
    blocks: int
    requests: int
    messages: int


class SoakServer:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
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
        async for line in self._process.stderr:
            text = line.decode(errors="replace").rstrip()
            self.log = [*self.log[-_KEPT_LINES:], text]
            if found := _READY.search(text):
                self.model, self.url = found.groups()
                self._ready.set()
        self._ready.set()

    async def ready(self) -> None:
        await asyncio.wait_for(self._ready.wait(), START_SECONDS)
        if not self.url:
            raise RuntimeError("the server did not start:\n" + "\n".join(self.log))

    def workers(self) -> list[int]:
        """Processes below the server's that run the model, and their spares."""
        return [pid for pid in _tree(self._process.pid)[1:] if "worker_main" in _command(pid)]

    def resident_mebibytes(self) -> float:
        """Of all processes together."""
        return sum(_resident(pid) for pid in _tree(self._process.pid)) / MEBIBYTE

    async def held(self) -> Held:
        """Once it is idle, or has not become so for `IDLE_SECONDS`."""
        due = (settled := time.monotonic()) + IDLE_SECONDS
        tasks = -1.0
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
            while True:
                metrics = _sums((await client.get("/metrics")).text)
                requests = metrics["requests_running"] + metrics["requests_waiting"] + metrics["requests_open"]
                blocks, messages = metrics["kv_blocks_used"], metrics["actor_mailbox_depth"]
                now = time.monotonic()
                if requests + blocks + messages or metrics["tasks"] != tasks:
                    settled, tasks = now, metrics["tasks"]
                if now - settled > SETTLED_SECONDS or now > due:
                    break
                await asyncio.sleep(0.2)
            pids = _tree(self._process.pid)
            return Held(
                descriptors=sum(_count(pid, "fd") for pid in pids),
                tasks=int(metrics["tasks"]),
                threads=sum(_count(pid, "task") for pid in pids),
                blocks=int(blocks),
                requests=int(requests),
                messages=int(messages),
            )

    async def stop(self) -> int:
        """The exit code; -9 where it had to be killed."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()


@asynccontextmanager
async def soak_server(model: str | None, flags: Sequence[str]) -> AsyncIterator[SoakServer]:
    command = [sys.executable, "-m", "troupellm.server.cli.main", "serve", *([model] if model else [])]
    process = await asyncio.create_subprocess_exec(
        *command, "--port", "0", "--disable-access-log", *flags,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    server = SoakServer(process)
    reading = asyncio.create_task(server.read_log())
    try:
        await server.ready()
        yield server
    finally:
        if server.running:
            process.kill()
        await process.wait()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


def _sums(text: str) -> dict[str, float]:
    """Sums over the samples of each metric that `held` looks at."""
    sums = dict.fromkeys(
        ("requests_running", "requests_waiting", "requests_open", "kv_blocks_used", "actor_mailbox_depth", "tasks"), 0.0
    )
    for line in text.splitlines():
        if line.startswith("troupellm_"):
            name = line.removeprefix("troupellm_").partition("{")[0]
            name = "kv_blocks_used" if name == "kv_blocks" and 'state="used"' in line else name
            if name in sums:
                sums[name] += float(line.split()[-1])
    return sums


def _tree(root: int) -> list[int]:
    """A process and everything below it."""
    pids = [root]
    for pid in pids:
        for thread in _listing(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
                pids += [int(child) for child in children.read().split()]
    return pids


def _listing(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _count(pid: int, kind: str) -> int:
    return len(_listing(f"/proc/{pid}/{kind}"))


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return command.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
