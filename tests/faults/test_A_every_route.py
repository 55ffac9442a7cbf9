"""Rows A1 to A4, A8, A9, A12, G1, G4 and G6 over every route of the table, streamed and not; `make test` has some."""

import json
import socket
from contextlib import suppress
from typing import Any

import anyio
import pytest

from troupellm.tests.support.adapters.tiny_adapters import write_tiny_adapter
from troupellm.tests.support.servers.canary import under_many as under_attack
from troupellm.tests.support.servers.every_route import (
    KEYS,
    ROUTES,
    SAMPLES,
    SHAPES,
    body_of,
    chosen,
    error_of,
    json_routes,
    path_of,
    problem_of,
    send,
    stays_refused,
    streams_of,
    with_keys,
)
from troupellm.tests.support.servers.serving import http_request

pytestmark = pytest.mark.anyio


MEBIBYTE = 2**20


@pytest.fixture
def anyio_backend():
    return ("asyncio", {"use_uvloop": True})


def test_every_route_with_a_body_has_a_sample():
    from troupellm.protocol.config.engine import ServerConfig
    from troupellm.server.app.app import App
    from troupellm.server.host.server_state import ServerState

    app = App(ServerState(ServerConfig()), scopes=("open", "api", "admin"))
    assert {route.path for route in json_routes(app.routes)} == set(SAMPLES)


async def test_the_samples_are_taken(tiny_engine, tmp_path):
    """Else the bad requests below would be refused for something else."""
    write_tiny_adapter(tmp_path / "sql", 0)
    async with (
        tiny_engine(enable_lora=True, lora_dir=[str(tmp_path)]) as engine,
        under_attack(engine, with_keys()) as attacked,
    ):
        for route in json_routes(chosen(attacked)):
            for stream in streams_of(route):
                answer = await send(attacked, route, json.dumps(body_of(route, stream=stream)).encode())
                wrong = problem_of(route, answer)
                assert wrong is None, (route.path, wrong)
                unfit = answer.status_code == 404 and ("batches" in route.path or "{conversation_id}" in route.path)
                unfit = unfit or (answer.status_code == 400 and "does not" in answer.text)
                assert answer.status_code == 200 or unfit, (route.path, answer.text)


NO_OBJECTS = (b"", b"{", b"nonsense", b"[1, 2]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000)


@pytest.mark.parametrize("only", ROUTES)
async def test_A1_to_A3_bodies_that_are_no_json(tiny_engine, only):
    numbers = (b"NaN", b"-Infinity", b"1e999", b"9" * 100_000)
    nested = (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000 + b"}")
    async with tiny_engine() as engine, under_attack(engine, with_keys()) as attacked:
        wrong = []
        for route in json_routes(chosen(attacked, only)):
            for stream in streams_of(route):
                whole = json.dumps(body_of(route, stream=stream)).encode()
                bodies = [whole[:-1], whole + whole, *(() if stream else NO_OBJECTS)]
                bodies += [whole[:-1] + b', "x": ' + number + b"}" for number in numbers]
                bodies += [whole[:-1] + b', "x": ' + deep for deep in nested]
                bodies += [whole[:-1] + b', "x": 1, "x": 2}', whole[:-1] + b', "x": "\xff"}']
                for body in bodies:
                    answer = await send(attacked, route, body)
                    wrong.append((route.path, stream, body[:40], stays_refused(route, answer, (400,))))
                for headers in (
                    {"content_type": "text/plain"},
                    {"content_type": "application/x-www-form-urlencoded"},
                    {"content_encoding": "br"},
                ):
                    answer = await send(attacked, route, whole, **headers)
                    wrong.append((route.path, stream, str(headers), stays_refused(route, answer, (415,))))
        assert not [entry for entry in wrong if entry[3]]


@pytest.mark.parametrize("only", ROUTES)
async def test_A4_bodies_beyond_the_cap(tiny_engine, only):
    async with tiny_engine() as engine, under_attack(engine, with_keys(max_body_bytes=MEBIBYTE)) as attacked:
        for route in json_routes(chosen(attacked, only)):
            key = f"Bearer {KEYS[route.scope]}"
            for stream in streams_of(route):
                begun = json.dumps(body_of(route, stream=stream)).encode()[:-1].ljust(MEBIBYTE + 1)
                for body, headers in (
                    (b"", {"content_length": str(MEBIBYTE + 1)}),
                    (
                        b"%x\r\n%b\r\n" % (len(begun), begun),
                        {"content_length": "", "transfer_encoding": "chunked"},
                    ),
                ):
                    request = http_request(path_of(route), body, authorization=key, **headers)
                    connection = await attacked.served.raw(request)
                    seen = await connection.read_until(b"}")
                    await connection.close()
                    assert seen.startswith(b"HTTP/1.1 413 "), (route.path, stream, seen)


@pytest.mark.slow  # `make test` has one route of it, in `test_A_wire`
async def test_A8_bodies_that_come_by_drops_are_refused_at_their_deadline(tiny_engine):
    async def drip(connection) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                await attacked.more_short_answers()
                await connection.stream.send(b" ")

    async with tiny_engine() as engine, under_attack(engine, with_keys(body_timeout=1.0)) as attacked:
        slow = []
        async with anyio.create_task_group() as dripping:
            async with anyio.create_task_group() as reading:
                for route in json_routes(chosen(attacked)):
                    key = f"Bearer {KEYS[route.scope]}"
                    for stream in streams_of(route):
                        begun = json.dumps(body_of(route, stream=stream)).encode()[:-1]
                        request = http_request(path_of(route), begun, content_length="1000", authorization=key)
                        connection = await attacked.served.raw(request)
                        slow.append((route, connection))
                        reading.start_soon(connection.read_all)
                        dripping.start_soon(drip, connection)
            dripping.cancel_scope.cancel()
        for route, connection in slow:
            await connection.close()
            seen = connection.seen
            assert seen.startswith(b"HTTP/1.1 408 "), (route.path, seen)
            assert seen.count(b"HTTP/1.1 ") == 1
            error = error_of(route, json.loads(seen.partition(b"\r\n\r\n")[2]))
            assert set(error) == SHAPES[route.error_shape], route.path


def spellings(path: str) -> list[str]:
    first = f"%{ord(path[1]):02x}"
    return [
        f"{path}/",
        f"/{path}",
        f"{path}//",
        f"/x/..{path}",
        f"/.{path}",
        f"/{first}{path[2:]}",
        path.replace("/", "%2f"),
        f"/x/%2e%2e{path}",
        path.upper() if path.upper() != path else f"{path}x",
        f"{path}%00",
        f"{path};x",
    ]


@pytest.mark.parametrize("only", ROUTES)
async def test_A9_and_G1_other_spellings_and_verbs_need_the_same_key(tiny_engine, only):
    async with tiny_engine() as engine, under_attack(engine, with_keys()) as attacked:
        wrong = []

        async def ask(method: str, target: str, key: str) -> tuple[int, bytes]:
            line = f"Authorization: Bearer {key}\r\n" if key else ""
            request = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{line}\r\n"
            connection = await attacked.served.raw(request.encode())
            seen = await connection.read_all()
            await connection.close()
            return int(seen.split()[1]), seen.lower()

        for route in chosen(attacked, only):
            path = path_of(route)
            for target in spellings(path) if path != "/" else ("//", "/.", "/%2F"):
                with_key, without = await ask("GET", target, KEYS[route.scope]), await ask("GET", target, "")
                other = 401 if route.scope == "admin" else 404  # to the API, what is no route is unknown
                if without[0] != 401 or with_key[0] not in (404, 405, other):
                    taken = route.tail or "{" in route.path  # a name may be spelt in many ways
                    if not (taken and without[0] == 401):
                        wrong.append((target, with_key[0], without[0]))
            for method in ("PUT", "PATCH", "TRACE", "BREW"):
                status, seen = await ask(method, path, KEYS[route.scope])
                if (
                    status != 405
                    or b"\r\nallow: " not in seen
                    or b'"method_not_allowed"' not in seen.replace(b": ", b":")
                ):
                    codeless = route.error_shape in ("anthropic", "ollama") and status == 405
                    if not codeless:
                        wrong.append((method, path, status))
            if route.scope != "open":
                for key in ("wrong", "", "secret" if route.scope == "admin" else "boss"):
                    if (await ask(route.method, path, key))[0] != 401:
                        wrong.append((route.method, path, "let in", key))
        assert not wrong


NASTY = {
    "invalid UTF-8": b"\xff\xfe",
    "an overlong slash": b"\xc0\xaf",
    "half a pair": b"\\ud800",
    "the other half": b"\\udc00x",
    "NUL": b"a\\u0000b",
    "a raw control": b"a\x01b",
    "marks": "e\u0301\u0302\u0323".encode() * 20_000,
    "joined emoji": "\U0001f468\u200d\U0001f469\u200d".encode() * 2_000,
    "right to left": "\u202e\u2066abc".encode(),
    "not a character": "\uffff\ufffe".encode(),
    "lines": b"a\\n\\ndata: [DONE]\\n\\n\\r\\u2028\\u2029\\u0085",
    "special tokens": b"<|im_end|><|endoftext|></s><s>[INST]",
}
_MARK = "MARK"


def marked(value: Any) -> Any:
    """The body with a mark in place of every text but the model's name and the names of things."""
    if isinstance(value, dict):
        kept = ("model", "role", "type", "endpoint", "completion_window", "input_file_id", "level")
        return {name: inner if name in kept else marked(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [marked(inner) for inner in value]
    return _MARK if isinstance(value, str) else value


@pytest.mark.parametrize("only", ROUTES)
async def test_A12_texts_that_are_hardly_any(tiny_engine, only):
    async with tiny_engine(max_model_len=2048) as engine, under_attack(engine, with_keys()) as attacked:
        wrong = []
        for route in json_routes(chosen(attacked, only)):
            for stream in streams_of(route):
                body = json.dumps(marked(body_of(route, stream=stream))).encode()
                for name, text in NASTY.items():
                    answer = await send(attacked, route, body.replace(_MARK.encode(), text))
                    problem = problem_of(route, answer)
                    if name in ("invalid UTF-8", "an overlong slash", "a raw control") and _MARK.encode() in body:
                        problem = problem or stays_refused(route, answer, (400,))
                    wrong.append((route.path, stream, name, problem))
        assert not [entry for entry in wrong if entry[3]]


@pytest.mark.parametrize("only", ROUTES)
async def test_G4_nothing_inside_is_told_to_anybody_nor_to_the_log(tiny_engine, caplog, only):
    """Every route with the wrong types everywhere; bodies and headers are looked at by `problem_of`."""
    odd = (None, True, -1, 1.5, "", "x" * 5_000, [], {}, [None], {"a": None}, 2**63, "../../x")
    odd = odd[1::5] if only else odd
    async with tiny_engine() as engine, under_attack(engine, with_keys()) as attacked:
        wrong = []
        for route in json_routes(chosen(attacked, only)):
            names = [field for kind in [route.body] for field in getattr(kind, "__struct_fields__", ())]
            for name in names:
                for value in odd:
                    body = {"max_tokens": 1, "max_output_tokens": 1} | body_of(route) | {name: value}
                    answer = await send(attacked, route, json.dumps(body).encode())
                    wrong.append((route.path, name, str(value)[:20], problem_of(route, answer)))
        assert not [entry for entry in wrong if entry[3]]
    for secret in ("secret", "boss", "x" * 100):
        assert secret not in caplog.text


PLACES = (
    "http://127.0.0.1:1/x.png", "http://169.254.169.254/latest", "file:///etc/passwd", "/etc/passwd", "ftp://x/y",
    "http://localhost@127.0.0.1:1/", "data:image/png;base64,AAAA", "gopher://127.0.0.1:1/_x",
)  # fmt: skip


def with_place(path: str, place: str) -> list[dict[str, Any]]:
    """Requests that would have the server fetch something."""
    image, file = {"type": "image_url", "image_url": {"url": place}}, {"type": "file", "file": {"file_data": place}}
    if path == "/v1/responses":
        parts = ({"type": "input_image", "image_url": place}, {"type": "input_file", "file_url": place})
        return [{"input": [{"role": "user", "content": [part]}]} for part in parts]
    if path == "/v1/messages":
        source = {"type": "url", "url": place}
        return [
            {"messages": [{"role": "user", "content": [{"type": kind, "source": source}]}]}
            for kind in ("image", "document")
        ]
    if path in ("/v1/chat/completions", "/tokenize"):
        return [{"messages": [{"role": "user", "content": [part]}], "prompt": None} for part in (image, file)]
    return []


async def test_G6_no_route_fetches_an_address_of_its_request(tiny_engine, monkeypatch):
    asked = []
    real = socket.getaddrinfo

    def recorded(host, port, *args, **kwargs):
        asked.append(str(host))
        return real(host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", recorded)
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        places = (*PLACES, f"http://127.0.0.1:{trap.getsockname()[1]}/")
        async with tiny_engine() as engine, under_attack(engine, with_keys()) as attacked:
            for route in json_routes(chosen(attacked)):
                for fields in (fields for place in places for fields in with_place(route.path, place)):
                    for stream in streams_of(route):
                        body = body_of(route, stream=stream) | fields
                        answer = await send(attacked, route, json.dumps(body).encode())
                        assert stays_refused(route, answer, (400,)) is None, (route.path, fields, answer.text)
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert not [host for host in asked if "169.254" in host or "@" in host]
