"""Rows A1 to A4 and A9 of the fault table: bad HTTP."""

import gzip
import json
import statistics
import time
from typing import Any

import pytest

from troupellm.server.app.app import asgi
from troupellm.tests.support.servers.canary import resident_bytes, under_many as under_attack
from troupellm.tests.support.servers.serving import http_request, server_config

pytestmark = pytest.mark.anyio

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
MEBIBYTE = 2**20


async def refusals(attacked, body: bytes, **headers: str) -> set[tuple[int, str]]:
    """Status and code that every route gives for a body."""
    answers = set()
    for path in PATHS:
        response = await attacked.client.post(
            path, content=body, headers={"content-type": "application/json"} | headers
        )
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        answers.add((response.status_code, error["code"]))
    return answers


class Quiet:
    """The app without a socket, to time it alone."""

    def __init__(self, engine: Any) -> None:
        self._app = asgi(engine, config=server_config(disable_access_log=True))

    async def refusal_seconds(self, path: str, body: bytes, **headers: str) -> float:
        """Processor time, median of five refusals of a request whose body is there at once."""
        given = {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        fields = [(name.encode(), text.encode()) for name, text in given.items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": fields}
        statuses, seconds = [], []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        for _ in range(5):
            began = time.process_time()  # of the thread for large bodies, too
            await self._app(scope, receive, send)
            seconds.append(time.process_time() - began)
        assert set(statuses[::2]) <= {400, 415}
        return statistics.median(seconds)


NESTED = (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000)
NO_NUMBERS = (b"NaN", b"-Infinity", b"1e999", b"9" * 100_000, b'1, "x": 1', b'{"a": 1, "a": 2}')


async def test_A1_to_A3_refusals_take_the_server_less_than_a_tenth_of_a_second(tiny_engine):
    bodies = [b"", b"{", b"nonsense", b"[1, 2]", b'{"a":"\xff\xfe"}', b"{}{}", *NESTED]
    bodies += [b'{"prompt": "x", "x": ' + value + b"}" for value in NO_NUMBERS]
    async with tiny_engine() as engine:
        quiet = Quiet(engine)
        for path in PATHS:
            for body in bodies:
                assert await quiet.refusal_seconds(path, body) < 0.1, (path, body[:20])
            for headers in ({"content_type": "text/plain"}, {"content_encoding": "gzip"}):
                assert await quiet.refusal_seconds(path, b'{"prompt": "x"}', **headers) < 0.1, (path, headers)


async def test_A1_bodies_that_are_not_json_are_refused(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for body in (b"", b"{", b"nonsense", b'{"a": 1', b"[1, 2]", b'"text"', b"null", b'{"a":"\xff\xfe"}', b"{}{}"):
            answers = await refusals(attacked, body)
            assert {status for status, _ in answers} == {400}, body
        for headers in (
            {"content-type": "text/plain"},
            {"content-type": "application/x-www-form-urlencoded"},
            {"content-type": "multipart/form-data; boundary=x"},
            {"content-encoding": "deflate"},
            {"content-encoding": "br"},
        ):
            assert await refusals(attacked, b'{"prompt": "x"}', **headers) == {(415, "unsupported_media_type")}
        bomb = gzip.compress(b" " * 64 * MEBIBYTE)
        for body, wanted in ((b"{}", (400, "invalid_encoding")), (bomb, (413, "request_too_large"))):
            assert await refusals(attacked, body, **{"content-encoding": "gzip"}) == {wanted}


async def test_A2_numbers_and_keys_that_are_not_json_are_refused(tiny_engine):
    values = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 100_000, b'1, "x": 1', b'{"a": 1, "a": 2}')
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for value in values:
            answers = await refusals(attacked, b'{"prompt": "x", "x": ' + value + b"}")
            assert answers == {(400, "invalid_json")}, value[:20]


async def test_A3_deep_nesting_is_refused_without_memory(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for body in NESTED:  # what the thread for large bodies keeps, it keeps once
            await refusals(attacked, body)
        before = resident_bytes()
        for body in (
            *NESTED,
            *NESTED,
            b'{"prompt":' + b"[" * 65 + b"]" * 65 + b"}",
        ):
            assert await refusals(attacked, body) == {(400, "invalid_json")}
        assert resident_bytes() - before < 8 * MEBIBYTE


async def test_A4_declared_oversize_is_refused_without_reading(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for path in PATHS:
            for declared in (str(8 * MEBIBYTE + 1), "9" * 18):
                connection = await attacked.served.raw(http_request(path, b"", content_length=declared))
                answer = await connection.read_all()
                await connection.close()
                assert answer.startswith(b"HTTP/1.1 413 ")
                assert answer.count(b"HTTP/1.1 ") == 1


async def test_A4_chunked_body_is_refused_where_it_crosses_the_cap(tiny_engine):
    cap, piece = MEBIBYTE, b"10000\r\n" + b" " * 65_536 + b"\r\n"
    async with tiny_engine() as engine, under_attack(engine, server_config(max_body_bytes=cap)) as attacked:
        for path in PATHS:  # the code that answers is loaded by then
            small = await attacked.served.raw(http_request(path, b"{"))
            await small.read_until(b"invalid_json")
            await small.close()
        before = resident_bytes()
        for path in PATHS:
            start = http_request(path, b"", content_length="", transfer_encoding="chunked")
            connection = await attacked.served.raw(start)
            for _ in range(cap // 65_536):
                await connection.stream.send(piece)
            await connection.stream.send(piece)
            answer = await connection.read_until(b"request_too_large")
            await connection.close()
            assert answer.startswith(b"HTTP/1.1 413 ")
            whole = await attacked.served.raw(start + piece * (cap // 65_536) + b"0\r\n\r\n")
            assert b'"invalid_json"' in await whole.read_until(b"invalid_json"), "a body of the cap itself is read"
            await whole.close()
        client = 2 * cap  # it is in this process: a whole body, and the part that the socket has not taken
        assert resident_bytes() - before < cap + client + 4 * MEBIBYTE


TARGETS = [
    ("GET", "/v1/nowhere", 404),
    ("GET", "//v1/models", 404),
    ("GET", "/v1//models", 404),
    ("GET", "/v1/models/", 404),
    ("GET", "/v1/../health", 404),
    ("GET", "/v1/%2e%2e/health", 404),
    ("GET", "/%2e%2e/health", 404),
    ("GET", "/v1%2fmodels", 404),
    ("GET", "/health/", 404),
    ("GET", "//health", 404),
    ("GET", "/%68ealth", 404),
    ("GET", "http://localhost/v1/models", 200),
    ("GET", "http://localhost/v1/nowhere", 404),
    ("GET", "http://localhost//v1/models", 404),
    ("GET", "http://localhost/health", 200),
    ("GET", "HTTPS://localhost/health", 200),
    ("GET", "/health", 200),
    ("GET", "/v1/completions", 405),
    ("PUT", "/v1/models", 405),
    ("DELETE", "/v1/chat/completions", 405),
    ("GET", "/v1/models", 200),
]


async def test_A9_odd_paths_and_verbs_get_json_and_one_verdict(tiny_engine):
    config = server_config(api_key=("secret",))
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        for method, target, status in TARGETS:
            for host in ("localhost", "evil.example:1", "[::1]"):
                without = 200 if target.endswith("//localhost/health") or target == "/health" else 401
                for key, wanted in (("Authorization: Bearer secret\r\n", status), ("", without)):
                    request = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{key}\r\n"
                    connection = await attacked.served.raw(request.encode())
                    head, _, body = (await connection.read_all()).partition(b"\r\n\r\n")
                    await connection.close()
                    assert int(head.split()[1]) == wanted, (method, target, host, key, head)
                    assert b"application/json" in head
                    assert (b"allow:" in head.lower()) == (wanted == 405)
                    if wanted != 200:
                        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
