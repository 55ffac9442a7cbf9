import anyio
import pytest

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({"path": "/a", "raw_path": b"/a"}, b"/a"),
        ({"path": "/a", "raw_path": b"/a?x=1"}, b"/a"),
        ({"path": "/a/ü"}, "/a/ü".encode()),
        ({"path": "/llm/v1/models", "raw_path": b"/llm/v1/models", "root_path": "/llm"}, b"/v1/models"),
        ({"path": "/v1/models", "raw_path": b"/v1/models", "root_path": "/llm"}, b"/v1/models"),
        ({"path": "/llmx", "raw_path": b"/llmx", "root_path": "/llm"}, b"/llmx"),
        ({"path": "/../a", "raw_path": b"/%2e%2e/a"}, b"/%2e%2e/a"),
    ],
)
async def test_path_is_as_sent_without_the_mount_prefix(make_wire, make_exchange, scope, expected):
    assert make_exchange(make_wire(), **scope).raw_path == expected


async def test_watch_cancels_when_the_client_leaves(make_wire, make_exchange):
    wire = make_wire()
    wire._messages = [{"type": "http.request", "body": b""}, {"type": "http.disconnect"}]
    exchange = make_exchange(wire)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.watch, group.cancel_scope)
            await anyio.sleep_forever()
    assert exchange.gone


async def test_disconnect_after_the_answer_is_not_a_lost_client(make_wire, make_exchange):
    wire = make_wire()
    exchange = make_exchange(wire)
    await exchange.respond(200, b"{}")
    wire._messages = [{"type": "http.disconnect"}]
    await exchange.watch(anyio.CancelScope())
    assert not exchange.gone


async def test_head_has_the_length_and_no_body(make_wire, make_exchange):
    wire = make_wire()
    await make_exchange(wire, method="HEAD").respond(200, b"{}")
    assert wire.headers()[b"content-length"] == b"2"
    assert wire.body == b""
