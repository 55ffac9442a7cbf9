"""Files and batches through openai-python over real sockets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from openai import AsyncOpenAI
from serving import Served, running_server, server_config

from troupellm.server.app import App, asgi
from troupellm.server.batches.runner import held_folder, running_batches

pytestmark = pytest.mark.anyio


def line(number: int, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    given = {"model": "tiny", "prompt": f"line {number}", "max_tokens": 1 + number % 7, "temperature": 0}
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": given | {"ignore_eos": True} | body}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join((entry if isinstance(entry, bytes) else json.dumps(entry).encode()) + b"\n" for entry in lines)


def sdk(served: Served, key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


async def over(client: AsyncOpenAI, batch_id: str, timeout: float = 60) -> Any:
    with anyio.fail_after(timeout):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await anyio.sleep(0.02)


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    text = (await client.files.content(file_id)).text
    return [json.loads(entry) for entry in text.splitlines()]


@pytest.fixture
def serving(tiny_engine: Any, tmp_path: Path) -> Callable[..., Any]:
    """Serves a tiny model with a folder for files; the app's lifespan runs."""
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def serve(engine_settings: dict[str, Any] | None = None, **settings: Any) -> Any:
        config = server_config(files_dir=str(tmp_path / "files"), **settings)
        async with tiny_engine(**(engine_settings or {})) as engine:
            app: App = asgi(engine, config=config)
            with held_folder(config):
                async with (
                    running_server(engine, config, app=app) as served,
                    running_batches(engine, config, app.routes, app.host),
                ):
                    yield served

    return serve


async def test_a_batch_is_answered_in_the_order_of_its_lines(serving: Any) -> None:
    async with serving() as served, sdk(served) as client:
        bad = [b"{no json", line(3), {"custom_id": "x", "url": "/v1/completions", "body": {}, "method": "GET"}]
        good = [line(number) for number in range(40)]
        wrong = [
            line(90, url="/v1/embeddings"),
            line(91, temperature=-1),
            line(92, model="other"),
            line(93, stream=True),
        ]
        given = [*good[:20], *bad, *good[20:], b"", *wrong]
        file = await client.files.create(file=("in put.jsonl", jsonl(given)), purpose="batch")
        assert (file.filename, file.purpose, file.bytes) == ("in put.jsonl", "batch", len(jsonl(given)))
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"who": "me"}
        )
        assert (batch.status, batch.metadata) == ("validating", {"who": "me"})
        done = await over(client, batch.id)
        assert done.status == "completed"
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (47, 40, 7)
        assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
        output = await lines_of(client, done.output_file_id)
        assert [entry["custom_id"] for entry in output] == [f"c{number}" for number in range(40)]
        for number, entry in enumerate(output):
            body = entry["response"]["body"]
            assert (entry["error"], entry["response"]["status_code"]) == (None, 200)
            assert body["usage"]["completion_tokens"] == 1 + number % 7
        body = line(5)["body"]
        alone = await client.completions.create(
            **{name: body[name] for name in body if name != "ignore_eos"}, extra_body={"ignore_eos": True}
        )
        assert alone.choices[0].text == output[5]["response"]["body"]["choices"][0]["text"]
        errors = await lines_of(client, done.error_file_id)
        assert [entry["custom_id"] for entry in errors] == [None, "c3", "x", "c90", "c91", "c92", "c93"]
