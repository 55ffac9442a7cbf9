"""The page's routes over a socket; `test_page_browser` draws it."""

import json
import re
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from troupellm.protocol.messages.live_view import MOST_REQUESTS, LiveView
from troupellm.server.access.auth import admin_keys
from troupellm.server.app.app import App
from troupellm.server.host.server_state import ServerState
from troupellm.server.page.routes import FILES, routes
from troupellm.tests.support.servers.serving import eventually, guarded_app, running_server, server_config

pytestmark = pytest.mark.anyio

HTML = {"accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
MOST_BYTES = 120_000
ENDLESS = {"model": "tiny", "prompt": "Hi", "max_tokens": 1_500, "temperature": 0, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def page(engine: Any, **settings: Any):
    config = server_config(**settings)
    async with running_server(engine, config, app=guarded_app(engine, config)) as served, served.client() as client:
        yield served, client


async def view_of(client: Any, *, until: Callable[[LiveView], bool] = lambda view: True, **headers: str) -> LiveView:
    """The first frame that is as it is wanted."""
    async with client.stream("GET", "/debug/events", headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                view = msgspec.json.decode(line.removeprefix("data: "), type=LiveView)
                if until(view):
                    return view
    raise AssertionError("no such frame came")


async def test_the_page_and_its_files_are_small_and_strict(tiny_engine):
    async with tiny_engine() as engine, page(engine) as (_, client):
        root = await client.get("/", headers=HTML)
        files = [await client.get(f"/ui/{name}") for name in FILES]
        again = await client.get("/", headers=HTML | {"if-none-match": root.headers["etag"]})
        plain = await client.get("/")
    assert root.headers["content-type"] == "text/html; charset=utf-8"
    assert {answer.status_code for answer in files} == {200}
    assert sum(len(answer.content) for answer in [root, *files]) <= MOST_BYTES
    assert (again.status_code, again.content) == (304, b"")
    assert plain.text == "Ollama is running"
    for answer in [root, *files]:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://(?!\^?\|)[a-z0-9]", answer.text), "the page loads nothing from elsewhere"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", answer.text)
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", root.text)


async def test_the_page_is_off_beyond_loopback_and_when_it_is_refused(tiny_engine):
    async with tiny_engine() as engine:
        away = ({"ui": False}, {"host": "0.0.0.0"}, {"allowed_hosts": ("127.0.0.1", "models.example")})
        for settings in away:
            async with page(engine, **settings) as (_, client):
                root, file = await client.get("/", headers=HTML), await client.get("/ui/main.js")
                frames = await client.get("/debug/events")
            assert (root.text, file.status_code, frames.status_code) == ("Ollama is running", 404, 404)
        async with page(engine, host="0.0.0.0", ui=True) as (_, client):
            root, frames = await client.get("/", headers=HTML), await client.get("/debug/events")
        assert (root.status_code, "<title>" in root.text, frames.status_code) == (200, True, 404)
        async with running_server(engine) as served, served.client() as client:  # within another application
            assert "<title>" not in (await client.get("/", headers=HTML)).text


def test_a_socket_shows_the_page_only_when_it_is_asked_for():
    """Browsers reach it through a proxy alone, which may serve everybody."""
    for ui in (None, True):
        config = server_config(uds="/run/troupe.sock", ui=ui)
        shown = {route.path for route in routes(ServerState(config), mounted=False)}
        assert ("/" in shown, "/debug/events" in shown) == (ui is True, False)


async def test_another_host_is_refused(tiny_engine):
    async with tiny_engine() as engine, page(engine) as (_, client):
        rebound = [await client.get(path, headers=HTML | {"host": "evil.example"}) for path in ("/", "/debug/events")]
        asking = ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"})
        foreign = [await client.get("/debug/events", headers=headers) for headers in asking]
        head = await client.head("/debug/events")
    assert [answer.status_code for answer in rebound] == [421, 421]
    assert [answer.status_code for answer in foreign] == [403, 403]
    assert (head.status_code, head.content) == (200, b"")


async def test_frames_show_requests_and_blocks_and_no_text(tiny_engine):
    def decodes(view: LiveView) -> bool:
        rows = view.scheduler.requests
        return bool(rows) and rows[0].state == "decode" and bool(view.recent)

    async with tiny_engine(max_model_len=2048, max_num_seqs=1) as engine, page(engine) as (_, client):
        many = ENDLESS | {"prompt": ["a secret"] * 40}  # one after the other, so that one of them runs for seconds
        async with client.stream("POST", "/v1/completions", json=many) as answer:
            assert answer.status_code == 200
            view = await view_of(client, until=decodes)
    assert (view.state, view.running) == ("ready", 1)
    row = view.scheduler.requests[0]
    assert (row.state, view.scheduler.reasons[row.why], row.prompt_tokens) == ("decode", "", 8)
    assert row.generated > 0
    assert row.blocks > 0
    assert row.first_token_ms is not None
    assert sum(view.scheduler.cells[1::2]) <= 512
    assert max(view.scheduler.cells[::2]) >= 4, "a block has the colour of its request"
    assert view.recent[-1].decode_tokens == 1
    assert {"scheduler", "worker", "output"} <= {actor.name for actor in view.actors}
    assert b"secret" not in msgspec.json.encode(view)


async def test_names_of_keys_need_the_admin_key(tiny_engine, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nname = "alice"\nkey = "secret-of-alice"\n')
    from troupellm.server.access.keys import read_keys

    for admin, wanted in ((("boss",), "alice"), ((), "key 1")):
        settings = {"api_key_file": str(file), "admin_api_key": admin}
        tenants = read_keys(server_config(**settings)).tenants
        async with tiny_engine(max_model_len=2048, tenants=tenants) as engine, page(engine, **settings) as (_, client):
            key = {"authorization": "Bearer secret-of-alice"}
            refused = await client.get("/debug/events")
            with_api_key = key if not admin else {"authorization": "Bearer boss"}
            async with client.stream("POST", "/v1/completions", json=ENDLESS, headers=key) as answer:
                await anext(answer.aiter_lines())
                view = await view_of(client, **with_api_key)
            if admin:
                assert (await client.get("/debug/events", headers=key)).status_code == 401
        assert refused.status_code == 401
        assert [share.name for share in view.scheduler.keys] == [wanted]
        assert [row.key for row in view.scheduler.requests] == [0]


async def test_viewers_that_leave_leave_nothing_behind(tiny_engine):
    async with tiny_engine() as engine, page(engine) as (served, client):
        await view_of(client)
        for _ in range(5):
            await view_of(client)
        await eventually(lambda: not served.host.in_flight)
        table = {route.path: route for route in served.app.routes}
        frames = table["/debug/events"].handler.args[1]
        await eventually(lambda: frames.viewers == 0)
        asked = frames.number
        answer = await client.post("/v1/completions", json=ENDLESS | {"max_tokens": 50, "stream": False})
    assert answer.status_code == 200
    assert frames.number == asked, "no frame is made without a viewer"


async def test_a_frame_of_a_thousand_requests_is_small(tiny_engine):
    long = json.dumps({"model": "tiny", "prompt": ["Hi"] * 100, "max_tokens": 1_000, "ignore_eos": True})
    async with (
        tiny_engine(max_model_len=2048, max_num_seqs=8, max_num_queued_reqs=1_200) as engine,
        page(engine) as (_, client),
    ):
        import anyio

        async def ask() -> None:
            await client.post("/v1/completions", content=long, headers={"content-type": "application/json"})

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(ask)
            await eventually(lambda: engine.snapshot().scheduler.waiting > 900)
            view = await view_of(client)
            group.cancel_scope.cancel()
    assert len(msgspec.json.encode(view)) <= 16_384
    assert len(view.scheduler.requests) == MOST_REQUESTS
    assert view.scheduler.hidden == view.running + view.waiting + view.paused - MOST_REQUESTS
    reasons = {view.scheduler.reasons[row.why] for row in view.scheduler.requests if row.state == "waiting"}
    assert reasons == {"the batch is full"}


def test_an_admin_key_that_is_known_by_its_digest_guards_the_view():
    """API processes get digests, and a configuration without keys."""
    app = App(ServerState(server_config(ui=True)), admin=admin_keys(("boss",)), scopes=("open", "api", "admin"))
    assert [route.scope for route in app.routes if route.path == "/debug/events"] == ["admin"]
