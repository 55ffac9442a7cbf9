"""Row A7 of the fault table: more connections than there is room for."""

import pytest
from serving import eventually, http_request, running_server, server_config

pytestmark = pytest.mark.anyio

LONG_STREAM = {"model": "tiny", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}


async def test_A7_more_connections_than_may_be_close_the_longest_idle(tiny_engine):
    async with tiny_engine() as engine, running_server(engine, server_config(max_connections=4)) as served:
        streaming = await served.raw(http_request("/v1/completions", LONG_STREAM))
        await streaming.read_until(b"data: ")
        waiting = []
        for number in range(6):
            waiting.append(await served.raw(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"))
            await waiting[-1].read_until(b"alive")
            assert served.crowd.dropped == max(0, number - 2)
        for connection in waiting[:3]:
            connection.seen = b""
            assert await connection.read_all() == b""
        await eventually(lambda: len(served.crowd) == 4)
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
        assert served.crowd.dropped == 1
        await streaming.read_until(b"data: [DONE]")
        for connection in (late, streaming):
            await connection.close()
