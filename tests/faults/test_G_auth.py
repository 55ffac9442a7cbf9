"""Row G1 of the fault table: keys."""

import contextlib

import anyio
import pytest

from troupellm.server.page.routes import FILES
from troupellm.tests.support.servers.canary import under_many as under_attack
from troupellm.tests.support.servers.serving import server_config

pytestmark = pytest.mark.anyio

OPEN = {"/health", "/readyz", "/livez", "/startupz", "/ping", "/docs", "/", *(f"/ui/{name}" for name in FILES)}
WRONG = [
    [],
    [b""],
    [b"Bearer"],
    [b"Bearer "],
    [b"Bearer wrong"],
    [b"secret"],
    [b"Basic c2VjcmV0"],
    [b"Bearer secret secret"],
    [b"Bearer secret", b"Bearer secret"],
    [b"Bearer " + b"x" * 10_000],
    ["Bearer schlüssel".encode()],
    [b"Bearer \xff\xfe\x80"],
]


async def test_G1_every_route_but_the_open_ones_needs_the_key(tiny_engine):
    config = server_config(api_key=("secret", "other"), ui=True)
    async with tiny_engine() as engine, under_attack(engine, config) as attacked, attacked.served.client() as client:
        bodies: dict[str, set[bytes]] = {}
        for route in attacked.served.app.routes:
            path = f"{route.path}tiny" if route.tail else route.path.replace("{", "").replace("}", "")
            if path == "/debug/events":  # a right request has no end
                path += "?nobody=1"
            if path in OPEN:
                assert (await client.request(route.method, path)).status_code == 200
                continue
            for values in WRONG:
                lines = b"".join(b"Authorization: " + value + b"\r\n" for value in values)
                start = f"{route.method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode()
                connection = await attacked.served.raw(start + lines + b"\r\n")
                head, _, body = (await connection.read_all()).partition(b"\r\n\r\n")
                await connection.close()
                assert head.startswith(b"HTTP/1.1 401 "), (path, values)
                assert b"www-authenticate: bearer" in head.lower()
                bodies.setdefault(route.error_shape, set()).add(body)
            for key in ("secret", "other"):
                allowed = await client.request(route.method, path, headers={"authorization": f"bearer {key}"})
                assert allowed.status_code not in (401, 403), (path, allowed.text)
        assert set(bodies) == {"openai", "responses", "anthropic", "ollama"}
        assert all(len(alike) == 1 for alike in bodies.values()), "a wrong key must look like a missing one"


async def test_G1_a_megabyte_of_key_is_refused(tiny_engine):
    config = server_config(api_key=("secret",))
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b"x" * 2**20 + b"\r\n\r\n"
        connection = await attacked.served.raw(b"")
        with contextlib.suppress(anyio.BrokenResourceError):
            await connection.stream.send(request)
        answer = await connection.read_all()
        await connection.close()
    assert not answer or int(answer.split()[1]) in (400, 401, 431)
