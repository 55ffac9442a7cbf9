"""Pieces of streamed answers over a real socket: written as they come while their client reads."""

import gc
import weakref
from typing import Any

import anyio
import pytest
from hypercorn.protocol.http_stream import HTTPStream
from serving import running_server, server_config

from troupellm.actors.client.stream import Stream
from troupellm.server.base.exchange import Exchange
from troupellm.server.http.connection import Connection

pytestmark = pytest.mark.anyio

TOKENS = 60
ASKED = {"model": "tiny", "temperature": 0, "ignore_eos": True}
TALK = [{"role": "user", "content": "Hi"}]
ROUTES = {
    "/v1/completions": {"prompt": "Once", "max_tokens": TOKENS},
    "/v1/chat/completions": {"messages": TALK, "max_tokens": TOKENS},
    "/v1/responses": {"input": "Hi", "max_output_tokens": TOKENS},
    "/v1/messages": {"messages": TALK, "max_tokens": TOKENS},
}


class Ways:
    """How many pieces of bodies went which way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.swift = self.usual = 0
        write_chunk, app_send = Connection.write_chunk, HTTPStream.app_send

        def written(connection: Connection, data: bytes) -> None:
            self.swift += 1
            write_chunk(connection, data)

        async def sent(stream: HTTPStream, message: Any) -> None:
            self.usual += bool(message is not None and message.get("body"))
            await app_send(stream, message)

        monkeypatch.setattr(Connection, "write_chunk", written)
        monkeypatch.setattr(HTTPStream, "app_send", sent)


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """An entry for each time that the task of a stream was woken for pieces."""
    woken: list[object] = []
    wake = Stream.wake

    def watched(stream: Stream) -> Any:
        woken.append(None)
        return wake(stream)

    monkeypatch.setattr(Stream, "wake", watched)
    return woken


@pytest.mark.parametrize("route", ROUTES)
async def test_a_reader_s_task_sleeps_through_its_answer(tiny_engine, monkeypatch, tasks, route):
    ways = Ways(monkeypatch)
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        response = await client.post(route, json={**ASKED, **ROUTES[route], "stream": True})
        assert response.status_code == 200, response.text
    assert ways.swift >= TOKENS // 4, "a quick engine has several tokens for a piece"
    assert ways.usual <= 2
    assert len(tasks) < TOKENS // 4


@pytest.mark.parametrize("route", ROUTES)
async def test_an_answer_leaves_no_garbage_that_holds_its_request(tiny_engine, monkeypatch, route):
    held: weakref.WeakSet[Any] = weakref.WeakSet()
    for kind in (Exchange, Stream):
        monkeypatch.setattr(kind, "__init__", _noted(kind.__init__, held))
    config = server_config(sse_keep_alive_interval=0)  # a task that is cancelled is garbage of its own
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        await client.post(route, json={**ASKED, **ROUTES[route], "stream": True})  # what is made once is made
        gc.collect()
        gc.disable()
        try:
            held.clear()
            response = await client.post(route, json={**ASKED, **ROUTES[route], "stream": True})
            assert response.status_code == 200
            await anyio.wait_all_tasks_blocked()
            assert list(held) == []
        finally:
            gc.enable()


def _noted(init: Any, held: "weakref.WeakSet[Any]") -> Any:
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        held.add(self)
        init(self, *args, **kwargs)

    return noting
