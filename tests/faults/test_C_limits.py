"""Rows C9 and C10 of the fault table: no descriptors or threads left, and a log whose reader has stopped."""

import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import anyio
import psutil
import pytest

from troupellm.actors.metrics.actor import MetricsSink
from troupellm.server.observe.log_writer import CAPACITY
from troupellm.tests.support.clients.sockets import raw_socket
from troupellm.tests.support.servers.canary import beside_canaries, under_attack
from troupellm.tests.support.servers.processes import ON_A_THREAD, ready_process
from troupellm.tests.support.servers.serving import eventually

pytestmark = pytest.mark.anyio

ODD = (sys.executable, str(Path(__file__).parents[1] / "support" / "servers" / "odd_server.py"))
SHORT = {"model": "tiny", "prompt": "Once", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
BURST = 50
SPARE = 12
"""Descriptors that a server short of them has beside those in use."""
THREAD_IS_QUICK = pytest.mark.parametrize(
    "flags", [ON_A_THREAD, pytest.param((), marks=pytest.mark.slow)], ids=["thread", "default"]
)


@THREAD_IS_QUICK
async def test_C9_a_server_out_of_descriptors_accepts_again_later(checkpoint, flags):
    """The accept loop survives and resumes; connections that are open go on, which the canaries' are."""
    async with (
        ready_process(checkpoint, *flags) as server,
        beside_canaries(server) as canaries,
        server.client() as kept,
    ):
        assert (await kept.post("/v1/completions", json=SHORT)).status_code == 200
        process = psutil.Process(server.pid)
        _, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        before = process.num_fds()
        process.rlimit(psutil.RLIMIT_NOFILE, (before + SPARE, hard))
        with ExitStack() as stack:
            for _ in range(SPARE * 4):
                stack.enter_context(await raw_socket(server.port))
            with anyio.fail_after(10):
                while process.num_fds() < before + SPARE - 2:  # noqa: ASYNC110 - another process's state
                    await anyio.sleep(0.02)
            for _ in range(3):
                assert (await kept.post("/v1/completions", json=SHORT)).status_code == 200
                await canaries.more_short_answers(3)
            assert process.num_fds() < before + 2 * SPARE, "the limit did not bite"
        with anyio.fail_after(10):
            while process.num_fds() > before + 2:  # noqa: ASYNC110 - another process's state
                await anyio.sleep(0.02)
        async with server.client() as fresh:
            assert (await fresh.post("/v1/completions", json=SHORT)).status_code == 200
        process.rlimit(psutil.RLIMIT_NOFILE, (hard, hard))


@THREAD_IS_QUICK
async def test_C9_a_server_out_of_threads_refuses_and_recovers(checkpoint, tmp_path, flags):
    """Existing threads go on; requests that need a new one are refused for the moment, and work again later."""
    none_left = tmp_path / "none-left"
    large = SHORT | {"prompt": "x" * 200_000}
    long_prompt = SHORT | {"prompt": "y" * 3000}
    async with (
        ready_process(checkpoint, *flags, prefix=ODD, environment={"ODD_NO_THREADS": str(none_left)}) as server,
        beside_canaries(server),
        server.client() as client,
    ):
        none_left.touch()
        refused = await client.post("/v1/completions", json=large)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert "retry-after" in refused.headers
        assert (await client.post("/v1/completions", json=long_prompt)).status_code == 200
        none_left.unlink()
        too_long = await client.post("/v1/completions", json=large)
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(("form", "lines"), [("text", 200), pytest.param("json", CAPACITY, marks=pytest.mark.slow)])
async def test_C10_a_log_that_nobody_reads(checkpoint, form, lines):
    """Standard error is a pipe that is soon full: no request waits for it, nor does the end of the process."""
    environment = {"ODD_LOG_LINES": str(lines)}
    unknown = b"GET /v1/" + b"nothing" * 30 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with ready_process(checkpoint, "--log-format", form, prefix=ODD, environment=environment) as server:
        assert server.workers()
        async with beside_canaries(server, canary_tokens=20):
            server.stop_reading_log()
            with await raw_socket(server.port) as client:
                asked = 0
                while await server.metric("troupellm_log_lines_dropped_total") < 100:
                    await client.send(unknown * BURST)
                    asked += BURST
                    while client.seen.count(b"HTTP/1.1 404 ") < asked:
                        assert await client.read()
        server.signal(signal.SIGTERM)
        assert await server.exit_code(3) == 0


async def test_C10_metrics_that_nobody_takes_are_dropped_and_counted(tiny_engine, monkeypatch):
    blocked = anyio.Event()

    async def never_takes(sink, *, task_status=anyio.TASK_STATUS_IGNORED):
        task_status.started()
        await blocked.wait()
        await run(sink)

    run = MetricsSink.run
    monkeypatch.setattr(MetricsSink, "run", never_takes)
    async with tiny_engine() as engine, under_attack(engine, canary_tokens=30):
        capacity = next(a.mailboxes[0].capacity for a in engine.snapshot().actors if a.name == "metrics")
        while _dropped(engine) == 0:
            completion = await engine.generate("Once", max_tokens=capacity // 4, temperature=0.0, ignore_eos=True)
            assert completion.usage.completion_tokens == capacity // 4
        text = (await engine.metrics(compat=False)).decode()
        assert re.search(r'troupellm_actor_mailbox_dropped_total{.*actor="metrics".*} [1-9]', text)
        blocked.set()
        await eventually(lambda: _depth(engine) == 0)


def _dropped(engine) -> int:
    return next(actor.mailboxes[0].dropped for actor in engine.snapshot().actors if actor.name == "metrics")


def _depth(engine) -> int:
    return next(actor.mailboxes[0].depth for actor in engine.snapshot().actors if actor.name == "metrics")
