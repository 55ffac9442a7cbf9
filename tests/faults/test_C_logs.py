"""Row C10 of the fault table on the real server process: its log is not read while clients reset their connections."""

import socket
import struct

import anyio
import pytest

from troupellm.tests.support.servers.processes import ON_A_THREAD, ready_process

pytestmark = pytest.mark.anyio

RESETS = 60
"""Tracebacks of so many would fill a pipe three times."""
ABRUPT = struct.pack("ii", 1, 0)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BROKEN = (
    b"",
    HEAD + b'content-length: 100000\r\n\r\n{"a"',
    HEAD + b"transfer-encoding: chunked\r\n\r\nZZ\r\n",
    b"GET / HTTP/9\r\n\r\n",
)


def reset(port: int, sent: bytes) -> None:
    """Connect, send, and leave with a reset."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPT)
        client.sendall(sent)


async def test_C10_resets_do_not_stop_a_server_whose_log_is_not_read(checkpoint):
    async with ready_process(checkpoint, *ON_A_THREAD) as server, server.client() as client:
        server.stop_reading_log()
        for number in range(RESETS):
            await anyio.to_thread.run_sync(reset, server.port, BROKEN[number % len(BROKEN)])
        path = "/v1/" + "x" * 4000
        for _ in range(500):  # access lines, which fill the pipe and then the queue
            assert (await client.get(path)).status_code == 404
        for _ in range(RESETS):
            await anyio.to_thread.run_sync(reset, server.port, b"")
        with anyio.fail_after(20.0):
            assert (await client.get("/livez")).status_code == 200


async def test_C10_a_reset_connection_takes_one_line_at_most(checkpoint):
    async with ready_process(checkpoint, *ON_A_THREAD, "--disable-access-log") as server, server.client() as client:
        before = len(server.log)
        for number in range(RESETS):
            await anyio.to_thread.run_sync(reset, server.port, BROKEN[number % len(BROKEN)])
        assert (await client.get("/livez")).status_code == 200
        assert len(server.log) - before <= RESETS
        assert not server.logged("Traceback")
