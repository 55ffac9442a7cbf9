"""Host names that a server goes by, and the pages of other origins that may call it."""

import pytest

from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import ConfigError
from troupellm.server.access.host_and_origin import guard_of, mounted_guard
from troupellm.server.base.errors import HttpError

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def status_of(guard, exchange, **options) -> int:
    try:
        guard.check(exchange, **options)
    except HttpError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("https://localhost:8000", 200),
        ("http://evil-localhost:8000", 403),
        ("http://localhost:8000.example", 403),
        ("http://localhost", 403),
        ("null", 403),
    ],
)
async def test_only_pages_of_the_servers_own_host_and_port_may_call_it(make_wire, make_exchange, origin, status):
    guard = guard_of(ServerConfig())
    exchange = make_exchange(make_wire(), headers={"host": "localhost:8000", "origin": origin})
    assert status_of(guard, exchange) == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("localhost.", 200),
        ("[::1]:8000", 200),
        ("127.0.0.1", 200),
        ("127.0.0.1.example", 421),
        ("rebound.example:8000", 421),
        ("localhost:8000 x", 421),
        ("", 421),
    ],
)
async def test_a_server_on_loopback_goes_by_loopback_names_only(make_wire, make_exchange, host, status):
    guard = guard_of(ServerConfig(host="127.0.0.1"))
    assert status_of(guard, make_exchange(make_wire(), headers={"host": host})) == status


async def test_a_probe_may_name_any_host(make_wire, make_exchange):
    exchange = make_exchange(make_wire(), headers={"host": "10.1.2.3"})
    assert status_of(guard_of(ServerConfig()), exchange, probe=True) == 200


async def test_an_allowed_origin_is_told_to_the_browser(make_wire, make_exchange):
    guard = guard_of(ServerConfig(allowed_origins=("https://app.example",)))
    headers = {"host": "localhost", "origin": "https://app.example"}
    told = dict(guard.check(make_exchange(make_wire(), headers=headers)))
    assert told[b"access-control-allow-origin"] == b"https://app.example"
    assert told[b"vary"] == b"origin"


async def test_a_mounted_app_leaves_hosts_and_origins_to_the_server_in_front(make_wire, make_exchange):
    exchange = make_exchange(make_wire(), headers={"host": "any.example", "origin": "https://other.example"})
    assert status_of(mounted_guard(ServerConfig()), exchange) == 200
    assert status_of(mounted_guard(ServerConfig()), exchange, own_pages_only=True) == 403


def test_cookies_need_origins_by_name():
    with pytest.raises(ConfigError, match="allow_credentials needs allowed_origins by name"):
        guard_of(ServerConfig(allowed_origins=("*",), allow_credentials=True))
