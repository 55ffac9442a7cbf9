"""Rows G2, G3, G7 and G8 of the fault table: what stands before the routes."""

import sys
from types import FrameType
from typing import Any

import anyio
import httpx
import pytest

from troupellm.server.access.auth import Gate
from troupellm.server.base.errors import HttpError
from troupellm.server.page.routes import FILES
from troupellm.tests.support.servers.canary import under_many as under_attack
from troupellm.tests.support.servers.serving import server_config

pytestmark = pytest.mark.anyio


OPEN = {"/health", "/readyz", "/livez", "/startupz", "/ping", "/docs", "/", *(f"/ui/{name}" for name in FILES)}
"""Probes, and the pages that ask for the key: they hold nothing of the server's."""


def calls_of(gate: Gate, header: bytes) -> list[tuple[str, str]]:
    """Every call and return while the gate refuses a header, in order."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = argument.__qualname__ if event.startswith("c_") else frame.f_code.co_qualname
        calls.append((event, name))

    sys.setprofile(note)
    try:
        gate.check(b"/v1/models", [header])
    except HttpError:
        return calls
    finally:
        sys.setprofile(None)
    pytest.fail("the key was accepted")


def test_G2_a_nearly_right_key_takes_the_same_calls_as_a_wrong_one():
    """A key that shares all but its last letter with the right one, against one that shares nothing."""
    right = "sk-" + "a" * 60
    gate = Gate([right, *(f"sk-other-{number}" for number in range(100))], frozenset())
    near, far = f"Bearer {right[:-1]}b".encode(), ("Bearer " + "z" * len(right)).encode()
    assert calls_of(gate, near) == calls_of(gate, far)
    assert ("c_call", "compare_digest") in calls_of(gate, near)


def test_G2_keys_are_compared_as_blinded_digests(monkeypatch):
    compared = []
    import hmac

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda one, other: compared.append((one, other)) or real(one, other))
    gate = Gate(["secret"], frozenset())
    assert gate.check(b"/", [b"Bearer secret"]).name == "key-1"
    for header in (b"Bearer secreu", b"Bearer x", b"Bearer " + b"y" * 5_000):
        with pytest.raises(HttpError):
            gate.check(b"/", [header])
    assert len(compared) == 4
    assert all(len(one) == len(other) == 32 for one, other in compared)
    assert not any(b"secret" in one or b"secret" in other for one, other in compared)


async def test_G3_only_probes_and_the_empty_page_answer_without_a_key(tiny_engine):
    config = server_config(api_key=("secret",), admin_api_key=("boss",), ui=True)
    async with tiny_engine() as engine, under_attack(engine, config) as attacked, attacked.served.client() as client:
        answered = set()
        for route in attacked.served.app.routes:
            path = route.path.replace("{", "").replace("}", "") + ("tiny" if route.tail else "")
            response = await client.request(route.method, path)
            if response.status_code != 401:
                answered.add(path)
        assert answered == OPEN
        page = (await client.get("/docs")).text
        assert 'id="key"' in page
        assert "tiny" not in page, "nothing about what is served"


async def test_G8_admin_routes_are_not_there_without_an_admin_key_and_need_it_with_one(tiny_engine):
    async with tiny_engine() as engine:
        with_key = server_config(api_key=("secret",), admin_api_key=("boss",))
        async with under_attack(engine, with_key) as attacked:
            every = [route for route in attacked.served.app.routes if route.scope == "admin"]
            table = [route for route in every if route.path != "/debug/events"]  # which is there on loopback
            for route in table:
                path = route.path.replace("{", "").replace("}", "")
                for key in ("secret", "wrong", ""):
                    async with attacked.served.client(key=key or None) as client:
                        assert (await client.request(route.method, path)).status_code == 401, path
            async with attacked.served.client(key="boss") as client:
                assert (await client.get("/v1/models")).status_code == 401, "the admin key is no API key"
        async with under_attack(engine, server_config(api_key=("secret",))) as attacked:
            assert not [route for route in attacked.served.app.routes if route.scope == "admin"]
            for route in table:
                path = route.path.replace("{", "").replace("}", "")
                answer = await attacked.client.request(route.method, path)
                assert answer.status_code in (404, 405), path


HOSTS = [
    ("127.0.0.1", 200),
    ("127.0.0.1:80", 200),
    ("localhost", 200),
    ("LOCALHOST:8000", 200),
    ("localhost.", 200),
    ("[::1]", 200),
    ("[::1]:8000", 200),
    ("evil.example", 421),
    ("evil.example:8000", 421),
    ("127.0.0.1.evil.example", 421),
    ("localhost.evil.example", 421),
    ("evil.example#localhost", 421),
    ("127.0.0.2", 421),
    ("0", 421),
    ("localhost:1@evil.example", 421),
    ("[::1]evil.example", 421),
    ("localhost:", 421),
    ("", 421),
]


async def status_of(attacked, *lines: str, method: str = "GET", path: str = "/v1/models") -> tuple[int, bytes]:
    request = f"{method} {path} HTTP/1.1\r\nConnection: close\r\n" + "".join(f"{line}\r\n" for line in lines) + "\r\n"
    connection = await attacked.served.raw(request.encode())
    seen = await connection.read_all()
    await connection.close()
    return int(seen.split()[1]), seen.lower()


async def test_G7_on_loopback_only_the_machines_own_names_are_answered(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine, guarded=True) as attacked:
        for host, wanted in HOSTS:
            status, seen = await status_of(attacked, f"Host: {host}")
            assert status == wanted, host
            assert wanted == 200 or b'"host_not_allowed"' in seen
            assert (await status_of(attacked, f"Host: {host}", path="/health"))[0] == 200, host


async def test_G7_the_name_in_the_target_stands_above_the_host_header(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine, guarded=True) as attacked:
        for name, wanted in (("evil.example", 421), ("localhost:1", 200), ("localhost@evil.example", 421)):
            path = f"http://{name}/v1/models"
            assert (await status_of(attacked, "Host: localhost", path=path))[0] == wanted, name


async def test_G7_names_that_were_allowed_are_answered(tiny_engine):
    config = server_config(allowed_hosts=("llm.example", "127.0.0.1"))
    async with tiny_engine() as engine, under_attack(engine, config, guarded=True) as attacked:
        assert (await status_of(attacked, "Host: llm.example:443"))[0] == 200
        assert (await status_of(attacked, "Host: localhost"))[0] == 200
        assert (await status_of(attacked, "Host: evil.example"))[0] == 421


ORIGINS = [("http://evil.example", 403), ("null", 403), ("file://", 403), ("http://localhost:1", 403)]


async def test_G7_pages_of_other_origins_are_refused(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine, guarded=True) as attacked:
        for origin, wanted in ORIGINS:
            status, seen = await status_of(attacked, "Host: localhost", f"Origin: {origin}")
            assert status == wanted
            assert b"access-control" not in seen
        status, seen = await status_of(attacked, "Host: localhost:9", "Origin: http://localhost:9")
        assert status == 200
        ask = ("Host: localhost", "Origin: http://evil.example", "Access-Control-Request-Method: POST")
        status, seen = await status_of(attacked, *ask, method="OPTIONS", path="/v1/completions")
        assert status == 403
        assert b"access-control-allow" not in seen
        assert (await status_of(attacked, "Host: localhost", method="OPTIONS"))[0] == 405
        assert (await status_of(attacked, "Host: localhost", "Origin: a", "Origin: b"))[0] == 400


async def test_G7_pages_that_were_allowed_may_ask_and_read(tiny_engine):
    config = server_config(api_key=("secret",), allowed_origins=("http://page.example",))
    async with tiny_engine() as engine, under_attack(engine, config, guarded=True) as attacked:
        page, key = ("Host: localhost", "Origin: http://page.example"), "Authorization: Bearer secret"
        ask = (*page, "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization")
        status, seen = await status_of(attacked, *ask, method="OPTIONS", path="/v1/completions")
        assert status == 204
        assert b"access-control-allow-origin: http://page.example\r\n" in seen
        allowed = {name: value for name, _, value in (line.partition(b": ") for line in seen.split(b"\r\n"))}
        assert allowed[b"access-control-allow-methods"] == b"get, post, delete"
        headers = set(allowed[b"access-control-allow-headers"].split(b", "))
        assert headers >= {b"authorization", b"content-type", b"x-api-key", b"anthropic-version", b"x-stainless-lang"}
        status, seen = await status_of(attacked, *page, key)
        assert status == 200
        assert b"access-control-allow-origin: http://page.example\r\n" in seen
        assert b"vary: origin" in seen
        assert b"credentials" not in seen
        status, seen = await status_of(attacked, *page)
        assert status == 401
        assert b"access-control-allow-origin" in seen, "the page must be able to read why"
        assert (await status_of(attacked, "Host: localhost", "Origin: http://other.example", key))[0] == 403
        status, seen = await status_of(attacked, *page, key, *(f"X-{number}: {'y' * 150}" for number in range(90)))
        assert status == 431
        assert b"access-control-allow-origin: http://page.example\r\n" in seen


async def test_G7_any_origin_is_never_allowed_with_cookies(tiny_engine):
    config = server_config(allowed_origins=("*",))
    async with tiny_engine() as engine, under_attack(engine, config, guarded=True) as attacked:
        status, seen = await status_of(attacked, "Host: localhost", "Origin: http://page.example")
        assert status == 200
        assert b"access-control-allow-origin: *\r\n" in seen
        assert b"credentials" not in seen


async def test_G7_the_page_that_a_browser_has_resolve_here_is_refused_before_keys_and_routes(tiny_engine):
    config = server_config(api_key=("secret",))
    async with tiny_engine() as engine, under_attack(engine, config, guarded=True) as attacked:
        for path in ("/v1/nowhere", "/v1/completions", "/docs"):
            assert (await status_of(attacked, "Host: evil.example", path=path))[0] == 421
        with anyio.fail_after(10):
            headers = {"host": "evil.example", "authorization": "Bearer secret"}
            answer = await attacked.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert isinstance(answer, httpx.Response)
        assert answer.status_code == 421
