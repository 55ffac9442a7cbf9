"""The key file, and the headers that tell a key what it may still use."""

import hashlib
from pathlib import Path

import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.protocol.config.engine import EngineConfig, ServerConfig, TenantConfig
from troupellm.protocol.errors import ConfigError, RateLimited
from troupellm.protocol.quota import Quota
from troupellm.server.access.auth import Gate
from troupellm.server.access.keys import read_keys, with_tenants
from troupellm.server.app.app import asgi
from troupellm.server.base.errors import HttpError, answer
from troupellm.server.base.ratelimits import duration, ratelimit_headers

SECRET = "sk-alice-0123456789"


def write(folder: Path, text: str) -> ServerConfig:
    path = folder / "keys.toml"
    path.write_text(text)
    return ServerConfig(api_key_file=str(path))


def test_keys_have_names_and_limits(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-bob").hexdigest()
    config = write(
        tmp_path,
        f"""
        [[keys]]
        name = "alice"
        key = "{SECRET}"
        requests_per_minute = 60
        tokens_per_minute = 1000
        max_concurrency = 4
        weight = 2
        priority = -1
        [[keys]]
        name = "bob"
        sha256 = "{digest.upper()}"
        """,
    )
    keys = read_keys(config)
    alice, bob = keys.tenants
    assert alice == TenantConfig(
        name="alice", requests_per_minute=60, tokens_per_minute=1000, max_concurrency=4, weight=2.0, priority=-1
    )
    assert bob == TenantConfig(name="bob")
    gate = Gate(keys.callers, frozenset())
    assert gate.check(b"/v1/models", [f"Bearer {SECRET}".encode()]).name == "alice"
    assert gate.check(b"/v1/models", [b"Bearer sk-bob"]).name == "bob"
    with pytest.raises(HttpError):
        gate.check(b"/v1/models", [f"Bearer {digest}".encode()])  # the digest is no key
    assert with_tenants(EngineConfig(), keys.tenants).scheduler.tenants == (alice, bob)


def test_limits_that_an_engine_does_not_have_are_refused(tmp_path: Path) -> None:
    entry = f'[[keys]]\nname = "alice"\nkey = "{SECRET}"\n'
    limited = write(tmp_path, f"{entry}requests_per_minute = 60\n")
    alice = TenantConfig(name="alice", requests_per_minute=60)
    engine = Engine("not-opened")
    with pytest.raises(ConfigError, match="limits of alice") as caught:
        asgi(engine, config=limited)
    assert caught.value.param == "api_key_file"
    with pytest.raises(ConfigError, match="limits of alice"):
        asgi(Engine("not-opened", tenants=(TenantConfig(name="alice", requests_per_minute=9),)), config=limited)
    asgi(Engine("not-opened", tenants=(alice,)), config=limited)
    asgi(engine, config=write(tmp_path, entry))  # a name without limits


def test_keys_without_names_are_tenants_once_there_are_several(tmp_path: Path) -> None:
    assert read_keys(ServerConfig(api_key=("one",))).tenants == ()
    two = read_keys(ServerConfig(api_key=("one", "two")))
    assert [tenant.name for tenant in two.tenants] == ["key-1", "key-2"]
    both = write(tmp_path, f'[[keys]]\nname = "alice"\nkey = "{SECRET}"\n')
    both = ServerConfig(api_key_file=both.api_key_file, api_key=("one", SECRET))
    assert sorted(caller.name for caller in read_keys(both).callers.values()) == ["alice", "key-1"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "keys = []",
        "keys = 3",
        "[[keys]]\nname = 'a'",
        f"[[keys]]\nname = 'a'\nkey = '{SECRET}'\nsha256 = '{'0' * 64}'",
        f"[[keys]]\nkey = '{SECRET}'",
        f"[[keys]]\nname = ''\nkey = '{SECRET}'",
        f"[[keys]]\nname = 'a b'\nkey = '{SECRET}'",
        f"[[keys]]\nname = 'a'\nkey = '{SECRET} {SECRET}'",
        "[[keys]]\nname = 'a'\nkey = ''",
        f"[[keys]]\nname = 'a'\nsha256 = '{SECRET}'",
        f"[[keys]]\nname = 'a'\nkey = '{SECRET}'\nrequests_per_minute = 0",
        f"[[keys]]\nname = 'a'\nkey = '{SECRET}'\nweight = 0",
        f"[[keys]]\nname = 'a'\nkey = '{SECRET}'\nrpm = 5",
        f"[[keys]]\nname = 'a'\nkey = '{SECRET}'\n[[keys]]\nname = 'b'\nkey = '{SECRET}'",
        f"[[keys]]\nname = 'a'\nkey = '{SECRET}'\n[[keys]]\nname = 'a'\nkey = 'x{SECRET}'",
        f"[[keys]]\nname = 'a'\nkey = '{SECRET}",
        f"{SECRET}",
    ],
)
def test_a_wrong_file_is_refused_and_nothing_of_a_key_is_repeated(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keys(write(tmp_path, text))
    assert caught.value.param == "api_key_file"
    assert SECRET not in caught.value.message
    assert caught.value.__cause__ is None


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_key_file: cannot be read"):
        read_keys(ServerConfig(api_key_file=str(tmp_path / "none.toml")))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0ms"), (0.02, "20ms"), (1.0, "1s"), (1.5, "1.5s"), (360.0, "6m0s"), (61.25, "1m1.25s")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_of_limits_that_there_are() -> None:
    assert ratelimit_headers(None) == ratelimit_headers(Quota()) == ()
    quota = Quota(limit_requests=60, remaining_requests=59, reset_requests=1.0)
    assert dict(ratelimit_headers(quota)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
    }


def test_a_key_at_its_limit_is_told_so() -> None:
    quota = Quota(limit_tokens=100, remaining_tokens=0, reset_tokens=60.0)
    told = answer(RateLimited("the limit of this API key is reached", retry_after=12.2, quota=quota))
    headers = dict(told.headers)
    assert (told.status, told.code) == (429, "rate_limit_exceeded")
    assert headers[b"x-ratelimit-remaining-tokens"] == b"0"
    assert headers[b"retry-after"] in (b"13", b"14")
    assert headers[b"x-should-retry"] == b"true"
    assert b'"type":"rate_limit_error"' in told.body
