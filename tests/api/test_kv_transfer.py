"""`kv_transfer_params` as the proxies of vLLM send them: one engine computes a prompt, another one continues."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from troupellm.tests.support.servers.processes import free_port
from troupellm.tests.support.servers.serving import events_of, eventually, running_server

pytestmark = pytest.mark.anyio

PROMPT = [3 + number * 7 % 250 for number in range(200)]
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
FIRST = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""A proxy sends it with the prompt, as in vLLM's example."""


def settings(folder: Path, role: str, **options: Any) -> dict[str, Any]:
    transfer = {"kv_connector": "tcp-peer", "kv_role": role, "kv_connector_extra_config": options}
    return {
        "kv_offloading_size": "8MiB",
        "kv_offload_timeout": 5.0,
        "prefix_hash_secret_file": str(folder / "secret"),
        "kv_transfer_config": transfer,
    }


@asynccontextmanager
async def client_of(engine: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with running_server(engine) as served, served.client() as client:
        yield client


async def test_a_prompt_is_computed_by_one_engine_and_its_answer_by_another(tiny_engine: Any, tmp_path: Path) -> None:
    port = free_port()
    async with (
        tiny_engine(**settings(tmp_path, "kv_producer", listen=port)) as first,
        tiny_engine(**settings(tmp_path, "kv_consumer", peers=[f"127.0.0.1:{port}"])) as second,
        client_of(first) as prefill,
        client_of(second) as decode,
    ):
        answer = await prefill.post("/v1/completions", json=BODY | {"max_tokens": 1, "kv_transfer_params": FIRST})
        given = answer.json()["kv_transfer_params"]
        assert given == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": given["remote_engine_id"],
            "remote_block_ids": [],
            "remote_host": "127.0.0.1",
            "remote_port": port,
            "tp_size": 1,
        }
        await eventually(lambda: first.snapshot().scheduler.offload.tiers[1].stores >= len(PROMPT) // 16)
        whole = (await prefill.post("/v1/completions", json=BODY)).json()
        assert "kv_transfer_params" not in whole
        rest = await decode.post("/v1/completions", json=BODY | {"kv_transfer_params": given})
        assert rest.json()["choices"][0]["text"] == whole["choices"][0]["text"]
        assert rest.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) // 16 * 16
        assert "kv_transfer_params" not in rest.json()
        assert "x-troupellm-skipped" not in rest.headers
        streamed = await decode.post("/v1/completions", json=BODY | {"stream": True, "kv_transfer_params": given})
        text = "".join(event["choices"][0]["text"] for event in events_of(streamed.text) if event["choices"])
        assert text == whole["choices"][0]["text"]


async def test_an_address_that_is_no_peer_is_ignored_and_named(tiny_engine: Any, tmp_path: Path) -> None:
    """No request makes an engine connect to an address of its own choice."""
    peers = [f"127.0.0.1:{free_port()}"]
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        port = elsewhere.getsockname()[1]
        given = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port, "remote_block_ids": [1]}
        await _ignored(tiny_engine, settings(tmp_path, "kv_consumer", peers=peers), given)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


async def _ignored(tiny_engine: Any, config: dict[str, Any], given: dict[str, Any]) -> None:
    async with tiny_engine(**config) as engine, client_of(engine) as client:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True}
        response = {"model": "tiny", "input": "Hi", "max_output_tokens": 3, "ignore_eos": True}
        bodies = {
            "/v1/completions": BODY,
            "/v1/chat/completions": chat,
            "/v1/responses": response,
            "/v1/messages": chat,
        }
        for path, body in bodies.items():
            answer = await client.post(path, json=body | {"kv_transfer_params": given})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-troupellm-skipped"] == f"peer 127.0.0.1-{given['remote_port']}"


async def test_chats_responses_and_messages_tell_where_their_blocks_are(tiny_engine: Any, tmp_path: Path) -> None:
    port = free_port()
    messages = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "ignore_eos": True}
    response = {"model": "tiny", "input": "Hi", "max_output_tokens": 1, "ignore_eos": True}
    bodies = {"/v1/chat/completions": messages, "/v1/responses": response, "/v1/messages": messages}
    async with tiny_engine(**settings(tmp_path, "kv_producer", listen=port)) as engine, client_of(engine) as client:
        for path, body in bodies.items():
            plain = (await client.post(path, json=body)).json()
            assert "kv_transfer_params" not in plain
            given = (await client.post(path, json=body | {"kv_transfer_params": FIRST})).json()["kv_transfer_params"]
            assert (given["remote_host"], given["remote_port"]) == ("127.0.0.1", port)
            assert given["do_remote_prefill"] is True
        for more, needed in (({"stream": True}, "stream: false"), ({"background": True}, "background: false")):
            answer = await client.post("/v1/responses", json=response | more | {"kv_transfer_params": FIRST})
            assert answer.status_code == 400
            assert f"do_remote_decode needs {needed}" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"do_remote_decode": True}, "needs a connector that produces"),
        ({"do_remote_prefill": True}, "needs a connector that consumes"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "got both"),
        ({"do_remote_decode": "yes"}, "Expected `bool | null`"),
        ("AAAA", "Expected `object`"),
        ({"a": 1}, "must have do_remote_decode or do_remote_prefill"),
    ],
)
async def test_parameters_that_cannot_be_followed_are_refused(tiny_engine: Any, given: Any, sentence: str) -> None:
    async with tiny_engine() as engine, client_of(engine) as client:
        answer = await client.post("/v1/completions", json=BODY | {"kv_transfer_params": given})
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "kv_transfer_params"
        for nothing in (None, {}, {"do_remote_decode": False, "do_remote_prefill": False}):
            answer = await client.post("/v1/completions", json=BODY | {"kv_transfer_params": nothing})
            assert answer.status_code == 200
