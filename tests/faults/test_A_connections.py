"""Row A7 of the fault table: connections that say nothing, heads that come by drops, and more than have room."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import anyio
import pytest

from troupellm.tests.support.servers import canary
from troupellm.tests.support.servers.serving import eventually, http_request, running_server, server_config

pytestmark = pytest.mark.anyio

under_attack = partial(canary.under_attack, canary_tokens=24)
BODY = {"model": "tiny", "prompt": "x", "max_tokens": 1}
LONG_STREAM = {"model": "tiny", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}


async def test_A7_more_connections_than_may_be_close_the_longest_idle(tiny_engine):
    async with tiny_engine() as engine, running_server(engine, server_config(max_connections=4)) as served:
        streaming = await served.raw(http_request("/v1/completions", LONG_STREAM))
        await streaming.read_until(b"data: ")
        waiting = []
        for number in range(6):
            waiting.append(await served.raw(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"))
            await waiting[-1].read_until(b"alive")
            assert served.connections.dropped == max(0, number - 2)
        for connection in waiting[:3]:
            connection.seen = b""
            assert await connection.read_all() == b""
        await eventually(lambda: len(served.connections) == 4)
        await waiting[3].stream.send(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        waiting[3].seen = b""
        await waiting[3].read_until(b"alive")
        last = await served.raw(b"GET /livez HTT")
        waiting[4].seen = b""
        assert await waiting[4].read_all() == b"", "the other one was used later"
        await streaming.read_until(b"data: [DONE]")
        for connection in (*waiting, last, streaming):
            await connection.close()


async def test_A7_where_nobody_is_idle_there_is_no_room(tiny_engine):
    async with tiny_engine() as engine, running_server(engine, server_config(max_connections=1)) as served:
        streaming = await served.raw(http_request("/v1/completions", LONG_STREAM))
        await streaming.read_until(b"data: ")
        late = await served.raw(b"")
        assert await late.read_all() == b""
        assert served.connections.dropped == 1
        await streaming.read_until(b"data: [DONE]")
        for connection in (late, streaming):
            await connection.close()


@contextmanager
def room_for(descriptors: int) -> Iterator[None]:
    """Both ends of each connection are in this process, whose limit is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < descriptors:
        pytest.skip(f"a process may have {hard} descriptors here")
    if soft != resource.RLIM_INFINITY and soft < descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("idle", "seconds", "pause"), [(200, 1.0, 1), pytest.param(2_000, 15.0, 10, marks=pytest.mark.slow)]
)
async def test_A7_a_head_that_comes_by_drops_and_connections_that_say_nothing_are_ended(
    tiny_engine, idle, seconds, pause
):
    config = server_config(header_timeout=0.6 * seconds, keep_alive_timeout=seconds)
    with room_for(2 * idle + 1_000):
        async with tiny_engine() as engine, under_attack(engine, config) as attacked:
            silent = [await attacked.served.raw(b"") for _ in range(idle)]
            slow = await attacked.served.raw(b"GET /v1/models HT")

            async def drip() -> None:
                while True:
                    await attacked.more_short_answers(pause)
                    await slow.stream.send(b"x")

            with anyio.fail_after(10 + 2 * seconds):
                async with anyio.create_task_group() as group:
                    group.start_soon(drip)
                    seen = await slow.read_all(10 + seconds)
                    group.cancel_scope.cancel()
                assert seen.startswith(b"HTTP/1.1 408 ")
                assert json.loads(seen.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
                for connection in silent:
                    assert await connection.read_all() == b""
            assert attacked.served.connections.dropped == 0, "there was room for all of them"
            for connection in (*silent, slow):
                await connection.close()


@pytest.mark.slow
async def test_A7_a_slow_head_is_no_slow_request(tiny_engine):
    """The deadline is for the head alone: the time that an answer takes, and pauses between requests, do not count."""
    config = server_config(header_timeout=0.5)
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        for _ in range(3):
            connection = await attacked.served.raw(http_request("/v1/completions", BODY))
            await connection.read_until(b"text_completion")
            silent = await attacked.served.raw(b"GET /v1/models HT")
            assert (await silent.read_all()).startswith(b"HTTP/1.1 408 "), "the deadline of a head has passed"
            await silent.close()
            connection.seen = b""
            await connection.stream.send(http_request("/v1/completions", BODY))
            await connection.read_until(b"text_completion")
            await connection.close()
