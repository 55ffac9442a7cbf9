"""Tests that belong to no single route: probes, states, ids, mounting, other servers, raw sockets."""

import json

import anyio
import pytest
import uvicorn

from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.server.app.app import asgi
from troupellm.server.http.listener import bind
from troupellm.tests.support.clients.plain_http import NO_TLS
from troupellm.tests.support.servers.serving import eventually, http_request, lifespan_of, running_server, server_config

pytestmark = pytest.mark.anyio

PROMPT = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0}
LONG = PROMPT | {"max_tokens": 3000, "ignore_eos": True}


async def test_probes_version_load_and_metrics_answer(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for path in ("/health", "/readyz", "/livez", "/startupz", "/ping"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.head("/health")).content == b""
        assert "version" in (await client.get("/version")).json()
        assert (await client.get("/load")).json() == {"server_load": 0}
        metrics = await client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "troupe" in metrics.text


async def test_detokenize_gives_back_a_tokenized_text(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        tokens = (await client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True})).json()
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        bad = await client.post("/detokenize", json={"tokens": [10**6]})
        neither = await client.post("/tokenize", json={})
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == 6
    assert text == {"prompt": "héllo"}
    assert bad.json()["error"]["param"] == "tokens"
    assert neither.json()["error"]["param"] == "prompt"


async def test_texts_that_are_too_long_for_the_loop_are_tokenized_and_back(tiny_engine):
    text = "héllo " * 12_000
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        tokens = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        back = await client.post("/detokenize", json={"tokens": tokens["tokens"]})
        bad = await client.post("/detokenize", json={"tokens": [*tokens["tokens"], 10**6]})
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == len(text.encode())
    assert back.json() == {"prompt": text}
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "tokens")


async def test_request_ids_are_taken_when_plain_and_replaced_when_not(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        mine = await client.get("/v1/models", headers={"x-request-id": "abc-1"})
        odd = await client.get("/v1/models", headers={"x-request-id": "a b;<script>"})
        error = await client.get("/nowhere")
    assert mine.headers["x-request-id"] == "abc-1"
    assert "script" not in odd.headers["x-request-id"]
    assert error.headers["x-request-id"]


async def test_app_without_its_lifespan_says_so():
    app = asgi("never-loaded", config=server_config())

    async def outer(scope, receive, send):
        """A framework that does not forward lifespan to what it mounts."""
        if scope["type"] == "http":
            await app(scope, receive, send)
        else:
            raise NotImplementedError

    async with running_server(None, app=with_host(outer, app)) as served, served.client() as client:
        response = await client.post("/v1/completions", json=PROMPT)
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/livez")).status_code == 200
    assert response.status_code == 503
    assert "lifespan.startup" in response.json()["error"]["message"]
    assert response.headers["retry-after"]


async def test_loading_and_draining_are_503_with_the_reason(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        served.host.engine, served.host.loading = None, True
        loading = await client.post("/v1/completions", json=PROMPT)
        served.host.engine, served.host.draining = engine, True
        draining = await client.post("/v1/completions", json=PROMPT)
        ready = await client.get("/readyz")
    assert (loading.status_code, loading.json()["error"]["code"]) == (503, "starting")
    assert (draining.status_code, draining.json()["error"]["code"]) == (503, "draining")
    assert draining.headers["connection"] == "close"
    assert ready.status_code == 503


async def test_refusals_while_loading_say_how_far_it_is(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        served.host.engine, served.host.loading = None, True
        served.host.report(LoadProgress(phase="weights", done=3, total=4))
        refused = await client.post("/v1/completions", json=PROMPT)
        ready = await client.get("/readyz")
        served.host.engine = engine
        served.host.draining = True
        draining = await client.post("/v1/completions", json=PROMPT)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "starting"
    assert "weights 75%" in refused.json()["error"]["message"]
    assert refused.json()["progress"] == {"phase": "weights", "done": 3, "total": 4, "detail": ""}
    assert ready.json()["reasons"] == ["the model is loading (weights 75%)"]
    assert "progress" not in draining.json()


async def test_owning_app_opens_and_closes_its_engine(checkpoint):
    app = asgi(str(checkpoint), device="cpu", num_threads=1, kv_cache_memory_bytes=2**20)
    async with lifespan_of(app) as answers:
        async with running_server(None, app=app) as served, served.client() as client:
            assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200
        engine = app.host.engine
    assert answers == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert engine.state == "stopped"


async def test_owning_app_says_why_its_model_cannot_be_loaded(tmp_path):
    app = asgi(str(tmp_path), device="cpu")
    async with lifespan_of(app) as answers:
        assert answers == ["lifespan.startup.failed"]
        assert not app.host.alive()


async def test_mounted_below_a_prefix_by_another_app(tiny_engine):
    async with tiny_engine() as engine:
        inner = asgi(engine, prefix="")

        async def outer(scope, receive, send):
            if scope["type"] == "http":
                await inner(dict(scope, root_path="/llm"), receive, send)
            else:
                await inner(scope, receive, send)

        async with running_server(engine, app=with_host(outer, inner)) as served, served.client() as client:
            assert (await client.get("/llm/models")).json()["data"][0]["id"] == "tiny"
            assert (await client.get("/llm/v1/models")).status_code == 404


async def test_load_and_drain_count_only_what_uses_the_engine(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        connection = await served.raw(http_request("/v1/completions", LONG | {"stream": True}))
        await connection.read_until(b"data: ")
        assert (await client.get("/load")).json() == {"server_load": 1}
        for path in ("/metrics", "/version", "/v1/models", "/v1/models/tiny", "/health"):
            assert (await client.get(path)).status_code == 200
        assert [exchange.raw_path for exchange in served.host.in_flight] == [b"/v1/completions"]
        await connection.close()
        await eventually(lambda: not served.host.in_flight)
        await served.host.idle()


async def test_one_text_given_as_keys_is_one_key(tiny_engine):
    async with tiny_engine() as engine:
        for app in (asgi(engine, auth="secret"), asgi(engine, config=server_config(api_key="secret"))):
            async with running_server(engine, app=app) as served:
                for key, status in (("s", 401), ("e", 401), (None, 401), ("secret", 200)):
                    async with served.client(key=key) as client:
                        assert (await client.get("/v1/models")).status_code == status, key
        for refused in ({"auth": ""}, {"auth": ["a", ""]}, {"config": server_config(api_key=("",))}):
            with pytest.raises(ConfigError) as caught:
                asgi(engine, **refused)
            assert caught.value.param == "api_key"
        async with running_server(engine, app=asgi(engine, auth=None)) as served, served.client() as client:
            assert (await client.get("/v1/models")).status_code == 200


async def test_nothing_that_an_app_is_given_is_ignored(tiny_engine):
    for wrong in ({"api_key": "secret"}, {"max_num_seqs": 3}, {"prefix": "v1"}, {"prefix": "/v1/"}, {"prefix": "/"}):
        with pytest.raises(ConfigError) as caught:
            asgi(tiny_engine(), **wrong)
        assert [caught.value.param] == list(wrong)


@pytest.mark.parametrize("root", ["/v1", "/llm"])
async def test_root_path_of_a_proxy_that_strips_it_or_does_not(tiny_engine, root):
    config = server_config(root_path=root)
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        for path in ("/v1/models", f"{root}/v1/models", f"{root}/health", "/", f"{root}/"):
            assert (await client.get(path)).status_code == 200, path
        for path in (root, f"{root}{root}/v1/models", f"{root}x/v1/models"):
            assert (await client.get(path)).status_code == 404, path


GARBAGE = {
    b"nonsense\r\n\r\n": (400, "invalid_http"),
    b"GET /health HTTP/1.1\r\n\r\n": (400, "invalid_http"),
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n": (400, "invalid_http"),
    b"GET /health HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n": (400, "invalid_http"),
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n": (400, "invalid_http"),
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: odd\r\n\r\n": (400, None),
    b"GET /health HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 70_000 + b"\r\n\r\n": (431, "headers_too_large"),
    b"GET /health HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 17_000 + b"\r\n\r\n": (431, "headers_too_large"),
    b"GET /health?" + b"x" * 17_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n": (431, "headers_too_large"),
    b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X-Many: x\r\n" * 500 + b"\r\n": (431, "headers_too_large"),
}


async def test_bytes_that_are_no_request_get_an_error_in_the_apis_shape(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served:
        for request, (status, code) in GARBAGE.items():
            connection = await served.raw(request)
            head, _, body = (await connection.read_all()).partition(b"\r\n\r\n")
            await connection.close()
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert int(head.split()[1]) == status, (request[:80], head)
            assert code in (None, error["code"])
            assert head.startswith(b"HTTP/1.1 4")
            lines = head.lower().split(b"\r\n")
            assert b"connection: close" in lines
            assert b"content-type: application/json" in lines
            assert sum(line.startswith(b"x-request-id: ") for line in lines) == 1


def with_host(function, app):
    function.host = app.host
    return function


async def test_unknown_asgi_scopes_are_ignored_and_websockets_refused(tiny_engine):
    async with tiny_engine() as engine:
        app = asgi(engine)
        sent = []

        async def receive():
            return {"type": "websocket.connect"}

        async def send(message):
            sent.append(message["type"])

        await app({"type": "something-new"}, receive, send)
        await app({"type": "websocket", "path": "/", "headers": []}, receive, send)
    assert sent == ["websocket.close"]


@pytest.mark.parametrize(
    ("origin", "answered"),
    [
        (None, "websocket.accept"),
        (b"http://localhost:8000", "websocket.accept"),
        (b"https://friend.example", "websocket.accept"),
        (b"https://evil.example", "websocket.close"),
        (b"null", "websocket.close"),
    ],
)
async def test_pages_of_other_origins_open_no_websocket_to_a_mounted_app(tiny_engine, origin, answered):
    async with tiny_engine() as engine:
        plain = asgi(engine)
        allowing = asgi(engine, config=server_config(allowed_origins=("https://friend.example",)))
        messages, sent = iter(["websocket.connect", "websocket.disconnect"]), []

        async def receive():
            return {"type": next(messages)}

        async def send(message):
            sent.append(message["type"])

        headers = [(b"host", b"localhost:8000"), *([] if origin is None else [(b"origin", origin)])]
        app = allowing if origin == b"https://friend.example" else plain
        await app({"type": "websocket", "path": "/v1/responses", "headers": headers}, receive, send)
    assert sent == [answered]


async def test_a_websocket_is_refused_as_any_request_is(tiny_engine):
    asked = (
        b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA==\r\nX-Request-Id: mine\r\n\r\n"
    )
    async with tiny_engine() as engine, running_server(engine) as served:
        connection = await served.raw(asked)
        head, _, body = (await connection.read_all()).partition(b"\r\n\r\n")
        await connection.close()
        assert head.startswith(b"HTTP/1.1 426 Upgrade Required")
        assert b"x-request-id: mine" in head.lower()
        assert json.loads(body)["error"]["code"] == "websockets_not_served"
        async with served.client() as client:
            assert 'route="unmatched",status="426"' in (await client.get("/metrics")).text


async def test_the_mounted_app_runs_under_uvicorn(tiny_engine):
    async with tiny_engine() as engine:
        listener, url = bind(server_config())
        server = uvicorn.Server(uvicorn.Config(asgi(engine), log_config=None, lifespan="on", ws="none"))
        server.install_signal_handlers = lambda: None
        async with anyio.create_task_group() as group:
            group.start_soon(server._serve, [listener])
            async with served_client(url) as client:
                response = await client.post("/v1/completions", json=PROMPT | {"stream": True})
            server.should_exit = True
    assert response.text.endswith("data: [DONE]\n\n")


def served_client(url):
    import httpx

    return httpx.AsyncClient(base_url=url, trust_env=False, verify=NO_TLS, timeout=30)


async def test_declared_large_body_is_refused_before_it_is_sent(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served:
        connection = await served.raw(http_request("/v1/completions", b"", content_length=str(10**9)))
        answer = await connection.read_all()
        await connection.close()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in answer
    assert answer.count(b"HTTP/1.1") == 1


async def test_a_running_request_has_given_back_the_room_of_its_body(tiny_engine):
    asked = {"messages": [{"role": "user", "content": "x" * 100}], "max_tokens": 3000, "ignore_eos": True}
    async with tiny_engine() as engine, running_server(engine) as served:
        connection = await served.raw(http_request("/v1/chat/completions", asked | {"stream": True}))
        await connection.read_until(b"data: ")
        assert served.host.in_flight
        assert served.host.bodies.num_bytes == 0
        await connection.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_hanging_up_ends_the_request(tiny_engine, stream):
    async with tiny_engine() as engine, running_server(engine) as served:
        connection = await served.raw(http_request("/v1/completions", LONG | {"stream": stream}))
        await eventually(lambda: engine.snapshot().scheduler.running > 0)
        await connection.close()
        await eventually(lambda: not engine.snapshot().open_requests and not engine.snapshot().scheduler.running, 2)
        await eventually(lambda: not engine.snapshot().scheduler.blocks_used, 2)  # when the last plan is back


async def test_keep_alive_comments_fill_a_slow_start(tiny_engine):
    config = server_config(sse_keep_alive_interval=0.05)
    async with tiny_engine(max_num_seqs=1) as engine, running_server(engine, config) as served:
        async with engine.stream("busy", max_tokens=3000, ignore_eos=True, temperature=0.0) as busy:
            await anext(busy)
            connection = await served.raw(http_request("/v1/completions", PROMPT | {"stream": True}))
            seen = await connection.read_until(b": keep-alive\n")
        assert b"data:" not in seen
        rest = await connection.read_until(b"data: [DONE]\n\n")
        await connection.close()
    assert b"\n: keep-alive\n\r\n" in rest


async def test_access_log_has_one_line_per_request_and_none_for_probes(tiny_engine, caplog):
    caplog.set_level("INFO", logger="troupellm.access")
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        await client.get("/health")
        await client.post("/v1/completions", json=PROMPT)
        await client.get("/nowhere")
    lines = [record.getMessage() for record in caplog.records if record.name == "troupellm.access"]
    assert [line.split('"')[1] for line in lines] == ["POST /v1/completions", "GET /nowhere"]
    assert " 404 " in lines[1]


async def test_error_bodies_are_json_for_every_refusal(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for method, path, status in [("GET", "/x", 404), ("PUT", "/v1/models", 405), ("GET", "/v1/completions", 405)]:
            response = await client.request(method, path)
            assert response.status_code == status
            assert set(json.loads(response.content)["error"]) == {"message", "type", "param", "code"}
