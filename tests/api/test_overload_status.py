"""`overload_status`: what every door says where there is no room, and when a key has reached its limit."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.protocol.api.caller import NOBODY
from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.access.keys import read_keys
from troupellm.server.app.app import asgi
from troupellm.server.app.routes import routes
from troupellm.server.host.internal_requests import Inside
from troupellm.server.host.server_state import ServerState
from troupellm.tests.support.servers.front_pair import front_pair
from troupellm.tests.support.servers.serving import server_config

pytestmark = pytest.mark.anyio

SECRET = "sk-alice-0123456789"
MESSAGES = [{"role": "user", "content": "Hi"}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/embeddings": {"input": "Hi"},
}
STREAMING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}
ANTHROPIC_TYPES = {429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error"}
FULL = {"/v1/responses": 503, "/v1/messages": 529}
"""Status of a full waiting queue where clients of an API act on another one than 429."""


@asynccontextmanager
async def client_of(engine: Engine, config: ServerConfig, *, in_front: bool) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the engine's own app, or of one that reaches the engine as a front process does."""
    async with AsyncExitStack() as stack:
        served: Any = (await stack.enter_async_context(front_pair(engine))).remote if in_front else engine
        app = asgi(served, config=config)
        await stack.enter_async_context(app.host.running())
        headers = {"authorization": f"Bearer {SECRET}"}
        transport = httpx.ASGITransport(app)
        yield await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)
        )


async def check_doors(
    client: httpx.AsyncClient, usual: int, code: str, other: dict[str, int] | None = None
) -> list[httpx.Response]:
    """Every door refuses, streams before they begin, each in its own API's words."""
    answers = []
    for path, body in DOORS.items():
        status = (other or {}).get(path, usual)
        bodies = [body, body | {"stream": True}] if path in STREAMING else [body]
        for asked in bodies:
            answer = await client.post(path, json={"model": "tiny"} | asked)
            assert answer.status_code == status, (path, answer.text)
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.headers["x-should-retry"] == "true"
            error = answer.json()["error"]
            if path == "/v1/messages":
                assert error["type"] == ANTHROPIC_TYPES[status]
            else:
                wanted = "server_is_overloaded" if path == "/v1/responses" and code == "slow_down" else code
                assert (error["type"], error["code"]) == (TYPES[status], wanted if status == 503 else code)
            answers.append(answer)
    return answers


@pytest.mark.parametrize("in_front", [False, True], ids=["engine", "front"])
@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_waiting_room_has_the_status_that_was_chosen(
    tiny_engine: Any, status: Any, in_front: bool
) -> None:
    config = server_config(overload_status=status)
    async with (
        tiny_engine(max_num_seqs=1, max_num_queued_reqs=0) as engine,
        client_of(engine, config, in_front=in_front) as client,
        engine.stream("runs", max_tokens=4000, ignore_eos=True) as running,
    ):
        await running.opened()
        await check_doors(client, status, "slow_down", FULL if status == 429 else None)


@pytest.mark.parametrize("in_front", [False, True], ids=["engine", "front"])
@pytest.mark.parametrize("status", [429, 503])
async def test_a_key_at_its_limit_has_the_same_and_its_numbers(
    tiny_engine: Any, tmp_path: Path, status: Any, in_front: bool
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "alice"\nkey = "{SECRET}"\nrequests_per_minute = 1\n')
    config = server_config(api_key_file=str(path), overload_status=status)
    async with (
        tiny_engine(tenants=read_keys(config).tenants) as engine,
        client_of(engine, config, in_front=in_front) as client,
    ):
        first = await client.post("/v1/completions", json={"model": "tiny"} | DOORS["/v1/completions"])
        assert first.status_code == 200
        for answer in await check_doors(client, status, "rate_limit_exceeded"):
            assert answer.headers["x-ratelimit-limit-requests"] == "1"
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"


async def test_refusals_other_than_overload_keep_their_status(tiny_engine: Any) -> None:
    async with (
        tiny_engine() as engine,
        client_of(engine, server_config(overload_status=503), in_front=False) as client,
    ):
        answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": -1})
        assert answer.status_code == 400
        assert (await client.post("/v1/completions", json={"model": "nobody", "prompt": "Hi"})).status_code == 404


async def test_a_line_of_a_batch_waits_for_room_whatever_balancers_are_told(tiny_engine: Any) -> None:
    """Its asking goes on for as long as it is told 429; of a 503 it would give up after a few."""
    async with (
        tiny_engine(max_num_seqs=1, max_num_queued_reqs=0) as engine,
        engine.stream("runs", max_tokens=4000, ignore_eos=True) as running,
    ):
        await running.opened()
        host = ServerState(server_config(overload_status=503), engine)
        inside = Inside(host, routes(host, "/v1"))
        body = msgspec.json.encode({"model": "tiny"} | DOORS["/v1/completions"])
        refused = await inside.post("/v1/completions", body, caller=NOBODY)
    assert refused.status == 429
    assert refused.retry_after is not None
