import json

import anyio
import pytest

from troupellm.protocol.errors import RequestAborted
from troupellm.server.base import errors
from troupellm.server.base.exchange import EVENTS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({"path": "/a", "raw_path": b"/a"}, b"/a"),
        ({"path": "/a", "raw_path": b"/a?x=1"}, b"/a"),
        ({"path": "/a/ü"}, "/a/ü".encode()),
        ({"path": "/../a", "raw_path": b"/%2e%2e/a"}, b"/%2e%2e/a"),
        ({"path": "x", "raw_path": b"http://host:1/v1/models?x=http://y/z"}, b"/v1/models"),
        ({"path": "x", "raw_path": b"HTTPS://host//health"}, b"//health"),
        ({"path": "x", "raw_path": b"http://host"}, b"/"),
        ({"path": "x", "raw_path": b"ftp://host/health"}, b"ftp://host/health"),
    ],
)
async def test_path_is_as_sent_and_that_of_an_absolute_form(make_wire, make_exchange, scope, expected):
    assert make_exchange(make_wire(), **scope).raw_path == expected


async def test_watch_cancels_when_the_client_leaves(make_wire, make_exchange):
    wire = make_wire()
    wire.messages = [{"type": "http.request", "body": b""}, {"type": "http.disconnect"}]
    exchange = make_exchange(wire)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.watch, group.cancel_scope)
            await anyio.sleep_forever()
    assert exchange.gone


async def test_disconnect_after_the_answer_is_not_a_lost_client(make_wire, make_exchange):
    wire = make_wire()
    exchange = make_exchange(wire)
    await exchange.respond(200, b"{}")
    wire.messages = [{"type": "http.disconnect"}]
    await exchange.watch(anyio.CancelScope())
    assert not exchange.gone


async def test_an_error_before_a_stream_is_the_answer_and_within_it_an_event_with_its_code(make_wire, make_exchange):
    told = errors.answer(RequestAborted("late"))
    for begun in (False, True):
        wire = make_wire()
        exchange = make_exchange(wire)
        if begun:
            await exchange.start(200, EVENTS)
        await exchange.respond_error(told)
        if begun:
            event, end, _ = wire.body.split(b"\n\n")
            assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "late (request_aborted)"
            assert end == b"data: [DONE]"
        else:
            assert wire.sent[0]["status"] == 503
            assert json.loads(wire.body)["error"]["message"] == "late"


async def test_head_has_the_length_and_no_body(make_wire, make_exchange):
    wire = make_wire()
    await make_exchange(wire, method="HEAD").respond(200, b"{}")
    assert wire.headers()[b"content-length"] == b"2"
    assert wire.body == b""
