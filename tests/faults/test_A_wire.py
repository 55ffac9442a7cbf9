"""Rows A5, A6, A8 and A11 of the fault table: bytes that are no HTTP, or as little of it as possible."""

import gc
import json
import logging
from contextlib import suppress
from functools import partial

import anyio
import h2.errors
import h2.events
import h2.settings
import h11
import psutil
import pytest
from hyperframe.frame import WindowUpdateFrame

from troupellm.server.base.exchange import CHUNK_BYTES
from troupellm.server.http.http1 import MAX_TINY_CHUNKS, Http1
from troupellm.server.http.http2_flood import BURST, Unsent
from troupellm.tests.support.clients.sockets import raw_socket
from troupellm.tests.support.clients.stranger_http2 import StrangerHttp2
from troupellm.tests.support.servers import canary
from troupellm.tests.support.servers.canary import resident_bytes
from troupellm.tests.support.servers.processes import ready_process
from troupellm.tests.support.servers.serving import http_request, server_config

pytestmark = pytest.mark.anyio

under_attack = partial(canary.under_attack, canary_tokens=24)
"""Short songs: there are many attacks."""

SHAPE = {"message", "type", "param", "code"}
BODY = b'{"model": "tiny", "prompt": "x", "max_tokens": 1}'


@pytest.fixture
def anyio_backend():
    return ("asyncio", {"use_uvloop": True})


def head(*lines: bytes, method: bytes = b"POST", path: bytes = b"/v1/completions") -> bytes:
    given = (b"Host: localhost", b"Content-Type: application/json", *lines)
    return method + b" " + path + b" HTTP/1.1\r\n" + b"".join(line + b"\r\n" for line in given) + b"\r\n"


async def answers_to(attacked, data: bytes) -> list[tuple[int, dict]]:
    """Status and error of every answer until the server closes."""
    connection = await attacked.served.raw(data)
    seen = await connection.read_all()
    await connection.close()
    answers = []
    while seen:
        top, _, rest = seen.partition(b"\r\n\r\n")
        length = next(
            int(line.partition(b":")[2]) for line in top.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        answers.append((int(top.split()[1]), json.loads(rest[:length])))
        seen = rest[length:]
    return answers


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
AMBIGUOUS = {
    "both lengths": head(LENGTH, CHUNKED) + b"0\r\n\r\n" + SMUGGLED,
    "both, the other way": head(CHUNKED, LENGTH) + BODY + SMUGGLED,
    "two lengths": head(b"Content-Length: 0", LENGTH) + BODY + SMUGGLED,
    "twice the same length": head(LENGTH, LENGTH) + BODY + SMUGGLED,
    "a list of lengths": head(b"Content-Length: 5, 6") + BODY + SMUGGLED,
    "a list of the same lengths": head(b"Content-Length: %d, %d" % (len(BODY), len(BODY))) + BODY + SMUGGLED,
    "chunks in HTTP/1.0": head(CHUNKED).replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n" + SMUGGLED,
    "HTTP/1.9": head(LENGTH).replace(b"HTTP/1.1", b"HTTP/1.9") + BODY + SMUGGLED,
    "HTTP/3.0": head(LENGTH).replace(b"HTTP/1.1", b"HTTP/3.0") + BODY + SMUGGLED,
    "HTTP/2.0 without its beginning": head(LENGTH).replace(b"HTTP/1.1", b"HTTP/2.0") + BODY + SMUGGLED,
    "HTTP/2 without TLS": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED,
    "a negative length": head(b"Content-Length: -1") + SMUGGLED,
    "a length with a sign": head(b"Content-Length: +5") + BODY + SMUGGLED,
    "a length in hex": head(b"Content-Length: 0x10") + BODY + SMUGGLED,
    "an endless length": head(b"Content-Length: " + b"9" * 5_000) + SMUGGLED,
    "a space before the colon": head(b"Content-Length : 5") + BODY + SMUGGLED,
    "two encodings": head(CHUNKED, b"Transfer-Encoding: identity") + b"0\r\n\r\n" + SMUGGLED,
    "an encoding that is none": head(b"Transfer-Encoding: xchunked") + b"0\r\n\r\n" + SMUGGLED,
    "a bad chunk size": head(CHUNKED) + b"zz\r\n" + SMUGGLED,
    "a negative chunk size": head(CHUNKED) + b"-1\r\n" + SMUGGLED,
    "a bad end of a chunk": head(CHUNKED) + b"1\r\nxx\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk size without end": head(CHUNKED) + b"1" * 20_000,
    "bare line feeds": head(LENGTH).replace(b"\r\n", b"\n") + BODY + SMUGGLED,
    "one bare line feed": head(b"X: y\nContent-Length: 3") + SMUGGLED,
    "a folded header": head(b"X: y\r\n Content-Length: 3") + SMUGGLED,
    "a header without colon": head(b"nonsense") + SMUGGLED,
    "a NUL in a header": head(b"X: a\0b") + SMUGGLED,
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n" + SMUGGLED,
    "two hosts": head(b"Host: other") + SMUGGLED,
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n",
}


SAMPLE = [*list(AMBIGUOUS)[::5], "a list of the same lengths", "chunks in HTTP/1.0", "HTTP/1.9", "HTTP/2 without TLS"]


@pytest.mark.parametrize("names", [SAMPLE, pytest.param(list(AMBIGUOUS), marks=pytest.mark.slow)], ids=len)
async def test_A5_ambiguous_requests_are_refused_once(tiny_engine, names):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for name in names:
            data = AMBIGUOUS[name]
            answers = await answers_to(attacked, data)
            assert len(answers) == 1, (name, answers)
            status, body = answers[0]
            assert status in (400, 413, 431), (name, status)
            assert set(body["error"]) == SHAPE, name


TINY_CHUNKS = b"1\r\n \r\n" * 100_000


async def test_A5_tiny_chunks_cost_little(tiny_engine, monkeypatch):
    looked_at = []
    count = Http1._count

    def counted(self: Http1, data: h11.Data) -> None:
        looked_at.extend([1] * (len(data.data) == 1))
        count(self, data)

    monkeypatch.setattr(Http1, "_count", counted)
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        connection = await attacked.served.raw(head(CHUNKED))
        with anyio.fail_after(20):
            for start in range(0, len(TINY_CHUNKS), 60_000):
                try:
                    await connection.stream.send(TINY_CHUNKS[start : start + 60_000])
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    break
            seen = await connection.read_all()
        await connection.close()
        assert not seen or seen.startswith(b"HTTP/1.1 400 ")
        assert MAX_TINY_CHUNKS < len(looked_at) < MAX_TINY_CHUNKS + 100
        # Chunks of an ordinary client are served.
        piece = BODY[:20]
        rest = BODY[20:]
        body = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(piece), piece, len(rest), rest)
        status, answer = (await answers_to(attacked, head(CHUNKED, b"Connection: close") + body))[0]
        assert (status, answer["object"]) == (200, "text_completion")


@pytest.mark.slow
async def test_A5_tiny_chunks_cost_a_server_less_than_half_a_second(checkpoint):
    async with ready_process(checkpoint) as server:
        await server.until_idle()
        process = psutil.Process(server.pid)
        before = sum(process.cpu_times()[:2])
        with await raw_socket(server.port, head(CHUNKED)) as connection:
            with suppress(ConnectionError), anyio.fail_after(20):
                await connection.send(TINY_CHUNKS)
            seen = await connection.read_all()
        spent = sum(process.cpu_times()[:2]) - before
    assert not seen or seen.startswith(b"HTTP/1.1 400 ")
    assert spent < 0.5


TOO_LARGE = {
    "one header": head(b"X: " + b"y" * 65_536, method=b"GET", path=b"/health"),
    "500 headers": head(*(b"X-%d: y" % number for number in range(500)), method=b"GET", path=b"/health"),
    "101 headers": head(*(b"X-%d: y" % number for number in range(101)), method=b"GET", path=b"/health"),
    "a long target": head(method=b"GET", path=b"/health?" + b"x" * 65_536),
    "just over the cap": head(b"X: " + b"y" * 16_384, method=b"GET", path=b"/health"),
    "a head without end": b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 10_000,
}


async def test_A6_heads_that_are_too_large_are_refused(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for name, data in TOO_LARGE.items():
            answers = await answers_to(attacked, data)
            assert [status for status, _ in answers] == [431], (name, answers)
            assert answers[0][1]["error"]["code"] == "headers_too_large"
        many = head(
            *(b"X-%d: y" % number for number in range(90)), b"Connection: close", method=b"GET", path=b"/readyz"
        )
        assert [status for status, _ in await answers_to(attacked, many)] == [200]


async def test_A8_a_body_that_comes_by_drops_is_refused_at_its_deadline(tiny_engine):
    """On one route; `test_A_every_route` has the others."""
    config = server_config(body_timeout=0.5)
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        connection = await attacked.served.raw(http_request("/v1/completions", b'{"model":', content_length="1000"))

        async def drip() -> None:
            while True:
                await attacked.more_short_answers()
                await connection.stream.send(b" ")

        async with anyio.create_task_group() as group:
            group.start_soon(drip)
            seen = await connection.read_all(10)
            group.cancel_scope.cancel()
        await connection.close()
        assert seen.startswith(b"HTTP/1.1 408 ")
        assert seen.count(b"HTTP/1.1 ") == 1
        assert json.loads(seen.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


async def test_A4_an_answer_before_the_body_reaches_a_client_that_sends_all_of_it_first(tiny_engine):
    """The rest of the body is dropped, and the connection ends or goes on as the answer has said."""
    cap = 2**20
    config = server_config(max_body_bytes=cap, api_key=("secret",))
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        before = resident_bytes()
        for path, key, status in (
            ("/v1/completions", "", 401),
            ("/v1/completions", "Bearer secret", 413),
            ("/v1/nowhere", "Bearer secret", 404),
            ("/v1/models", "Bearer secret", 405),
        ):
            start = http_request(path, b"", content_length=str(60 * cap), authorization=key)
            connection = await attacked.served.raw(start)
            for _ in range(60):
                await connection.stream.send(b" " * cap)
            if status == 413:
                seen = await connection.read_all(10)
                assert b"connection: close" in seen
            else:
                await connection.stream.send(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
                seen = await connection.read_until(b"alive", 10)
            await connection.close()
            assert seen.startswith(b"HTTP/1.1 %d " % status), (path, seen[:200])
        assert resident_bytes() - before < 8 * cap


def resets(client: StrangerHttp2) -> None:
    for _ in range(BURST + 100):
        client.connection.reset_stream(client.request(b"GET", b"/livez"))


def pings(client: StrangerHttp2) -> None:
    for _ in range(BURST + 100):
        client.connection.ping(b"12345678")


def windows(client: StrangerHttp2) -> None:
    for _ in range(BURST + 100):
        client.connection.increment_flow_control_window(1)


def empty_data(client: StrangerHttp2) -> None:
    number = client.request(b"POST", b"/v1/completions", (b"content-type", b"application/json"), end=False)
    for _ in range(BURST + 100):
        client.connection.send_data(number, b"")


def resets_by_the_server(client: StrangerHttp2) -> None:
    """MadeYouReset: a window that overflows has the server reset the request itself."""
    client.connection.remote_settings.max_concurrent_streams = 10_000
    client.connection.remote_settings.acknowledge()
    for _ in range(BURST + 100):
        number = client.request(b"POST", b"/v1/completions", (b"content-type", b"application/json"), end=False)
        client.frame(WindowUpdateFrame(number, 2**31 - 1))


H2C = server_config(h2c=True)
FLOODS = {make.__name__: make for make in (resets, pings, windows, empty_data, resets_by_the_server)}


async def test_A11_http2_is_served_and_its_floods_are_ended(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine, H2C) as attacked:
        port = attacked.served.port
        client = await StrangerHttp2.connect(port)
        length = (b"content-length", str(len(BODY)).encode())
        number = client.request(b"POST", b"/v1/completions", (b"content-type", b"application/json"), length, end=False)
        client.connection.send_data(number, BODY, end_stream=True)
        await client.flush()
        status, body = await client.answer(number)
        assert (status, json.loads(body)["object"]) == (200, "text_completion")
        await client.close()

        for name, make in FLOODS.items():
            flood = await StrangerHttp2.connect(port)
            await flood.read()
            make(flood)
            await flood.flush()
            ended = await flood.until_ended()
            assert ended is not None, name
            assert ended.error_code == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM, name
            await flood.close()


async def test_A11_http2_answers_wait_for_their_reader(tiny_engine):
    """A window of nothing: whole answers are not copied for it, and are whole once it opens."""
    count, windows = 8, h2.settings.SettingCodes.INITIAL_WINDOW_SIZE
    async with tiny_engine() as engine, under_attack(engine, H2C) as attacked:
        whole = (await attacked.client.get("/openapi.json")).content
        assert len(whole) > 4 * CHUNK_BYTES
        client = await StrangerHttp2.connect(attacked.served.port)
        client.connection.update_settings({windows: 0})
        numbers = [client.request(b"GET", b"/openapi.json") for _ in range(count)]
        await client.flush()
        with anyio.fail_after(20):
            while sum(isinstance(event, h2.events.ResponseReceived) for event in client.events) < count:
                await client.read()
            await attacked.client.get("/livez")  # a turn for tasks that could still write
            unsent = [len(found.buffer) for found in gc.get_objects() if type(found) is Unsent]
        assert len(unsent) >= count
        assert 0 < max(unsent) < 3 * CHUNK_BYTES
        client.connection.update_settings({windows: 2**20})
        client.connection.increment_flow_control_window(count * 2**20)
        await client.flush()
        for number in numbers:
            assert await client.answer(number) == (200, whole)
        await client.close()


async def test_A11_http2_requests_that_are_none_end_alone(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine, H2C) as attacked:
        client = await StrangerHttp2.connect(attacked.served.port)
        await client.read()
        two_hosts = client.request(b"GET", b"/livez", (b"host", b"a"), (b"host", b"b"))
        await client.flush()
        assert (await client.answer(two_hosts))[0] in (0, 400)
        await client.close()
        for path in (b"/\xff\xfe", b"/a b", b"/\x00"):
            client = await StrangerHttp2.connect(attacked.served.port)
            strange = client.request(b"GET", path)
            await client.flush()
            assert (await client.answer(strange))[0] in (0, 400), path
            await client.close()
        # The rest of a body whose request was answered already does not end the connection.
        client = await StrangerHttp2.connect(attacked.served.port)
        early = client.request(b"POST", b"/v1/nowhere", (b"content-type", b"application/json"), end=False)
        await client.flush()
        status, body = await client.answer(early)
        assert status == 404
        assert set(json.loads(body)["error"]) == SHAPE
        client.connection.send_data(early, b" " * 1_000)
        good = client.request(b"GET", b"/livez")
        await client.flush()
        assert (await client.answer(good))[0] == 200
        await client.close()


async def test_A11_more_streams_than_allowed_end_the_connection(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine, H2C) as attacked:
        client = await StrangerHttp2.connect(attacked.served.port)
        client.connection.remote_settings.max_concurrent_streams = 10_000
        for _ in range(1_000):
            client.request(b"POST", b"/v1/completions", (b"content-type", b"application/json"), end=False)
        await client.flush()
        await client.until_ended()
        await client.close()


async def test_A11_streams_that_are_reset_in_the_same_read_are_not_begun(tiny_engine, caplog):
    async with tiny_engine() as engine, under_attack(engine, H2C) as attacked:
        client = await StrangerHttp2.connect(attacked.served.port)
        await client.read()
        for _ in range(BURST // 3):
            client.connection.reset_stream(client.request(b"GET", b"/v1/models"))
        good = client.request(b"GET", b"/livez")
        await client.flush()
        assert (await client.answer(good))[0] == 200
        await client.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("pieces", [(b"\r\n", b""), (b"\r", b"\n")], ids=["at once", "in halves"])
async def test_one_empty_line_before_a_request_is_ignored(tiny_engine, pieces):
    request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
    async with tiny_engine() as engine, under_attack(engine, H2C) as attacked:
        first, second = pieces
        connection = await attacked.served.raw(first)
        await connection.stream.send(second + request + b"\r\n")
        await connection.stream.send(b"\r\n" + request + b"Connection: close\r\n\r\n")
        with anyio.fail_after(10):
            seen = await connection.read_all()
        assert seen.count(b"HTTP/1.1 200 ") == 2
        await connection.close()
        connection = await attacked.served.raw(b"\r\n\r\n" + request + b"\r\n")
        with anyio.fail_after(10):
            assert (await connection.read_all()).startswith(b"HTTP/1.1 400 ")
        await connection.close()
