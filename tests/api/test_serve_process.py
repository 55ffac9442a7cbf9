"""`troupellm serve` as a process: start, drain, exit codes."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import httpx
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from serving import events_of

pytestmark = pytest.mark.anyio

START_SECONDS = 60.0
QUESTION = {"model": "tiny", "prompt": "Once", "temperature": 0, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def served_process(model: str, *flags: str) -> AsyncIterator[tuple[anyio.abc.Process, str]]:
    """A running server process and its URL; killed at the end if it still runs."""
    command = [sys.executable, "-m", "troupellm.server.cli.main", "serve", model, "--port", "0", *flags]
    async with await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            lines = BufferedByteReceiveStream(process.stderr)
            with anyio.fail_after(START_SECONDS):
                while b"ready: " not in (line := await lines.receive_until(b"\n", 65_536)):
                    pass
            yield process, line.decode().split()[-1]
        finally:
            if process.returncode is None:
                process.kill()


async def text_of(url: str, tokens: int, started: anyio.Event, answers: dict[int, str]) -> None:
    request = QUESTION | {"max_tokens": tokens}
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=request) as response,
    ):
        assert response.status_code == 200
        pieces = []
        async for piece in response.aiter_text():
            pieces.append(piece)
            started.set()
    answers[tokens] = "".join(pieces)


async def test_sigterm_lets_short_streams_end_and_tells_long_ones(checkpoint):
    flags = ("--shutdown-timeout", "2", "--kv-cache-memory-bytes", "4MiB", "--num-threads", "1")
    answers: dict[int, str] = {}
    async with served_process(str(checkpoint), *flags) as (process, url):
        async with anyio.create_task_group() as group:
            for tokens in (60, 4000):
                started = anyio.Event()
                group.start_soon(text_of, url, tokens, started, answers)
                await started.wait()
            process.send_signal(signal.SIGTERM)
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                with anyio.fail_after(5):
                    while (ready := await client.get("/readyz")).status_code == 200:
                        pass
                refused = await client.post("/v1/completions", json=QUESTION)
        with anyio.fail_after(10):
            code = await process.wait()
    assert code == 0
    assert "reasons" in ready.json()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["connection"] == "close"
    assert events_of(answers[60])[-1]["choices"][0]["finish_reason"] == "length"
    last = events_of(answers[4000])[-1]
    assert last["error"]["type"] == "service_unavailable_error"


@pytest.mark.slow
async def test_second_signal_ends_the_drain(checkpoint):
    answers: dict[int, str] = {}
    async with served_process(str(checkpoint), "--shutdown-timeout", "60", "--num-threads", "1") as (process, url):
        async with anyio.create_task_group() as group:
            started = anyio.Event()
            group.start_soon(text_of, url, 4000, started, answers)
            await started.wait()
            process.send_signal(signal.SIGINT)
            await anyio.sleep(0.3)
            process.send_signal(signal.SIGINT)
        with anyio.fail_after(5):
            assert await process.wait() == 0
    assert "error" in events_of(answers[4000])[-1]


async def test_model_that_cannot_be_loaded_is_exit_code_3(tmp_path):
    command = [sys.executable, "-m", "troupellm.server.cli.main", "serve", str(tmp_path), "--port", "0"]
    with anyio.fail_after(START_SECONDS):
        result = await anyio.run_process(command, check=False)
    assert result.returncode == 3
    assert b"Traceback" not in result.stderr
    assert b"troupellm: " in result.stderr
