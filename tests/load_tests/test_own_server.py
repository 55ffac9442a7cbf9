"""Servers of benchmarks: their log is read to its end, for every output."""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from troupellm.load_tests.traffic import own_server
from troupellm.load_tests.traffic.own_server import LINE_BYTES, OwnServer, lines_of

CHILD = "import sys; sys.stderr.write('x' * 300_000 + '\\nready: tiny at http://127.0.0.1:1\\n' + 'last')"


async def read(*pieces: bytes) -> list[bytes]:
    stream = asyncio.StreamReader()
    for piece in pieces:
        stream.feed_data(piece)
    stream.feed_eof()
    return [line async for line in lines_of(stream)]


def test_lines_come_whole_however_they_arrive() -> None:
    assert asyncio.run(read(b"a\nb", b"c\n", b"\n", b"d")) == [b"a", b"bc", b"", b"d"]
    assert asyncio.run(read(b"a\n")) == [b"a"]
    assert asyncio.run(read()) == []


def test_of_a_long_line_the_beginning_is_kept_and_the_next_one_is_whole() -> None:
    first, second, third = asyncio.run(read(b"begin" + b"x" * 300_000, b"\nnext\n", b"y" * LINE_BYTES * 3))
    assert first == b"begin" + b"x" * (LINE_BYTES - 5)
    assert second == b"next"
    assert third == b"y" * LINE_BYTES


def test_a_server_that_logs_a_very_long_line_becomes_ready() -> None:
    async def follow() -> OwnServer:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, stderr=asyncio.subprocess.PIPE)
        server = OwnServer(process)
        await asyncio.gather(server.read_log(), server.ready())
        await process.wait()
        return server

    server = asyncio.run(follow())
    assert (server.model, server.url) == ("tiny", "http://127.0.0.1:1")
    assert [line[:5] for line in server.log] == ["xxxxx", "ready", "last"]


def test_a_server_that_does_not_become_ready_shows_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_server, "START_SECONDS", 0.01)
    process: Any = SimpleNamespace(pid=1, returncode=None)

    async def wait() -> None:
        server = OwnServer(process)
        server.log = ["loading", "still loading"]
        await server.ready()

    with pytest.raises(RuntimeError, match="(?s)not ready within 0.01 s:.*still loading"):
        asyncio.run(wait())
