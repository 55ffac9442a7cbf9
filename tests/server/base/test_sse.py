import json

import anyio
import pytest

from troupellm.protocol.errors import RequestFailed
from troupellm.server.base.errors import ClientGone, answer, not_ready
from troupellm.server.base.exchange import CHUNKS, SWIFT_SENDS
from troupellm.server.base.sse import DONE, KEEP_ALIVE, ChunkEncoder, EventStream, event, open_events

pytestmark = pytest.mark.anyio


def encoder(*, include_usage: bool = False) -> ChunkEncoder:
    return ChunkEncoder(
        response_id="chatcmpl-1",
        kind="chat.completion.chunk",
        created=7,
        model="100%d/naïve",
        include_usage=include_usage,
        text_before=b'"delta":{"content":',
        text_after=b'},"logprobs":null,"finish_reason":null',
    )


def payload(chunk: bytes) -> dict:
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    assert chunk.count(b"\n") == 2
    return json.loads(chunk[6:])


@pytest.mark.parametrize("text", ["plain", 'quotes " and \\', "line\nbreak\r\n", "ünïcödé 🎭 \u2028", "\x00"])
def test_text_chunk_is_one_line_of_json(text):
    chunk = payload(encoder().text(3, text))
    assert chunk == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "100%d/naïve",
        "choices": [{"index": 3, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
    }


def test_usage_is_null_on_every_chunk_but_the_extra_one():
    chunks = encoder(include_usage=True)
    assert payload(chunks.text(0, "x"))["usage"] is None
    assert payload(chunks.choice({"index": 0}, fingerprint="f"))["usage"] is None
    last = payload(chunks.usage({"total_tokens": 3}, fingerprint="f"))
    assert (last["choices"], last["usage"], last["system_fingerprint"]) == ([], {"total_tokens": 3}, "f")


def test_fingerprint_only_where_asked():
    assert "system_fingerprint" not in payload(encoder().choice({"index": 0}))
    assert payload(encoder().choice({"index": 0}, fingerprint="f"))["system_fingerprint"] == "f"


async def test_stream_has_the_headers_and_ends_with_done(make_wire, make_exchange):
    wire = make_wire()
    async with open_events(make_exchange(wire), 0) as events:
        await events.send(event({"a": 1}))
        await events.finish(event({"b": 2}))
    assert wire.headers() == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"x-request-id": b"test-id",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
    }
    assert wire.body == b'data: {"a":1}\n\ndata: {"b":2}\n\n' + DONE
    assert len(wire.sent) == 3
    assert wire.sent[-1]["more_body"] is False


@pytest.mark.parametrize("text", ["a\u2028b", "\u2029", "\x85é\u0085", "\v\f\x1c\x1d\x1e\r\n", "…\u2027\u202a"])
async def test_a_reader_that_splits_lines_gets_whole_events(make_wire, make_exchange, text):
    wire = make_wire()
    async with open_events(make_exchange(wire), 0) as events:
        await events.send(encoder().text(0, text))
        await events.finish(event({"text": text}))
    first, second, done, _ = wire.body.decode().split("\n\n")
    assert wire.body.decode().splitlines() == [first, "", second, "", done, ""]
    assert json.loads(first[6:])["choices"][0]["delta"]["content"] == text
    assert json.loads(second[6:]) == {"text": text}


async def test_whole_answers_keep_their_bytes_and_length(make_wire, make_exchange):
    wire = make_wire()
    body = '{"text":"\u2028"}'.encode()
    await make_exchange(wire).respond(200, body)
    assert (wire.body, wire.headers()[b"content-length"]) == (body, str(len(body)).encode())


async def test_silence_is_filled_with_comments_of_one_line(make_wire, make_exchange):
    wire = make_wire()
    async with open_events(make_exchange(wire), 0.001) as events:
        with anyio.fail_after(5):
            while wire.body.count(KEEP_ALIVE) < 3:
                await anyio.lowlevel.checkpoint()
        await events.finish(b"")
    assert KEEP_ALIVE == b": keep-alive\n"
    assert wire.body.replace(KEEP_ALIVE, b"") == DONE


async def test_error_after_the_start_is_an_event_and_done(make_wire, make_exchange):
    wire = make_wire()
    exchange = make_exchange(wire)
    async with open_events(exchange, 0) as events:
        await events.send(b"")
    refusal = answer(not_ready("gone", code="draining"))
    await exchange.respond_error(refusal)
    error, done = wire.body.removeprefix(b"data: ").split(b"\n\n", 1)
    assert json.loads(error)["error"] == json.loads(refusal.body)["error"] | {"message": "gone (draining)"}
    assert done == DONE
    assert wire.sent[-1]["more_body"] is False
    assert wire.sent[0]["status"] == 200


async def test_nothing_is_said_before_the_first_piece_so_that_an_error_has_its_own_status(make_wire, make_exchange):
    wire = make_wire()
    exchange = make_exchange(wire)

    async def fail() -> None:
        async with open_events(exchange, 60):
            await anyio.lowlevel.checkpoint()
            assert wire.sent == []
            raise RequestFailed("the row failed")

    with pytest.raises(ExceptionGroup):
        await fail()
    await exchange.respond_error(answer(RequestFailed("the row failed")))
    assert wire.sent[0]["status"] == 500
    assert b"application/json" in wire.headers()[b"content-type"]


async def test_a_long_wait_starts_the_response_with_a_comment(make_wire, make_exchange):
    wire = make_wire()
    exchange = make_exchange(wire)
    async with open_events(exchange, 0.01):
        with anyio.fail_after(5):
            while not wire.body:
                await anyio.lowlevel.checkpoint()
    assert wire.sent[0]["status"] == 200
    assert wire.body.startswith(KEEP_ALIVE)


async def test_error_before_the_start_has_its_own_status(make_wire, make_exchange):
    wire = make_wire()
    await make_exchange(wire).respond_error(answer(not_ready("gone", code="draining", close=True)))
    assert wire.sent[0]["status"] == 503
    assert wire.headers()[b"connection"] == b"close"
    assert b"retry-after" in wire.headers()


async def test_reader_that_stalls_past_the_write_timeout_is_gone(make_wire, make_exchange):
    wire = make_wire()
    exchange = make_exchange(wire)
    await exchange.start(200, b"text/plain")
    wire.stalled = True
    with pytest.raises(ClientGone):
        await exchange.write(b"x")
    assert exchange.gone
    with pytest.raises(ClientGone):
        await exchange.write(b"y")


async def test_sends_that_wait_for_nobody_let_others_run(make_wire, make_exchange):
    ran = False

    async def other() -> None:
        nonlocal ran
        ran = True

    exchange = make_exchange(make_wire())
    await exchange.start(200, b"text/plain")
    async with anyio.create_task_group() as group:
        group.start_soon(other)
        for _ in range(SWIFT_SENDS):
            await exchange.write(b"x")
        assert ran


async def test_connection_header_is_left_out_on_http2(make_wire, make_exchange):
    wire = make_wire()
    exchange = make_exchange(wire, http_version="2")
    await exchange.respond_error(answer(not_ready("gone", code="draining", close=True)))
    assert b"connection" not in wire.headers()


class SlowWire:
    """Takes a send only when told to."""

    def __init__(self) -> None:
        self.taken = anyio.Event()
        self.messages = []

    async def receive(self):
        await anyio.sleep_forever()

    async def send(self, message):
        await anyio.lowlevel.checkpoint()
        if message["type"] == "http.response.body":
            await self.taken.wait()
        self.messages.append(message)


async def test_a_send_that_waits_is_whole_when_it_ends(make_exchange):
    wire = SlowWire()
    exchange = make_exchange(wire, write_timeout=5.0)
    async with anyio.create_task_group() as group:
        await exchange.start(200, b"text/plain")
        group.start_soon(exchange.write, b"x")
        await anyio.wait_all_tasks_blocked()
        assert len(wire.messages) == 1
        wire.taken.set()
    assert [message.get("body") for message in wire.messages] == [None, b"x"]


async def test_a_send_that_waits_too_long_ends_the_exchange(make_exchange):
    wire = SlowWire()
    exchange = make_exchange(wire, write_timeout=0.01)
    await exchange.start(200, b"text/plain")
    with anyio.fail_after(5), pytest.raises(ClientGone):
        await exchange.write(b"x")
    assert exchange.gone


async def test_a_send_that_waits_can_be_cancelled(make_exchange):
    wire = SlowWire()
    exchange = make_exchange(wire, write_timeout=5.0)
    await exchange.start(200, b"text/plain")
    with anyio.move_on_after(0.01) as scope:
        await exchange.write(b"x")
    assert scope.cancelled_caught
    assert not exchange.gone


class Slot:
    """Pieces that can always be written at once."""

    def __init__(self, wire: SlowWire) -> None:
        self.wire = wire

    def ready(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        self.wire.messages.append({"body": data})


class Tap:
    """A source whose pieces come when the test says so."""

    def set_sink(self, sink) -> None:
        self.sink = sink

    def bring(self, piece: bytes) -> bool:
        if ready := self.sink.ready():
            self.sink.take([piece])
        return ready


@pytest.fixture
async def watched(make_exchange):
    wire, tap = SlowWire(), Tap()
    exchange = make_exchange(wire, write_timeout=5.0, extensions={CHUNKS: Slot(wire)})
    return exchange, wire, tap


async def test_pieces_that_come_overtake_none_that_wait_for_their_turn(watched):
    exchange, wire, tap = watched
    brought = []

    async def first(events):
        await events.send(b"first")
        brought.append(tap.bring(b"new"))

    async with open_events(exchange, 0) as events, anyio.create_task_group() as group:
        events.write_at_once(tap, b"".join)
        group.start_soon(first, events)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(events.send, b"old")
        await anyio.wait_all_tasks_blocked()
        assert not tap.bring(b"newest")
        wire.taken.set()
    assert brought == [False]
    assert [message.get("body") for message in wire.messages] == [None, b"first", b"old"]


async def test_pieces_are_written_as_they_come_until_the_events_are_left(watched):
    exchange, wire, tap = watched
    wire.taken.set()
    async with open_events(exchange, 0) as events:
        events.write_at_once(tap, b"".join)
        await events.send(b"one")
        assert tap.bring(b"two")
        assert tap.bring(b"")
        assert tap.bring("\u2028".encode())
    assert not tap.bring(b"late")
    assert [message.get("body") for message in wire.messages] == [None, b"one", b"two", b"\\u2028"]


@pytest.mark.parametrize("name", ["gone", "finished"])
async def test_nothing_is_written_to_who_has_left_or_after_the_end(watched, name):
    exchange, wire, tap = watched
    wire.taken.set()
    async with open_events(exchange, 0) as events:
        events.write_at_once(tap, b"".join)
        await events.send(b"one")
        setattr(exchange, name, True)
        assert not tap.bring(b"late")


async def test_senders_take_turns_and_who_is_cancelled_keeps_nobody_waiting(make_exchange):
    wire = SlowWire()
    exchange = make_exchange(wire, write_timeout=5.0)
    events = EventStream(exchange)
    async with anyio.create_task_group() as group:
        group.start_soon(events.send, b"1")
        await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0.01):
            await events.send(b"left")
        group.start_soon(events.send, b"2")
        group.start_soon(events.send, b"3")
        await anyio.wait_all_tasks_blocked()
        wire.taken.set()
    assert [message["body"] for message in wire.messages if "body" in message] == [b"1", b"2", b"3"]


class CancellingWire(SlowWire):
    """Cancels a scope when the first piece of a body has been taken."""

    def __init__(self, scope: anyio.CancelScope) -> None:
        super().__init__()
        self._scope = scope

    async def send(self, message):
        await super().send(message)
        if message["type"] == "http.response.body":
            self._scope.cancel()


async def test_a_sender_that_is_cancelled_when_its_turn_has_come_passes_it_on(make_exchange):
    """The second sender gets the turn after its cancellation and before it hears of it."""
    scope = anyio.CancelScope()
    wire = CancellingWire(scope)
    events = EventStream(make_exchange(wire, write_timeout=5.0))

    async def second() -> None:
        with scope:
            await events.send(b"2")

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for send in (lambda: events.send(b"1"), second, lambda: events.send(b"3")):
                group.start_soon(send)
                await anyio.wait_all_tasks_blocked()
            wire.taken.set()
    assert [message["body"] for message in wire.messages if "body" in message] == [b"1", b"3"]
