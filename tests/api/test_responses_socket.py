"""The responses API over a WebSocket."""

import json

import pytest

from troupellm.tests.support.clients.web_socket import open_socket
from troupellm.tests.support.servers.serving import eventually, running_server, server_config

pytestmark = pytest.mark.anyio

GREEDY = {"temperature": 0, "max_output_tokens": 6, "ignore_eos": True, "store": False}


def text_of(response: dict) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


async def test_a_frame_is_answered_with_the_events_of_its_stream(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        whole = (await client.post("/v1/responses", json=GREEDY | {"input": "Hi"})).json()
        async with open_socket(served) as socket:
            first = await socket.ask(input="Hi", **GREEDY)
            second = await socket.ask(input="Hi", **GREEDY)
        metrics = (await client.get("/metrics")).text
    for frames in (first, second):
        assert [frame["type"] for frame in frames[:2]] == ["response.created", "response.in_progress"]
        assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))
        assert text_of(frames[-1]["response"]) == text_of(whole)
    assert 'route="/v1/responses",status="200"} 3.0' in metrics


async def test_a_connection_remembers_its_last_response(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served:
        async with open_socket(served) as socket:
            first = (await socket.ask(input="One", **GREEDY))[-1]["response"]
            second = (await socket.ask(input="Two", previous_response_id=first["id"], **GREEDY))[-1]["response"]
            lost = await socket.ask(input="Two", previous_response_id=first["id"], **GREEDY)
        async with open_socket(served) as socket:
            whole = (
                await socket.ask(
                    input=[
                        {"role": "user", "content": "One"},
                        *first["output"],
                        {"role": "user", "content": "Two"},
                    ],
                    **GREEDY,
                )
            )[-1]["response"]
            foreign = await socket.ask(input="Two", previous_response_id=second["id"], **GREEDY)
    assert text_of(second) == text_of(whole)
    for frames in (lost, foreign):
        assert [frame["type"] for frame in frames] == ["error"]
        assert (frames[0]["status"], frames[0]["error"]["code"]) == (400, "previous_response_not_found")


async def test_a_conversation_is_held_as_bytes_until_its_connection_ends(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served:
        async with open_socket(served) as socket:
            first = (await socket.ask(input="One", **GREEDY))[-1]["response"]
            await socket.ask(input="Two", previous_response_id=first["id"], **GREEDY)
            assert len(served.host.threads) == 1
        await eventually(lambda: not len(served.host.threads))


async def test_a_connection_goes_on_from_a_compaction(tiny_engine):
    talk = [{"role": "developer", "content": "Rules"}, {"role": "user", "content": "x" * 200}]
    async with tiny_engine() as engine, running_server(engine) as served, open_socket(served) as socket:
        first = (await socket.ask(input=[*talk, {"type": "compaction_trigger"}], **GREEDY))[-1]["response"]
        then = (await socket.ask(input="Go", previous_response_id=first["id"], **GREEDY))[-1]["response"]
        whole = [talk[0], *first["output"], {"role": "user", "content": "Go"}]
        same = (await socket.ask(input=whole, **GREEDY))[-1]["response"]
    assert [item["type"] for item in first["output"]] == ["compaction"]
    assert then["usage"]["input_tokens"] == same["usage"]["input_tokens"]


async def test_a_frame_that_waits_takes_room_at_once_or_is_refused(tiny_engine):
    config = server_config(max_bodies_bytes=1)
    async with tiny_engine() as engine, running_server(engine, config) as served, open_socket(served) as socket:
        await socket.send({"type": "response.create", "input": "Hi", **GREEDY, "max_output_tokens": 200})
        await socket.receive()
        await socket.send({"type": "response.create", "input": "Hi", **GREEDY})
        assert (await socket.until_end())[-1]["type"] == "response.incomplete"
        (refused,) = await socket.until_end()
        assert (refused["status"], refused["error"]["code"]) == (503, "server_is_overloaded")
        assert (await socket.ask(input="Hi", **GREEDY))[-1]["type"] == "response.incomplete"
        assert served.host.bodies.num_bytes == 0


async def test_a_prompt_is_computed_ahead(tiny_engine):
    long = "x" * 200
    async with tiny_engine() as engine, running_server(engine) as served, open_socket(served) as socket:
        warm = await socket.ask(input=long, generate=False, **GREEDY)
        then = (await socket.ask(input="Go", previous_response_id=warm[-1]["response"]["id"], **GREEDY))[-1]["response"]
    assert [frame["type"] for frame in warm] == ["response.created", "response.in_progress", "response.completed"]
    assert warm[-1]["response"]["output"] == []
    assert then["usage"]["input_tokens_details"]["cached_tokens"] >= 192


async def test_faults_are_frames_and_the_connection_goes_on(tiny_engine):
    async with (
        tiny_engine(max_model_len=64) as engine,
        running_server(engine) as served,
        open_socket(served) as socket,
    ):
        for sent, param in (
            ("nonsense", None),
            ("[]", None),
            ('{"type":"response.cancel"}', "type"),
            ('{"type":"response.create","input":"Hi","temperature":9}', "temperature"),
            ('{"type":"response.create","input":"Hi","background":true}', "background"),
            ('{"input":"Hi"}', "type"),
        ):
            await socket.send(sent)
            (frame,) = await socket.until_end()
            assert (frame["type"], frame["status"], frame["error"]["param"]) == ("error", 400, param), sent
        failed = (await socket.ask(input="x" * 300, **GREEDY))[-1]
        good = await socket.ask(input="Hi", **GREEDY)
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
    assert good[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(
    ("path", "key", "status", "code"),
    [
        ("/v1/responses", "wrong", 401, "invalid_api_key"),
        ("/v1/realtime", "secret", 426, "websockets_not_served"),
        ("/v1/chat/completions", "secret", 426, "websockets_not_served"),
    ],
)
async def test_handshakes_are_refused_as_requests_are(tiny_engine, path, key, status, code):
    async with tiny_engine() as engine, running_server(engine, server_config(api_key=("secret",))) as served:
        async with open_socket(served, path, authorization=f"Bearer {key}") as socket:
            assert socket.status == status
            assert json.loads(socket.refusal)["error"]["code"] == code
        async with open_socket(served, authorization="Bearer secret") as socket:
            assert (socket.status, (await socket.ask(input="Hi", **GREEDY))[-1]["type"]) == (101, "response.incomplete")


async def test_frames_that_are_no_text_or_too_large_close_the_connection(tiny_engine):
    config = server_config(max_body_bytes=1000)
    async with tiny_engine() as engine, running_server(engine, config) as served:
        for sent, code in ((b"\x00", 1003), ("x" * 1001, 1009)):
            async with open_socket(served) as socket:
                await socket.send(sent)
                assert await socket.receive() == {"closed": code}


async def test_a_client_that_leaves_ends_its_response(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served:
        async with open_socket(served) as socket:
            await socket.send({"type": "response.create", "input": "Hi", "max_output_tokens": 3000, "ignore_eos": True})
            while (await socket.receive())["type"] != "response.output_text.delta":
                pass
            assert len(served.host.in_flight) == 1
        await eventually(lambda: not served.host.in_flight)
        await eventually(lambda: engine.snapshot().scheduler.running == 0)
