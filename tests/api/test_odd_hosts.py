"""A server on hosts that lack what most have: descriptors, addresses, streams, a home, a compiler, shared memory."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio
import httpx
import pytest

from troupellm.tests.support.servers.processes import ServerProcess, free_port, ready_process
from troupellm.tests.support.servers.serving import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

_BLOCKING = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD})
os.execv(sys.executable, [sys.executable, "-m", "troupellm.server.cli.main", *sys.argv[1:]])
"""
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def inside(shell: str, program: str = _BLOCKING) -> tuple[str, ...]:
    """A command that runs the server behind a shell which has set its host up."""
    return "/bin/sh", "-c", f'{shell} exec "$@"', "sh", sys.executable, "-c", program


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def answers(server: ServerProcess) -> None:
    """A plain request and one under a guide, whose process has limits of its own, are answered."""
    async with server.client() as client:
        plain = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert plain.status_code == 200, plain.text
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "response_format": SCHEMA}
        guided = await client.post("/v1/chat/completions", json=body)
        assert guided.status_code == 200, guided.text


async def test_a_server_with_64_descriptors_limited_addresses_and_blocked_signals_serves_and_stops(
    checkpoint: Path,
) -> None:
    prefix = inside("ulimit -n 64; ulimit -v 33554432; exec <&- >&-;")
    async with ready_process(checkpoint, prefix=prefix) as server:
        assert server.logged("64 file descriptors are allowed (ulimit -n), which is enough for 24 connections")
        await answers(server)
        server.signal(signal.SIGTERM)
        assert await server.exit_code(30.0) == 0


async def test_a_server_without_home_and_compiler_says_what_is_slower(checkpoint: Path, tmp_path: Path) -> None:
    nowhere: Mapping[str, str] = {"HOME": "/proc/none", "PATH": str(tmp_path), "XDG_CACHE_HOME": "/proc/none/cache"}
    async with ready_process(checkpoint, environment=nowhere) as server:
        assert server.logged("there is no C++ compiler (g++)")
        await answers(server)


async def test_a_server_whose_standard_streams_are_all_closed_serves(checkpoint: Path) -> None:
    port = free_port()
    command = [*inside("exec <&- >&- 2>&-;"), "serve", str(checkpoint), "--port", str(port), "--num-threads", "1"]
    with subprocess.Popen([*command, "--kv-cache-memory-bytes", "4MiB", "--no-spare-worker"]) as process:
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:

                async def ready() -> bool:
                    try:
                        return (await client.get("/readyz")).status_code == 200
                    except httpx.TransportError:
                        return False

                with anyio.fail_after(60.0):
                    while not await ready():  # noqa: ASYNC110 - another process's state
                        await anyio.sleep(0.05)
                answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=30.0)
                assert answer.status_code == 200
            process.send_signal(signal.SIGHUP)
            assert await anyio.to_thread.run_sync(process.wait, 30.0) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("ignored", [False, True])
async def test_a_hang_up_drains_unless_it_is_ignored(checkpoint: Path, ignored: bool) -> None:
    async with ready_process(checkpoint, prefix=inside("trap '' HUP;" if ignored else "", _PLAIN)) as server:
        server.signal(signal.SIGHUP)
        server.signal(signal.SIGHUP)
        if ignored:
            await answers(server)
            server.signal(signal.SIGTERM)
        assert await server.exit_code(30.0) == 0


_PLAIN = _BLOCKING.replace("signal.pthread_sigmask", "# signal.pthread_sigmask")


async def test_files_are_for_their_owner_alone_whatever_the_mask(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    async with ready_process(checkpoint, "--files-dir", str(folder), prefix=inside("umask 000;", _PLAIN)) as server:
        async with server.client() as client:
            line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
            sent = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", line)})
            assert sent.status_code == 200, sent.text
            wanted = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            made = (await client.post("/v1/batches", json=wanted)).json()["id"]
            with anyio.fail_after(30.0):
                while (await client.get(f"/v1/batches/{made}")).json()["status"] != "completed":  # noqa: ASYNC110
                    await anyio.sleep(0.05)
        found = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
        assert len(found) > 4
        assert not {path: oct(mode) for path, mode in found.items() if mode != (0o700 if path.is_dir() else 0o600)}


async def test_a_spare_that_is_stopped_costs_no_two_minutes(checkpoint: Path) -> None:
    async with ready_process(checkpoint, spare=True) as server:
        spare = await server.with_spare()
        worker = server.workers()[0]
        os.kill(spare, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        await eventually(lambda: worker not in server.workers() and spare not in server.workers(), timeout=30.0)
        with anyio.fail_after(40.0):
            async with server.client() as client:
                while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - another process's state
                    await anyio.sleep(0.05)
        await answers(server)


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="needs a mount namespace",
)
async def test_a_server_without_shared_memory_serves(checkpoint: Path) -> None:
    prefix = ("unshare", "-m", *inside("mount -t tmpfs -o ro,size=4k none /dev/shm || exit 1;", _PLAIN))
    async with ready_process(checkpoint, prefix=prefix) as server:
        await answers(server)
